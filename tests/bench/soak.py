"""Whether memory, files, threads and tasks stay flat while requests come, end, are cancelled and are left.

    python -m tests.bench.soak [--minutes N] [--json] [--plot FILE.html]

A tiny random model, so that the time goes into scheduling and not into numbers: some thousand requests a minute.
Of five streams two end by themselves; the others are cancelled by a call, left, or cut off with their connection.
The KV of running requests is reset now and then. Exit code 1 if anything grows.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.ray_environment import prepare

prepare()  # before anything imports ray

from statistics import linear_regression

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.plots import document, figures, lines, plots, table
from cluster.processes import adopt_orphans, command_line, descendants
from tests.tiny_model import VOCAB_SIZE, save_tiny_model

TITLES = {"scheduler": "ray::SchedulerActor", "front end": "ray::FrontEndActor", "worker": "ray::WorkerActor"}
NUM_CLIENTS = 12
SAMPLE_EVERY_S = 5.0
RESET_EVERY_S = 3.0
# Until then bounded histories fill, the longest being the trail's names of 8,192 requests.
WARM_UP_STREAMS = 9000
WARM_UP = 0.25  # of the time, at least
MOST_MIB_PER_HOUR = 6.0  # that count as flat: two pages a second
SETTLE_S = 5.0
FEWEST_WARM = 10  # samples
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one time. num_tasks: of its event loop; None for a process that has none."""

    time_s: float
    num_streams: int  # that have ended by then
    rss_mib: float
    num_files: int
    num_threads: int
    num_tasks: int | None = None


@dataclass(slots=True, eq=False)
class Watched:
    """One process: a sample before any load, some during it, and one after it."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def warm(self) -> list[Sample]:
        """After the warm-up, or after its share of the time where too few streams ended for it."""
        begin_s = self.samples[0].time_s + WARM_UP * (self.samples[-1].time_s - self.samples[0].time_s)
        late = [sample for sample in self.samples if sample.time_s >= begin_s]
        kept = [sample for sample in late if sample.num_streams >= WARM_UP_STREAMS]
        return kept if len(kept) >= FEWEST_WARM else late

    @property
    def mib_per_hour(self) -> float:
        """The slope of its memory after the warm-up, by least squares."""
        kept = self.warm
        slope, _ = linear_regression([s.time_s for s in kept], [s.rss_mib for s in kept])
        return 3600.0 * slope

    def grown(self) -> list[str]:
        """What grew, in words. Files, threads and tasks: more when all is over than after the warm-up."""
        found = []
        if self.mib_per_hour > MOST_MIB_PER_HOUR:
            found.append(f"{self.name}: {self.mib_per_hour:+.1f} MiB/hour, over {MOST_MIB_PER_HOUR:g}")
        warm, last = self.warm[0], self.samples[-1]
        counts: dict[str, Callable[[Sample], int]] = {
            "files": lambda sample: sample.num_files,
            "threads": lambda sample: sample.num_threads,
            "tasks": lambda sample: sample.num_tasks or 0,
        }
        for what, count in counts.items():
            if count(last) > count(warm):
                found.append(f"{self.name}: {count(last)} {what} at the end, {count(warm)} after the warm-up")
        return found


class Soak:
    """The load and the looking on."""

    def __init__(self, address: str, processes: Sequence[Watched], seed: int) -> None:
        self._address = address
        self._processes = processes
        self._rng = random.Random(seed)
        self._began_s = time.monotonic()
        self.num_ended: Counter[str] = Counter()  # streams by how they ended

    async def run(self, minutes: float) -> None:
        """Samples from before the first request until after the last."""
        async with Client(self._address) as client:
            await self._sample(client)
            tasks = [asyncio.create_task(self._client(client)) for _ in range(NUM_CLIENTS)]
            tasks.append(asyncio.create_task(self._reset(client)))
            end_s = self._began_s + 60.0 * minutes
            while time.monotonic() < end_s:
                await asyncio.sleep(SAMPLE_EVERY_S)
                await self._sample(client)
                for task in tasks:
                    if task.done():
                        await task  # raises what ended it
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(SETTLE_S)
            await self._sample(client)

    async def _client(self, shared: Client) -> None:
        ends = (self._whole, self._whole, self._cancelled, self._left, self._cut_off)
        while True:
            end = self._rng.choice(ends)
            await end(shared)
            self.num_ended[end.__name__.strip("_")] += 1

    async def _whole(self, client: Client) -> None:
        await self._ask(client).aresult()

    async def _cancelled(self, client: Client) -> None:
        asked, after = self._ask(client), self._rng.randrange(1, 20)
        async for output in asked:
            if output.offset + len(output.token_ids) >= after and asked.starts:
                await client.acancel(asked.starts[0].request_id)

    async def _left(self, client: Client) -> None:
        after = self._rng.randrange(1, 20)
        async with aclosing(aiter(self._ask(client))) as outputs:
            async for output in outputs:
                if output.offset + len(output.token_ids) >= after:
                    return

    async def _cut_off(self, _: Client) -> None:
        """A connection of its own, closed while the stream runs."""
        async with Client(self._address) as own:
            await self._left(own)

    async def _reset(self, client: Client) -> None:
        while True:
            await asyncio.sleep(RESET_EVERY_S)
            await client.areset_prefix_cache(reset_running=True)

    def _ask(self, client: Client) -> Any:
        rng = self._rng
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(4, 48))]
        return client.generate(
            prompt,
            max_tokens=rng.randrange(8, 32),
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.randrange(1 << 32),
            ignore_eos=True,
        )

    async def _sample(self, client: Client) -> None:
        stats = await client.astats()
        tasks = {"scheduler": stats["scheduler"]["num_tasks"], "front end": stats["front_end"]["num_tasks"]}
        time_s = time.monotonic() - self._began_s
        for process in self._processes:
            process.samples.append(sample(process.pid, time_s, self.num_ended.total(), tasks.get(process.name)))


def sample(pid: int, time_s: float, num_streams: int, num_tasks: int | None) -> Sample:
    """Of a process, from /proc."""
    proc = Path(f"/proc/{pid}")
    resident_pages = int((proc / "statm").read_text().split()[1])
    return Sample(
        time_s=round(time_s, 1),
        num_streams=num_streams,
        rss_mib=round(resident_pages * os.sysconf("SC_PAGE_SIZE") / MIB, 2),
        num_files=len(list((proc / "fd").iterdir())),
        num_threads=len(list((proc / "task").iterdir())),
        num_tasks=num_tasks,
    )


def processes_of(titles: dict[str, str]) -> list[Watched]:
    """The actors' processes below this one, by their titles."""
    commands = {pid: command_line(pid) for pid in descendants(os.getpid())}
    return [
        Watched(name, pid) for name, title in titles.items() for pid, line in commands.items() if line.startswith(title)
    ]


