"""What becomes of the goodput when more is asked than can be served: requests that end within their deadline.

    python -m tests.bench.overload [--seconds N] [--json]

A tiny random model on a cluster of its own. The capacity is measured with clients that wait for their answers, and
the deadline is a few times what one of them waits; then requests come at random (Poisson) at shares of the capacity
and wait for nobody. Exit code 1 unless at three times the capacity the goodput is at least 0.9 of its peak and nearly
all that were admitted met their deadline.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.ray_environment import prepare

prepare()  # before anything imports ray

import grpc

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.processes import adopt_orphans
from tests.tiny_model import VOCAB_SIZE, save_tiny_model

LOADS = (0.5, 1.0, 2.0, 3.0)
MAX_NUM_SEQS = 8
NUM_CLIENTS = 2 * MAX_NUM_SEQS  # that wait: the batch is always full
MAX_TOKENS = 96
DEADLINE = 3.0  # in times of what such a client waits
WARM_UP_S = 3.0
GOAL_GOODPUT, GOAL_MET = 0.9, 0.99


class Load:
    """Asks one server for the same kind of answer, over and over."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)

    async def capacity(self, seconds: float) -> tuple[float, float]:
        """Requests per second, and the median seconds of one, with NUM_CLIENTS that wait."""
        await self._closed(WARM_UP_S)
        took_s = await self._closed(seconds)
        if not took_s:
            raise SystemExit(f"no request ended within {seconds:g} s: give it more --seconds, or a quieter machine")
        return len(took_s) / seconds, statistics.median(took_s)

    async def open(self, rate: float, seconds: float, deadline_s: float) -> Counter[str]:
        """How the requests ended that came at this rate: met, refused, late, or another status."""
        ended: Counter[str] = Counter()

        async def one() -> None:
            ended[await self._outcome(deadline_s)] += 1

        async with asyncio.TaskGroup() as requests:
            due_s = time.monotonic()
            end_s = due_s + seconds
            while (due_s := due_s + self._rng.expovariate(rate)) < end_s:
                await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
                requests.create_task(one())
        return ended

    async def _outcome(self, deadline_s: float) -> str:
        began_s = time.monotonic()
        try:
            await self._ask(timeout_s=deadline_s)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return "refused"
            return "late" if code is grpc.StatusCode.DEADLINE_EXCEEDED else code.name
        return "met" if time.monotonic() - began_s <= deadline_s else "late"

    async def _closed(self, seconds: float) -> list[float]:
        """How long each request took that ended in so many seconds."""
        took_s: list[float] = []
        end_s = time.monotonic() + seconds

        async def one() -> None:
            while (began_s := time.monotonic()) < end_s:
                await self._ask()
                if time.monotonic() < end_s:
                    took_s.append(time.monotonic() - began_s)

        await asyncio.gather(*(one() for _ in range(NUM_CLIENTS)))
        return took_s

    async def _ask(self, **options: Any) -> None:
        prompt = [self._rng.randrange(3, VOCAB_SIZE) for _ in range(self._rng.randrange(8, 40))]
        await self._client.generate(
            prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.8,
            ignore_eos=True,
            seed=self._rng.randrange(1 << 32),
            **options,
        ).aresult()


async def measured(address: str, seconds: float, seed: int) -> dict[str, Any]:
    """One JSON object."""
    async with Client(address) as client:
        load = Load(client, seed)
        capacity, took_s = await load.capacity(seconds)
        deadline_s = DEADLINE * took_s
        rows: list[dict[str, Any]] = []
        for share in LOADS:
            ended = await load.open(share * capacity, seconds, deadline_s)
            admitted = sum(ended.values()) - ended["refused"]
            rows.append(
                {
                    "load": share,
                    "requests": sum(ended.values()),
                    "ended": dict(ended),
                    "goodput_per_s": round(ended["met"] / seconds, 2),
                    "met_of_admitted": round(ended["met"] / admitted, 4) if admitted else None,
                }
            )
        shed = (await client.astats())["scheduler"]["num_shed"]
    peak = max(row["goodput_per_s"] for row in rows)
    return {
        "capacity_per_s": round(capacity, 2),
        "deadline_s": round(deadline_s, 3),
        "loads": rows,
        "shed": shed,
        "goodput_ratio": round(rows[-1]["goodput_per_s"] / peak, 3),
        "met_of_admitted": rows[-1]["met_of_admitted"],
    }


def is_good(summary: dict[str, Any]) -> bool:
    """Whether the goals hold at the highest load."""
    return summary["goodput_ratio"] >= GOAL_GOODPUT and (summary["met_of_admitted"] or 0.0) >= GOAL_MET


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    options = parser.parse_args(arguments)
    adopt_orphans()
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory))
        config = ServeConfig(
            model=directory, port=0, metrics_port=0, max_num_seqs=MAX_NUM_SEQS, num_gpu_blocks_override=128, threads=1,
            worker_down_after_s=60.0,  # a busy machine is not what is measured
        )  # fmt: skip
        deployment = Deployment(config, Path(directory))
        try:
            summary = asyncio.run(measured(deployment.endpoints[0], options.seconds, options.seed))
        finally:
            deployment.stop(1.0)
    if options.json:
        print(json.dumps(summary))
    else:
        print(f"capacity {summary['capacity_per_s']} requests/s, deadline {summary['deadline_s']} s")
        for row in summary["loads"]:
            ended = ", ".join(f"{count} {how}" for how, count in sorted(row["ended"].items()))
            goodput, met = row["goodput_per_s"], row["met_of_admitted"]
            print(f"{row['load']:3}x  goodput {goodput:6.2f}/s  met of admitted {met}  {ended}")
        good = "holds" if is_good(summary) else "DOES NOT HOLD"
        print(f"at {LOADS[-1]:g}x: goodput {summary['goodput_ratio']} of its peak (goal {GOAL_GOODPUT}): {good}")
    return 0 if is_good(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
