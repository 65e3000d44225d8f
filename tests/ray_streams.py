"""Requests over a real local Ray cluster and gRPC, and what their streams must be."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.processes import wait_until_gone
from scheduler.request import SamplingParams
from tests.oracle import undisturbed
from tests.tiny_model import VOCAB_SIZE
from worker.model import Model, load_model

BLOCK_SIZE = 16
NUM_DISTURBANCES = 4
DISTURB_EVERY_S = 0.03
FAR_ABOVE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, and how it is sampled."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    few: tuple[int, ...] = ()  # these tokens far above all others: a stream in which n-grams come again

    @property
    def sampling(self) -> SamplingParams:
        """What the core is asked for."""
        bias = tuple((token, FAR_ABOVE) for token in self.few)
        return SamplingParams(temperature=self.temperature, seed=self.seed, logit_bias=bias)

    @property
    def arguments(self) -> dict[str, Any]:
        """What Client.generate is called with."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "seed": self.seed,
            "logit_bias": dict(self.sampling.logit_bias),
            "ignore_eos": True,
        }


def random_requests(count: int, max_tokens: int, seed: int) -> list[Asked]:
    """Prompts with repetitions; greedy and sampled, every other pair of few tokens: n-gram drafts find something."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(3, 12))]
        requests.append(
            Asked(
                prompt=tuple(phrase * rng.randrange(1, 4)),
                max_tokens=rng.randrange(max_tokens // 2, max_tokens),
                temperature=(0.0, 0.8)[index % 2],
                seed=rng.randrange(1 << 32),
                few=tuple(dict.fromkeys(phrase[:3])) if index % 4 < 2 else (),
            )
        )
    return requests


def reference_model(directory: Path) -> Model:
    """The same model in this process, in fp32 on the CPU backend."""
    return load_model(
        directory, dtype=torch.float32, device="cpu", attention="cpu", num_blocks=32, block_size=BLOCK_SIZE
    )


def expected(model: Model, requests: Sequence[Asked]) -> list[list[int]]:
    """What each stream must be, on one thread like the workers: more only get in each other's way."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [undisturbed(model, asked.prompt, asked.sampling, asked.max_tokens).token_ids for asked in requests]
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def deployed(config: ServeConfig, directory: Path) -> Iterator[Deployment]:
    """A deployment that leaves no process and no file behind, or the test fails."""
    deployment = Deployment(config, directory)
    processes = deployment.ray.processes()
    assert len(processes) > 4
    try:
        yield deployment
    finally:
        deployment.stop(grace_s=1.0)
    assert wait_until_gone(processes, 5.0) == []
    assert not deployment.ray.directory.exists()


async def stream(client: Client, asked: Asked, request_id: str, taken: dict[str, list[int]]) -> None:
    """Collects one stream, checking that every token comes once and in its place."""
    token_ids = taken.setdefault(request_id, [])
    async for output in client.generate(**asked.arguments, request_id=request_id):
        assert output.offset == len(token_ids)
        token_ids.extend(output.token_ids)


async def streams(address: str, requests: Sequence[Asked], *, disturb: bool) -> list[list[int]]:
    """All requests at once; with `disturb` they are preempted and their KV is reset while they run."""
    disturbances = NUM_DISTURBANCES if disturb else 0
    taken: dict[str, list[int]] = {}
    async with Client(address) as client:
        tasks = [asyncio.create_task(stream(client, asked, f"r{index}", taken)) for index, asked in enumerate(requests)]
        everything = asyncio.gather(*tasks)
        while disturbances and not everything.done():
            await asyncio.wait({everything}, timeout=DISTURB_EVERY_S)
            if not any(taken.values()):
                continue
            for request_id in list(taken):
                await client.apreempt(request_id)
            await asyncio.wait({everything}, timeout=DISTURB_EVERY_S)
            await client.areset_prefix_cache(reset_running=True)
            disturbances -= 1
        await everything
        await assert_idle(client)
    return [taken[f"r{index}"] for index in range(len(requests))]


async def assert_idle(client: Client) -> None:
    """Every frame settles, every block comes back, nothing is owed."""
    async with asyncio.timeout(10):
        while True:
            scheduler = (await client.astats())["scheduler"]
            if not any(worker["num_steps_in_flight"] for worker in scheduler["workers"]):
                break
            await asyncio.sleep(0.02)
    assert scheduler["async_tokens_to_discard"] == scheduler["placeholders"] == 0
    assert all(worker["num_free_blocks"] == worker["num_blocks"] for worker in scheduler["workers"])


def scheduler_stats(address: str) -> dict[str, Any]:
    with Client(address) as client:
        scheduler: dict[str, Any] = client.stats()["scheduler"]
    return scheduler
