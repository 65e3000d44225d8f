"""The core is pure, and no function of it outgrows a screen: read from the syntax trees."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "scheduler"
SOURCES = sorted(path.name for path in PACKAGE.glob("*.py"))
IMPURE = {"asyncio", "concurrent", "datetime", "multiprocessing", "random", "ray", "secrets", "threading", "time"}
IMPURE |= {"torch", "socket", "subprocess", "os"}
MAX_FUNCTION_LINES = 50


def tree_of(source: str) -> ast.Module:
    return ast.parse((PACKAGE / source).read_text())


def imported(source: str) -> set[str]:
    """Every module a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "actor.py"])
def test_core_has_no_ray_asyncio_torch_clock_or_chance(source: str) -> None:
    """Time comes in ticks, everything else in events; the same core runs under an actor and under a simulator."""
    roots = {name.split(".")[0] for name in imported(source)}
    assert roots & IMPURE == set()
    assert not any(name.startswith("numpy.random") for name in imported(source))


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "actor.py"])
def test_core_does_not_reach_for_chance_through_numpy_or_for_io(source: str) -> None:
    """Neither np.random nor open() or print()."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Attribute):
            assert node.attr != "random", f"{source}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "print", "input"), f"{source}:{node.lineno}"


@pytest.mark.parametrize("source", SOURCES)
def test_no_function_of_the_scheduler_outgrows_a_screen(source: str) -> None:
    """50 lines at most, docstring included."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{source}: {node.name} has {length} lines"