def too_few(process: Watched) -> list[str]:
    """Whether it was too short to tell, in words."""
    if process.warm[0].num_streams >= WARM_UP_STREAMS:
        return []
    ended = process.samples[-1].num_streams
    return [f"only {ended} streams ended, and histories fill until {WARM_UP_STREAMS}: give it more --minutes"]


def summary_of(processes: Sequence[Watched], soak: Soak, minutes: float) -> dict[str, Any]:
    """One JSON object."""
    return {
        "minutes": minutes,
        "warm_up_minutes": round(processes[0].warm[0].time_s / 60, 1),
        "streams": sum(soak.num_ended.values()),
        "ended": dict(soak.num_ended),
        "grown": [*too_few(processes[0]), *(line for process in processes for line in process.grown())],
        "processes": {
            process.name: {
                "mib_per_hour": round(process.mib_per_hour, 2),
                "first_mib": process.samples[0].rss_mib,
                "last_mib": process.samples[-1].rss_mib,
                **{
                    what: [getattr(s, what) for s in (process.samples[0], process.warm[0], process.samples[-1])]
                    for what in ("num_files", "num_threads", "num_tasks")
                },
            }
            for process in processes
        },
    }


def page(processes: Sequence[Watched], summary: dict[str, Any], command: str) -> str:
    """A plot for each thing that must stay flat."""
    times = [f"{sample.time_s / 60:.0f}" for sample in processes[0].samples]
    marks = ["0", *[""] * (len(times) - 2), f"{times[-1]} min"]
    memory = {process.name: [sample.rss_mib for sample in process.samples] for process in processes}
    drawn = [lines(f"Memory of the {name}, MiB", marks, {name: values}, "") for name, values in memory.items()]
    kinds = {
        "num_files": ("Open files", ""),
        "num_threads": ("Threads", ""),
        "num_tasks": ("Tasks of the event loop", ""),
    }
    for key, (caption, unit) in kinds.items():
        series = {process.name: [getattr(sample, key) for sample in process.samples] for process in processes}
        kept = {name: values for name, values in series.items() if values[0] is not None}
        drawn.append(lines(caption, marks, kept, unit))
    shown = {"Streams": "streams", "Minutes": "minutes", "Of them warm-up": "warm_up_minutes"}
    numbers = figures([*((label, summary[key]) for label, key in shown.items()), ("Verdict", verdict(summary))])
    columns = ("MiB/hour after the warm-up", "MiB before", "MiB after", "files", "threads", "tasks")
    rows = [(name, _row(found)) for name, found in summary["processes"].items()]
    samples = {process.name: [asdict(sample) for sample in process.samples] for process in processes}
    body = f"{numbers}\n{plots(drawn)}\n{table(columns, rows)}"
    return document("Soak", command, body, summary | {"samples": samples})


def verdict(summary: dict[str, Any]) -> str:
    """In one line."""
    return "flat" if not summary["grown"] else f"NOT FLAT: {'; '.join(summary['grown'])}"


def _row(found: dict[str, Any]) -> list[object]:
    counts = [
        " / ".join("-" if n is None else str(n) for n in found[what])
        for what in ("num_files", "num_threads", "num_tasks")
    ]
    return [f"{found['mib_per_hour']:+.1f}", found["first_mib"], found["last_mib"], *counts]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write a page with plots")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    options = parser.parse_args(arguments)
    adopt_orphans()
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory))
        config = ServeConfig(
            model=directory,
            port=0,
            metrics_port=0,
            max_num_seqs=6,
            num_gpu_blocks_override=40,
            threads=1,
            worker_down_after_s=60.0,  # a busy machine is not what is measured
        )
        deployment = Deployment(config, Path(directory))
        try:
            processes = processes_of(TITLES)
            soak = Soak(deployment.endpoints[0], processes, options.seed)
            asyncio.run(soak.run(options.minutes))
        finally:
            deployment.stop(1.0)
    summary = summary_of(processes, soak, options.minutes)
    if options.plot is not None:
        options.plot.write_text(page(processes, summary, f"python -m tests.bench.soak --minutes {options.minutes:g}"))
    if options.json:
        print(json.dumps(summary))
    else:
        print(f"{summary['streams']} streams: {', '.join(f'{n} {how}' for how, n in summary['ended'].items())}")
        for name, found in summary["processes"].items():
            slope, first, last, *counts = _row(found)
            told = ", ".join(map(str, counts))
            print(f"{name:9}  {slope} MiB/hour  {first} -> {last} MiB  files, threads, tasks: {told}")
        print(verdict(summary))
    return 1 if summary["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
