"""What a killed worker costs its clients: the longest pause of a stream, and how soon throughput is back.

    python -m tests.bench.recovery [--kills N] [--model NAME] [--json]

Two workers and clients that never wait long: as many streams at once, one after the other. Each round one of the
workers is killed (SIGKILL) while both decode; its streams go on at the other one until Ray has begun it anew. Exit
code 1 unless no stream paused for 6 s and the throughput was back at 0.9 of what it was before within 15 s.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.ray_environment import prepare

prepare()  # before anything imports ray

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.model_source import resolve_model
from cluster.processes import adopt_orphans, command_line, descendants
from cluster.progress import Display

TITLE = "ray::WorkerActor"
NUM_WORKERS = 2
NUM_CLIENTS = 8
BEFORE_S, AFTER_S, WINDOW_S = 10.0, 30.0, 3.0
STEP_S = 0.25
GOAL_PAUSE_S, GOAL_SHARE, GOAL_BACK_S = 6.0, 0.9, 15.0


@dataclass(slots=True, eq=False)
class Arrivals:
    """When tokens came, of all streams and stream by stream."""

    times: list[tuple[float, int]] = field(default_factory=list)  # (s, tokens)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (s at its end, s) between two tokens of one stream

    def rate(self, begin_s: float, end_s: float) -> float:
        """Tokens per second in between."""
        return sum(count for at_s, count in self.times if begin_s <= at_s < end_s) / (end_s - begin_s)

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Of the gaps that ended in between."""
        return max((gap_s for at_s, gap_s in self.gaps if begin_s <= at_s < end_s), default=0.0)

    def back_after_s(self, killed_s: float, goal: float) -> float | None:
        """From the kill to the first window of WINDOW_S with the goal's rate; None: not in AFTER_S."""
        for index in range(int((AFTER_S - WINDOW_S) / STEP_S) + 1):
            begin_s = killed_s + index * STEP_S
            if self.rate(begin_s, begin_s + WINDOW_S) >= goal:
                return begin_s - killed_s
        return None


async def stream_for_ever(client: Client, arrivals: Arrivals, seed: int) -> None:
    """One client: a request after the other."""
    rng = random.Random(seed)
    while True:
        last_s: float | None = None
        prompt = [rng.randrange(100, 1000) for _ in range(rng.randrange(16, 48))]
        async for output in client.generate(
            prompt, max_tokens=128, temperature=0.8, ignore_eos=True, seed=rng.randrange(1 << 32)
        ):
            now_s = time.monotonic()
            arrivals.times.append((now_s, len(output.token_ids)))
            if last_s is not None:
                arrivals.gaps.append((now_s, now_s - last_s))
            last_s = now_s


def worker_pids() -> list[int]:
    """The workers' processes below this one, those that have a model."""
    return sorted(pid for pid in descendants(os.getpid()) if command_line(pid).startswith(TITLE))


async def measured(address: str, num_kills: int, display: Display) -> list[dict[str, Any]]:
    """One row for each kill."""
    arrivals, rows = Arrivals(), list[dict[str, Any]]()
    async with Client(address) as client, asyncio.TaskGroup() as group:
        streams = [group.create_task(stream_for_ever(client, arrivals, seed)) for seed in range(NUM_CLIENTS)]
        await asyncio.sleep(BEFORE_S)  # caches and costs
        with display.bar(f"{num_kills} kills", num_kills) as advance:
            for index in range(num_kills):
                await asyncio.sleep(BEFORE_S)
                victims, killed_s = worker_pids(), time.monotonic()
                before = arrivals.rate(killed_s - BEFORE_S, killed_s)
                os.kill(victims[index % len(victims)], signal.SIGKILL)
                await asyncio.sleep(AFTER_S)
                back_s = arrivals.back_after_s(killed_s, GOAL_SHARE * before)
                rows.append(
                    {
                        "tokens_per_s_before": round(before, 1),
                        "longest_pause_s": round(arrivals.longest_gap_s(killed_s, killed_s + AFTER_S), 2),
                        "back_after_s": None if back_s is None else round(back_s, 2),
                    }
                )
                advance(index + 1)
        for stream in streams:
            stream.cancel()
    return rows


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One JSON object."""
    backs = [AFTER_S if row["back_after_s"] is None else row["back_after_s"] for row in rows]
    return {
        "kills": list(rows),
        "longest_pause_s": max(row["longest_pause_s"] for row in rows),
        "back_after_s_median": statistics.median(backs),
        "back_after_s_longest": max(backs),
    }


def is_good(summary: dict[str, Any]) -> bool:
    """Whether the goals hold for every kill."""
    return bool(summary["longest_pause_s"] < GOAL_PAUSE_S and summary["back_after_s_longest"] <= GOAL_BACK_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--model", default=ServeConfig().model)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    options = parser.parse_args(arguments)
    adopt_orphans()
    config = ServeConfig(
        model=options.model, port=0, metrics_port=0, data_parallel_size=NUM_WORKERS, threads=1, max_num_seqs=NUM_CLIENTS
    )
    with Display() as display:
        deployment = Deployment(config, resolve_model(config.model, display), display.phase)
        try:
            summary = summary_of(asyncio.run(measured(deployment.endpoints[0], options.kills, display)))
        finally:
            deployment.stop(1.0)
    if options.json:
        print(json.dumps(summary))
    else:
        for row in summary["kills"]:
            print(", ".join(f"{name} {value}" for name, value in row.items()))
        print(f"pause under {GOAL_PAUSE_S:g} s, back within {GOAL_BACK_S:g} s: {'holds' if is_good(summary) else 'NO'}")
    return 0 if is_good(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
