"""Who may import whom, read from the syntax trees: an import inside a function counts like any other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("scheduler", "worker", "cluster", "protos")
SHELLS = ("scheduler/actor.py", "worker/actor.py")
MESSAGES = ("protos", "smg_grpc_proto", "google.protobuf")


def _sources(package: str) -> list[str]:
    paths = [path for path in sorted((ROOT / package).rglob("*.py")) if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def _imports(source: str) -> set[str]:
    """Every absolute module name a file imports; `from a import b` counts as `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _imports_any(source: str, modules: tuple[str, ...]) -> list[str]:
    return sorted(
        name for name in _imports(source) if any(name == module or name.startswith(module + ".") for module in modules)
    )


ALL_SOURCES = [source for package in OURS for source in _sources(package)]


@pytest.mark.parametrize("source", _sources("scheduler"))
def test_scheduler_imports_nobody_of_ours(source: str) -> None:
    assert _imports_any(source, ("worker", "cluster", "protos", "tests")) == []


@pytest.mark.parametrize("source", [source for source in _sources("scheduler") if source not in SHELLS])
def test_scheduler_core_knows_no_ray_asyncio_torch_clock_or_chance(source: str) -> None:
    forbidden = ("ray", "asyncio", "torch", "time", "datetime", "random", "numpy.random", "threading", "secrets")
    assert _imports_any(source, forbidden) == []


@pytest.mark.parametrize("source", _sources("worker"))
def test_worker_imports_only_the_shared_vocabulary_of_the_scheduler(source: str) -> None:
    allowed = ("scheduler.step", "scheduler.request")
    foreign = _imports_any(source, ("scheduler", "cluster", "protos", "tests"))
    assert [name for name in foreign if not name.startswith(allowed)] == []


@pytest.mark.parametrize("source", [*_sources("scheduler"), *_sources("worker"), *_sources("protos")])
def test_nobody_imports_cluster(source: str) -> None:
    assert _imports_any(source, ("cluster",)) == []


@pytest.mark.parametrize("source", ALL_SOURCES)
def test_ray_stays_in_the_shells_and_in_cluster(source: str) -> None:
    if source in SHELLS or source.startswith("cluster/"):
        return
    assert _imports_any(source, ("ray",)) == []


@pytest.mark.parametrize("source", ALL_SOURCES)
def test_protobuf_messages_stay_in_the_codec_and_the_servicers(source: str) -> None:
    names = ("codec", "step_codec", "status", "server", "client")
    touches_messages = source in [f"cluster/{name}.py" for name in names]
    if touches_messages or source.endswith("_service.py") or source.startswith("protos/"):
        return
    assert _imports_any(source, MESSAGES) == []


@pytest.mark.parametrize("source", ALL_SOURCES)
def test_no_file_is_a_drawer_for_leftovers(source: str) -> None:
    assert not {"utils", "util", "common", "helpers", "manager", "misc"} & set(Path(source).with_suffix("").parts)
