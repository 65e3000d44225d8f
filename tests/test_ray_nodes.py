"""Three nodes on loopback, joined by a deployment that loses two of them, one after the other."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services
from ray.cluster_utils import Cluster

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.faults import Faults
from cluster.processes import descendants, variable
from tests.ray_streams import Asked, expected, random_requests, reference_model
from tests.test_ray_survival import resumed
from tests.tiny_model import save_tiny_model
from worker.actor import WORKER_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

HEAD = "127.0.0.2"
STORE_BYTES = 80 << 20
SOON_NOTICED = {"initial_delay_ms": 500, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 2}


@dataclass(slots=True, eq=False)
class Nodes:
    """The cluster and its nodes that run workers."""

    cluster: Any
    workers: list[Any]

    def remove_the_one_of(self, worker_id: str) -> None:
        """With everything on it."""
        [node] = [node for node in self.workers if worker_id in _workers_on(node)]
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def _workers_on(node: Any) -> set[str | None]:
    [raylet] = node.all_processes["raylet"]
    return {variable(pid, WORKER_VARIABLE) for pid in descendants(raylet.process.pid)}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in SOON_NOTICED.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    monkeypatch.setattr(services, "get_node_ip_address", lambda *_arguments: HEAD)  # the driver is on the head
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        options = {"object_store_memory": STORE_BYTES, "temp_dir": directory}
        head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": HEAD, **options}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            workers = [
                cluster.add_node(
                    num_cpus=1,
                    resources={"slipstream": 1},
                    node_ip_address=f"127.0.0.{3 + index}",
                    object_store_memory=STORE_BYTES,
                )
                for index in range(3)
            ]
            yield Nodes(cluster, workers)
        finally:
            ray.shutdown()
            cluster.shutdown()


async def lose(nodes: Nodes, address: str, requests: list[Asked], worker_id: str, num_left: int) -> list[list[int]]:
    """All streams, and a worker's node removed while they run; returns when so many workers are there."""
    async with Client(address) as client:
        tasks = [asyncio.create_task(resumed(client, asked, f"{worker_id}-{i}")) for i, asked in enumerate(requests)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in tasks)
        await asyncio.to_thread(nodes.remove_the_one_of, worker_id)
        got = await asyncio.gather(*tasks)
        async with asyncio.timeout(120):
            # Other processes have no events.
            while len((await client.astats())["scheduler"]["workers"]) != num_left:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    return got


def test_streams_outlive_the_nodes_of_their_workers(nodes: Nodes, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = reference_model(tmp_path)
    config = ServeConfig(
        model=str(tmp_path),
        address=nodes.cluster.address,
        data_parallel_size=2,
        port=0,
        metrics_port=0,
        max_num_seqs=8,
        num_gpu_blocks_override=32,
        threads=1,
        faults=Faults(delay_ms="fixed:20"),  # so that streams last
    )
    deployment = Deployment(config, tmp_path)
    try:
        requests = random_requests(6, 100, seed=7)
        # The third node takes the lost worker's place; then there is none left for the second.
        for worker_id, num_left in (("worker-0", 2), ("worker-1", 1)):
            got = asyncio.run(lose(nodes, deployment.endpoints[0], requests, worker_id, num_left))
            assert got == expected(model, requests)
    finally:
        deployment.stop(1.0)
