"""What a process that runs a model is made to run on."""

import os
import subprocess
import sys

from worker.process import environment

BOUND = """
import os, threading
from worker.process import bind
go = threading.Event()
before = threading.Thread(target=go.wait)
before.start()
core = min(os.sched_getaffinity(0))
bind([core])
after = threading.Thread(target=go.wait)
after.start()
found = {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
go.set()
assert len(found) >= 3, found
assert all(cores == {core} for cores in found.values()), found
"""


def test_every_thread_of_a_bound_process_stays_on_its_cores() -> None:
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=60)


def test_every_pool_of_threads_has_the_size_asked_for() -> None:
    variables = environment(3)
    assert {variables[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "NUMBA")} == {"3"}
    assert "hugetlb=1" in variables["GLIBC_TUNABLES"]
    assert os.environ.get("NUMBA_NUM_THREADS") != "3"  # of this process, which is another


KEPT = """
import torch
torch.set_num_threads(1)
from worker.model import ModelConfig, random_model
from worker.fingerprint import self_test
config = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)
model = random_model(config, seed=0, dtype=torch.float32, num_blocks=32, block_size=16)
assert self_test(model) == []
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_kernels_leave_the_number_of_threads_as_it_was_set() -> None:
    """Numba sets it when it starts its own, and OpenMP is one library for both: a fingerprint would change."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    subprocess.run([sys.executable, "-c", KEPT], check=True, timeout=120, env=variables)
