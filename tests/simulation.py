"""Random worlds around the scheduler core, one per seed.

    python -m tests.simulation --seeds 2000 [--start 0] [--jobs 2]

prints what was met and how often, and for the first seed that broke a promise the story of the request and
the last events of its world. Fails too if a row of the design's frame table never met some kind of frame.
"""

import argparse
import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulate.world import World

KINDS = ("prefill chunk", "decode", "verify")

# Rows of the table of frames: what happens to a request while frames are in flight -> how the ledger calls it.
FRAME_TABLE: dict[str, tuple[str, ...]] = {
    "preempted for lack of blocks": ("out of blocks",),
    "reset with running requests": ("reset_running",),
    "weights swapped": ("swap",),
    "Admin.Preempt": ("preempt",),
    "migration by drain": ("drain",),
    "finished (EOS, stop, length, deadline)": ("finished (stop)", "finished (length)", "finished (deadline)"),
    "cancelled": ("cancelled",),
    "replaced by a higher attempt": ("replaced",),
    "one row failed": ("row failed",),
    "worker lost": ("worker lost", "worker back in a new session"),
    "a step failed": ("step failed",),
    "plan late": ("plan late",),
    "plan repeated": ("plan repeated", "plan sent again"),
    "plan reordered": ("plan reordered",),
    "plan lost": ("plan lost",),
    "result late": ("result late", "slow worker"),
    "result repeated": ("result repeated", "old session's result"),
    "result reordered": ("result reordered",),
    "result lost": ("result lost",),
}
# Fewer seeds than this may miss something by chance.
MIN_SEEDS_FOR_COVERAGE = 200
SEEDS_PER_CALL = 8


@dataclass(slots=True)
class Failure:
    """One seed that broke a promise."""

    seed: int
    message: str
    report: str


@dataclass(slots=True)
class Outcome:
    """What some seeds met, and which of them failed."""

    num_seeds: int = 0
    num_events: int = 0
    fewest_events: int = 1 << 30
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    seeds_that_met: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Count another's seeds in."""
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.fewest_events = min(self.fewest_events, other.fewest_events)
        self.coverage.update(other.coverage)
        self.met.update(other.met)
        self.seeds_that_met.update(other.seeds_that_met)
        self.failures.extend(other.failures)

    def zeros(self) -> list[str]:
        """Rows of the frame table that never met some kind of frame."""
        return [f"{row} x {kind}" for row in FRAME_TABLE for kind in KINDS if not self.times(row, kind)]

    def times(self, row: str, kind: str) -> int:
        """How often a row of the frame table met a kind of frame in flight."""
        return sum(self.coverage[how, kind] for how in FRAME_TABLE[row])


def run_seed(seed: int, *, num_workers: int | None = None, horizon: int = 300) -> Outcome:
    """Live through one world; a broken promise is in the outcome."""
    outcome = Outcome(num_seeds=1)
    world = World(seed, num_workers=num_workers, horizon=horizon)
    try:
        world.run()
    except Exception as error:
        outcome.failures.append(Failure(seed, f"{type(error).__name__}: {error}", report_of(world, error)))
    outcome.num_events = outcome.fewest_events = world.num_handled
    outcome.coverage = world.coverage
    outcome.met = world.summary()
    outcome.seeds_that_met = Counter({name: 1 for name, times in outcome.met.items() if times})
    return outcome


def run_seeds(seeds: Sequence[int]) -> Outcome:
    """Several seeds in this process."""
    outcome = Outcome()
    for seed in seeds:
        outcome.add(run_seed(seed))
    return outcome


def outcomes(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """The outcomes of all seeds, a few seeds at a time, in the order they are done."""
    parts = [seeds[start : start + SEEDS_PER_CALL] for start in range(0, len(seeds), SEEDS_PER_CALL)]
    if jobs == 1:
        yield from map(run_seeds, parts)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=collect_seldom) as pool:
        futures = [pool.submit(run_seeds, part) for part in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def collect_seldom() -> None:
    """Worlds make little garbage in cycles and many objects: looking for the one costs a twentieth of the time."""
    gc.set_threshold(50_000, 20, 20)


# ---- telling ----


def report_of(world: World, error: Exception) -> str:
    """The seed's weather, where it broke, the request's story and the last events."""
    lines = [f"seed {world.seed}: {type(error).__name__}: {error}", f"weather: {world.weather}", ""]
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines += [f"  {frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames]
    request_id = getattr(error, "request_id", None)
    if request_id is not None:
        lines += ["", f"story of {request_id}:", world.scheduler.story(request_id)]
    lines += ["", "last events:"]
    for now_ns, event, commands in world.recent:
        lines.append(f"[{now_ns / 1e6:9.3f} ms] {brief(event)}")
        lines += [f"{'':16}-> {brief(command)}" for command in commands]
    return "\n".join(lines)


def brief(message: object) -> str:
    """A message on one line: what is empty or default is left out."""
    if isinstance(message, np.ndarray):
        return "[" + " ".join(map(str, message.tolist())) + "]"
    if isinstance(message, tuple):
        return "(" + ", ".join(map(brief, message)) + ")"
    if not hasattr(message, "__dataclass_fields__"):
        return str(message)
    record: Any = message
    parts = [(entry.name, getattr(record, entry.name)) for entry in fields(record)]
    told = [f"{name}={brief(value)}" for name, value in parts if name != "sampling" and not is_empty(value)]
    return f"{type(message).__name__}({', '.join(told)})"


def is_empty(value: object) -> bool:
    """Nothing worth telling."""
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def tables(outcome: Outcome) -> list[Table]:
    """What was met: the frame table, and everything else."""
    frames = Table("while in flight", *KINDS, title="frames met in flight")
    for row in FRAME_TABLE:
        frames.add_row(row, *(str(outcome.times(row, kind)) for kind in KINDS))
    others = Table("what", "times", "seeds", title="met")
    for name, times in sorted(outcome.met.items()):
        others.add_row(name, str(times), str(outcome.seeds_that_met[name]))
    return [frames, others]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Random worlds around the core.")
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--max-failures", type=int, default=20, help="stop after this many failing seeds")
    options = parser.parse_args(arguments)
    collect_seldom()
    console = Console()
    started = time.monotonic()
    outcome = Outcome()
    columns = (
        TextColumn("seeds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=options.seeds, bad="")
        for part in outcomes(range(options.start, options.start + options.seeds), options.jobs):
            outcome.add(part)
            bad = f"[red]{len(outcome.failures)} failed" if outcome.failures else ""
            progress.update(task, completed=outcome.num_seeds, bad=bad)
            if len(outcome.failures) >= options.max_failures:
                break
    for table in tables(outcome):
        console.print(table)
    if outcome.failures:
        first = min(outcome.failures, key=lambda failure: failure.seed)
        print(first.report)
        for failure in sorted(outcome.failures, key=lambda failure: failure.seed):
            print(f"seed {failure.seed}: {failure.message}")
    zeros = outcome.zeros() if outcome.num_seeds >= MIN_SEEDS_FOR_COVERAGE else []
    for zero in zeros:
        print(f"never met: {zero}")
    took = time.monotonic() - started
    print(
        f"{outcome.num_seeds} seeds, {len(outcome.failures)} failed, {outcome.num_events} events "
        f"(at least {outcome.fewest_events} each), {outcome.num_seeds / took:.1f} seeds/s"
    )
    return 1 if outcome.failures or zeros else 0


if __name__ == "__main__":
    sys.exit(main())
