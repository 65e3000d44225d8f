"""One run of `slipstream bench`: progress while it lasts, then a table, a page, a line of JSON."""

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.bench import Backend, Goal, Load, run_load, summarize
from cluster.bench_page import TIMES, page
from cluster.errors import ServerError
from cluster.progress import Display

PLAIN = (
    ("requests", "requests"),
    ("failed", "of them failed"),
    ("duration_s", "seconds"),
    ("prompt_tokens", "prompt tokens"),
    ("output_tokens", "output tokens"),
    ("tokens_per_s", "output tokens per second"),
    ("requests_per_s", "requests per second"),
    ("goodput_per_s", "good requests per second"),
    ("acceptance_rate", "share of drafts accepted"),
    ("mean_acceptance_length", "tokens per step"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to make of the records."""

    goal_ttft_ms: float | None = None
    goal_itl_ms: float | None = None
    html: Path | None = None
    as_json: bool = False

    def __call__(self, backend: Backend, load: Load) -> None:
        """Send the load and say how it went. ServerError when no request was answered."""
        with Display() as display, display.bar("Sending requests", len(load.prompts)) as progress:
            records = asyncio.run(run_load(backend, load, progress))
        goal = Goal(ttft_s=_seconds(self.goal_ttft_ms), itl_s=_seconds(self.goal_itl_ms))
        summary = summarize(records, goal)
        errors = summary["errors"]
        assert isinstance(errors, list)
        if summary["failed"] == summary["requests"]:
            raise ServerError(f"no request was answered: {'; '.join(errors)}")
        if self.html is not None:
            command = shlex.join(["slipstream", *sys.argv[1:]])
            self.html.write_text(page("Slipstream under load", command, summary, records), encoding="utf-8")
        console = Console()
        console.print(_table(summary))
        for error in errors:
            console.print(f"failed: {error}", style="yellow", highlight=False, markup=False)
        if self.html is not None:
            console.print(f"plots: {self.html}", highlight=False)
        if self.as_json:
            sys.stdout.write(json.dumps(summary) + "\n")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _table(summary: dict[str, object]) -> Table:
    table = Table("", "mean", "p50", "p90", "p99", title="Under load")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in PLAIN:
        value = summary[name]
        table.add_row(label, "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value))
    for name, label in TIMES.items():
        values = summary[name]
        assert isinstance(values, dict)
        cells = (f"{values[column]:.1f}" if column in values else "-" for column in ("mean", "p50", "p90", "p99"))
        table.add_row(f"{label}, ms", *cells)
    return table
