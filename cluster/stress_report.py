"""What a stress test shows while it runs and when it is over. Knows numbers, not how they came about."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESH_HZ = 4
PLAIN_EVERY_S = 15.0  # a line, where there is no terminal
MOST_STORIES = 5
SUMS = ("stale_tokens_dropped", "tokens_salvaged", "preemptions", "plans_resent", "stale_results")


@dataclass(slots=True, eq=False)
class Totals:
    """Counters of the scheduler over all its lives: each life begins at 0."""

    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    num_steps: int = 0

    def take(self, scheduler: dict[str, Any]) -> None:
        """A snapshot of the life there is."""
        if scheduler["num_steps"] < self.num_steps:
            self.before = self.sums()
        self.num_steps = scheduler["num_steps"]
        self.now = {
            "stale_tokens_dropped": sum(scheduler["stale_tokens_dropped"].values()),
            "tokens_salvaged": scheduler["tokens_salvaged"],
            "preemptions": sum(scheduler["num_preemptions"].values()),
            "plans_resent": scheduler["num_resends"],
            "stale_results": scheduler["num_stale_results"],
        }

    def sums(self) -> dict[str, int]:
        """Over all lives."""
        return {name: self.before[name] + self.now[name] for name in SUMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a run goes."""

    elapsed_s: float
    seconds: float
    num_over: int  # streams
    num_open: int
    num_tokens: int
    sums: dict[str, int]
    happened: Sequence[str]  # kills, latest last

    def __str__(self) -> str:
        return (
            f"{self.elapsed_s:.0f} of {self.seconds:.0f} s: {self.num_over} streams over, {self.num_open} open, "
            f"{self.num_tokens} tokens, {len(self.happened)} kills"
        )

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title="slipstream stress", show_header=False, title_justify="left")
        table.add_row("progress", str(self))
        for name, count in self.sums.items():
            table.add_row(name.replace("_", " "), str(count))
        for line in self.happened[-5:]:
            table.add_row("killed", line)
        return table


async def show(console: Console, progress: Callable[[], Progress]) -> None:
    """Until it is cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(PLAIN_EVERY_S)
            console.print(str(progress()), highlight=False, soft_wrap=True)
    with Live(console=console, refresh_per_second=REFRESH_HZ, transient=True) as live:
        while True:
            live.update(progress().table())
            await asyncio.sleep(1 / REFRESH_HZ)


def print_report(report: dict[str, Any], stories: Sequence[str], *, as_json: bool) -> None:
    """The first stories on stderr; on stdout a table, unless only JSON is wanted, and the line of JSON."""
    for story in stories[:MOST_STORIES]:
        sys.stderr.write(story + "\n")
    if not as_json:
        table = Table(title="slipstream stress", show_header=False, title_justify="left")
        for name, value in report.items():
            if isinstance(value, dict):
                value = ", ".join(f"{kind} {count}" for kind, count in value.items()) or "none"
            table.add_row(name.replace("_", " "), str(value))
        Console().print(table)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
