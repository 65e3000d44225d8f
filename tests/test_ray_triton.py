"""Two worker actors on the Triton kernels, under the interpreter, against the CPU backend's tokens."""

import asyncio
from pathlib import Path

import pytest

from cluster.config import ServeConfig, SpeculativeConfig
from tests.ray_streams import deployed, expected, random_requests, reference_model, scheduler_stats, streams
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_triton_kernels_under_the_interpreter_give_the_cpu_backends_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = reference_model(tmp_path)
    config = ServeConfig(
        model=str(tmp_path),
        data_parallel_size=2,
        port=0,
        attention="triton",
        dtype="float32",
        max_num_seqs=4,
        num_gpu_blocks_override=24,
        max_model_len=96,
        speculative=SpeculativeConfig(num_speculative_tokens=3),
        threads=1,
        worker_down_after_s=60.0,
    )
    requests = random_requests(4, 48, seed=3)
    with deployed(config, tmp_path) as deployment:
        got = asyncio.run(streams(deployment.endpoints[0], requests, disturb=True))
        stats = scheduler_stats(deployment.endpoints[0])
    assert got == expected(model, requests)
    assert stats["num_accepted_tokens"] > 0
    assert set(stats["num_preemptions"]) >= {"requested", "reset"}
