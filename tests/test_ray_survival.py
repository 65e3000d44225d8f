"""What only a real Ray cluster shows: a process that is stopped, a front end that is killed, a driver that is gone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.local_ray import NAMESPACE, LocalRay
from cluster.processes import command_line, descendants, variable
from tests.ray_streams import Asked, deployed, expected, random_requests, reference_model
from tests.tiny_model import save_tiny_model
from worker.actor import WORKER_VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

# Starts what a deployment starts and ends without a word: the scheduler is detached, and has no workers to find.
DRIVER = f"""
import sys
from cluster.ray_environment import prepare
prepare()
import ray
from cluster.link import RayWorkerPort
from scheduler.actor import Liveness, SchedulerActor
from scheduler.events import SchedulerConfig
ray.init(address=sys.argv[1], namespace="{NAMESPACE}", log_to_driver=False, _node_ip_address="127.0.0.2")
actor = ray.remote(lifetime="detached", name="scheduler", num_cpus=0, max_restarts=-1, max_task_retries=0)(
    SchedulerActor
).remote(SchedulerConfig(), {{"worker-0": RayWorkerPort("worker-0")}}, Liveness())
print(ray.get(actor.start.remote()))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def deployment(directory: Path) -> Iterator[Deployment]:
    config = ServeConfig(
        model=str(directory),
        data_parallel_size=2,
        port=0,
        metrics_port=0,
        max_num_seqs=8,
        num_gpu_blocks_override=32,
        threads=1,
        worker_hung_after_s=2.0,
    )
    with deployed(config, directory) as deployment:
        yield deployment


async def resumed(client: Client, asked: Asked, request_id: str) -> list[int]:
    """One stream that may pause."""
    token_ids: list[int] = []
    async for output in client.generate(
        asked.prompt,
        request_id=request_id,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=1.0,
        seed=asked.seed,
        logit_bias=dict(asked.sampling.logit_bias),
        ignore_eos=True,
        resume=True,
    ):
        assert output.offset == len(token_ids)
        token_ids.extend(output.token_ids)
    return token_ids


async def streams_while(deployment: Deployment, requests: list[Asked], pid: int, number: int) -> list[list[int]]:
    """All of them, a signal sent to a process while they run; returns when every worker is there."""
    async with Client(deployment.endpoints[0]) as client:
        tasks = [asyncio.create_task(resumed(client, asked, f"r{i}")) for i, asked in enumerate(requests)]
        await asyncio.sleep(0.1)
        os.kill(pid, number)
        watching = asyncio.create_task(keep(deployment))
        got = await asyncio.gather(*tasks)
        async with asyncio.timeout(120):
            # Other processes have no events.
            while len((await client.astats())["scheduler"]["workers"]) < 2 or command_line(pid):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        watching.cancel()
    return got


async def keep(deployment: Deployment) -> None:
    """As `serve` does."""
    while True:
        assert await asyncio.to_thread(deployment.wait, 0.2) is None


def process_of(title: str, worker: str | None = None) -> int:
    [pid] = [
        pid
        for pid in descendants(os.getpid())
        if command_line(pid).startswith(title) and worker in (None, variable(pid, WORKER_VARIABLE))
    ]
    return pid


def test_a_stopped_worker_is_ended_and_its_streams_go_on_elsewhere(deployment: Deployment, directory: Path) -> None:
    requests = random_requests(8, 100, seed=5)
    stopped = process_of("ray::WorkerActor", "worker-0")
    got = asyncio.run(streams_while(deployment, requests, stopped, signal.SIGSTOP))
    assert got == expected(reference_model(directory), requests)
    assert process_of("ray::WorkerActor", "worker-0") != stopped


def test_a_killed_front_end_listens_again_where_it_did(deployment: Deployment, directory: Path) -> None:
    requests = random_requests(8, 100, seed=6)
    killed = process_of("ray::FrontEndActor")
    got = asyncio.run(streams_while(deployment, requests, killed, signal.SIGKILL))
    assert got == expected(reference_model(directory), requests)
    assert process_of("ray::FrontEndActor") != killed


def test_a_scheduler_begins_again_without_the_process_that_began_it() -> None:
    cluster = LocalRay(num_cpus=1)
    try:
        address = ray.get_runtime_context().gcs_address
        driver = subprocess.run(
            [sys.executable, "-c", DRIVER, address], capture_output=True, text=True, timeout=120, check=True
        )
        first = int(driver.stdout.split()[-1])
        scheduler: Any = ray.get_actor("scheduler")
        found: Any = ray.get(scheduler.start.remote())
        assert found == first
        os.kill(process_of("ray::SchedulerActor"), signal.SIGKILL)
        assert started_again(scheduler) > first
        ray.kill(scheduler)
    finally:
        cluster.stop()


def started_again(scheduler: Any) -> int:
    """The number of the life after the one that was killed."""
    deadline_s = time.monotonic() + 60.0
    while True:
        try:
            life: Any = ray.get(scheduler.start.remote(), timeout=30.0)
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        else:
            return int(life)
