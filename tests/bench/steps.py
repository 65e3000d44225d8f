"""What a worker's step costs on this machine, and what surrounds it.

    python -m tests.bench.steps [--threads N] [--json]

* idle: time a worker waits between steps over Ray while it has requests, beside the time of its steps, with one and
  with two steps in flight, 1 and 8 requests, no drafts.
* context: a decode step of one request at 256 to 8,192 tokens of context, beside the time that its bytes take at the
  speed at which this machine reads memory (all weights, keys and values once).
* memory: tokens of KV that fit a pool, beside its bytes over a token's.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.ray_environment import prepare

prepare()  # before anything imports ray

import torch

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig, SpeculativeConfig
from cluster.engine import Engine
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import Sizes, default_threads, size
from scheduler.request import SamplingParams
from worker.actor import build
from worker.fingerprint import make_batch
from worker.model import Model
from worker.process import environment, restart_with

CONTEXTS = (256, 1024, 4096, 8192)
REQUESTS = (1, 8)
FLIGHTS = (1, 2)
POOL_BLOCKS = 256
READ_BYTES = 1 << 28
STEPS_LEFT_OUT = 3  # the first of a run: prompts


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Of the seconds of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def idle_shares(config: ServeConfig, display: Display) -> list[dict[str, float | int]]:
    """Idle time over step time of one worker, for each number of steps in flight and of requests."""
    rows: list[dict[str, float | int]] = []
    directory = resolve_model(config.model, display)
    for flight in FLIGHTS:
        deployment = Deployment(replace(config, max_steps_in_flight=flight), directory, display.phase)
        try:
            for requests in REQUESTS:
                steps = asyncio.run(_steps_of(deployment.endpoints[0], requests))
                busy_ns = sum(step["verify_ns"] + step["draft_ns"] for step in steps)
                idle_ns = sum(step["idle_ns"] for step in steps)
                rows.append(
                    {
                        "steps_in_flight": flight,
                        "requests": requests,
                        "steps": len(steps),
                        "step_ms": round(busy_ns / len(steps) / 1e6, 2),
                        "idle_ms": round(idle_ns / len(steps) / 1e6, 3),
                        "idle_share": round(idle_ns / busy_ns, 4),
                    }
                )
        finally:
            deployment.stop()
    return rows


async def _steps_of(address: str, requests: int) -> list[dict[str, Any]]:
    """The decode steps of some requests that run together."""
    async with Client(address) as client:
        before = (await client.aview())["trail"]["number"]
        prompts = [[index + 40] * 12 for index in range(requests)]
        await asyncio.gather(
            *(client.generate(prompt, max_tokens=192, ignore_eos=True, temperature=0.0).aresult() for prompt in prompts)
        )
        trail = (await client.aview(before, frames=True))["trail"]
    steps = [step for step in trail["steps"] if step["received_ns"] is not None]
    full = [step for step in steps if len(step["frames"]) == requests]
    return full[STEPS_LEFT_OUT:]


def context_costs(model: Model, threads: int) -> list[dict[str, float | int]]:
    """Milliseconds of a decode step by context, and those its bytes would take."""
    torch.set_num_threads(threads)
    memory = torch.ones(READ_BYTES // 4, dtype=torch.int32)
    bytes_per_s = READ_BYTES / median_s(memory.amax, 9)
    weight_bytes = sum(linear.num_bytes for linear in model.linears.values())
    config, block_size = model.config, model.kv_cache.block_size
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.kv_cache.key.element_size()
    rows: list[dict[str, float | int]] = []
    for context in CONTEXTS:
        batch = make_batch([([7], context - 1, list(range(-(-context // block_size))))], block_size)
        step_s = median_s(lambda batch=batch: model.logits(model.forward(batch)[batch.logits_indices]), 15)  # type: ignore[misc]
        moved = weight_bytes + context * token_bytes
        rows.append(
            {
                "context": context,
                "step_ms": round(step_s * 1e3, 2),
                "bytes_ms": round(moved / bytes_per_s * 1e3, 2),
                "megabytes": round(moved / 1e6, 1),
                "read_gb_per_s": round(bytes_per_s / 1e9, 1),
            }
        )
    return rows


def memory_that_fits(sizes: Sizes) -> dict[str, float | int]:
    """Tokens in the KV of a full pool, beside the pool's bytes over those of a token."""
    [spec] = sizes.workers
    runner, _ = build(replace(spec, num_blocks=POOL_BLOCKS, max_model_len=POOL_BLOCKS * spec.block_size // 4))
    engine = Engine([runner], replace(sizes.scheduler, max_model_len=POOL_BLOCKS * spec.block_size // 4))
    cache = runner.model.kv_cache
    pool_bytes = cache.key.nbytes + cache.value.nbytes
    length = POOL_BLOCKS * spec.block_size // 4
    for index in range(4):
        engine.submit([index + 40] * (length - 8), SamplingParams(temperature=0.0), 8)
    most = 0
    while any(output.finish is None for output in engine.outputs.values()):
        engine.step()
        [worker] = engine.scheduler.workers.values()
        most = max(most, int(worker.rows.num_computed[worker.rows.order()].sum()))
    bound = pool_bytes / (spec.bytes_per_block / spec.block_size)
    return {"pool_bytes": pool_bytes, "tokens": most, "bound": round(bound), "share": round(most / bound, 4)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    threads = arguments.threads or default_threads(1)
    restart_with(environment(threads))
    config = ServeConfig(
        model=arguments.model, port=0, threads=threads, metrics_port=0,
        speculative=SpeculativeConfig(num_speculative_tokens=0),
    )  # fmt: skip
    with Display() as display:
        sizes = size(config, resolve_model(config.model, display))
        [spec] = sizes.workers
        with display.phase("Context"):
            runner, _ = build(replace(spec, num_blocks=CONTEXTS[-1] // spec.block_size))
            context = context_costs(runner.model, threads)
            del runner
        with display.phase("Memory"):
            memory = memory_that_fits(sizes)
        idle = idle_shares(config, display)
    found = {"threads": threads, "idle": idle, "context": context, "memory": memory}
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
