"""Runs the kernel tests under Triton's interpreter, which must be chosen before triton is first imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process whose Triton kernels run on CPU tensors."""
    # The kernels' products are tiny: threads would only get in each other's way.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", sorted(path.name for path in (ROOT / "tests").glob("interpreted_*.py")))
def test_kernels_equal_their_references_under_the_interpreter(module: str) -> None:
    child = run_interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{module}")
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"


def test_the_cpu_without_the_interpreter_is_refused_with_the_remedy() -> None:
    program = """
import torch
from worker.attention import KVCache
from worker.kernels.backend import TritonAttention
cache = KVCache(num_layers=1, num_blocks=2, block_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32)
try:
    TritonAttention(cache, num_heads=4)
except ValueError as error:
    assert "TRITON_INTERPRET=1" in str(error), error
else:
    raise SystemExit("not refused")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr


def run_compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The bench in a process whose Triton kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.bench.kernels", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_sample_of_the_kernels_compiles_for_every_target_without_spills_within_shared_memory() -> None:
    child = run_compiled("--compile-only", "--sample", "--json")
    assert child.returncode == 0, child.stdout + child.stderr
    compiled = json.loads(child.stdout)
    assert {kernel["target"] for kernel in compiled} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for kernel in compiled:
        assert kernel["registers"] > 0
        assert kernel["spill_bytes"] == 0
        assert kernel["shared_bytes"] <= kernel["shared_limit"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_kernel_compiles_for_every_target() -> None:
    child = run_compiled("--compile-only", "--json")
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_gpu_script_runs_through_on_the_cpu() -> None:
    child = run_interpreted("-m", "tests.bench.kernels", "--dry-run", "--json")
    assert child.returncode == 0, child.stdout + child.stderr
    report = json.loads(child.stdout)
    assert report["failures"] == []
    assert {"copy bandwidth", "script"} <= {row["name"] for row in report["rows"]}


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_gpu_script_holds_on_this_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    child = run_compiled("--gpu")
    assert child.returncode == 0, child.stdout + child.stderr
