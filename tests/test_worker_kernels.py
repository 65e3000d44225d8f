"""Runs the kernel tests under Triton's interpreter, which must be chosen before triton is first imported."""

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
