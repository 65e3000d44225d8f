"""A real local Ray cluster with a tiny random model, seen through a real gRPC client.

Streams are compared with an undisturbed run of the same model in this process.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig, SpeculativeConfig
from tests.ray_streams import deployed, expected, random_requests, reference_model, scheduler_stats, streams
from tests.tiny_model import save_tiny_model
from worker.model import Model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return reference_model(directory)


@pytest.fixture(scope="module", params=["ray", "grpc"])
def deployment(request: pytest.FixtureRequest, directory: Path) -> Iterator[Deployment]:
    config = ServeConfig(
        model=str(directory),
        data_parallel_size=2,
        port=0,
        max_num_seqs=8,
        num_gpu_blocks_override=32,
        max_num_batched_tokens=48,
        threads=1,
        transport=request.param,
        speculative=SpeculativeConfig(num_speculative_tokens=4),  # drafts even where they do not pay
    )
    with deployed(config, directory) as deployment:
        yield deployment


def test_streams_over_ray_and_grpc_are_the_undisturbed_ones(deployment: Deployment, model: Model) -> None:
    requests = random_requests(12, 60, seed=1)
    got = asyncio.run(streams(deployment.endpoints[0], requests, disturb=False))
    assert got == expected(model, requests)
    stats = scheduler_stats(deployment.endpoints[0])
    assert len(stats["workers"]) == 2
    assert stats["num_accepted_tokens"] > 0
    assert stats["tokens_rolled_back"] > 0


def test_weights_are_swapped_under_running_streams_and_back(
    deployment: Deployment, model: Model, directory: Path, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, seed=1)
    requests = random_requests(6, 60, seed=3)
    with Client(deployment.endpoints[0]) as client:
        with pytest.raises(grpc.RpcError, match="there is no directory /nowhere"):
            client.swap_weights("/nowhere")
        client.swap_weights(str(tmp_path))
        got = asyncio.run(streams(deployment.endpoints[0], requests, disturb=False))
        assert got == expected(reference_model(tmp_path), requests) != expected(model, requests)
        client.swap_weights(str(directory))
    assert asyncio.run(streams(deployment.endpoints[0], requests, disturb=True)) == expected(model, requests)


def test_preemptions_and_resets_in_flight_change_no_stream(deployment: Deployment, model: Model) -> None:
    requests = random_requests(8, 100, seed=2)
    got = asyncio.run(streams(deployment.endpoints[0], requests, disturb=True))
    assert got == expected(model, requests)
    stats = scheduler_stats(deployment.endpoints[0])
    assert sum(stats["num_preemptions"].values()) > 0
    assert sum(stats["stale_tokens_dropped"].values()) > 0
