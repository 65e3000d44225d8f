"""The speculation benchmark's result as one HTML file. Knows the summary only."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.plots import document, dots, figures, lines, plots, table
from tests.bench.speculation_figures import AUTO, NONE

THEORY = ("speedup", "theoretical", "acceptance", "drafted", "verify_cost", "draft_cost")
COSTS = (
    "reserved", "rolled_back", "placeholders_mean", "placeholders_peak", "garbage_mean", "garbage_peak", "stale",
)  # fmt: skip


def page(command: str, summary: Mapping[str, Any]) -> str:
    """The whole document."""
    rows = summary["rows"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    drawn = [speeds(workload, [row for row in rows if row["workload"] == workload]) for workload in workloads]
    points = [(row["theory"]["theoretical"], row["theory"]["speedup"]) for row in rows if row["theory"] is not None]
    drawn.append(dots("Speed-up while decoding: by the formula, and measured", points, "x", "x", diagonal=True))
    numbers = figures(
        [
            ("auto over no drafts, at worst", summary["auto_vs_none_min"]),
            ("auto over the best fixed choice, at worst", summary["auto_vs_best_min"]),
        ]
    )
    body = f"{numbers}\n{plots(drawn)}\n{_speed_table(rows)}{_theory_table(rows)}{_cost_table(rows)}"
    return document("Speculation: what it brings and what it costs", command, body, dict(summary))


def speeds(workload: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Speed over that without drafts by load: of auto, and of each drafter with its best K at each load."""
    loads = list(dict.fromkeys(row["concurrency"] for row in rows))
    series: dict[str, list[float | None]] = {}
    for row in rows:
        drafter = row["setting"].partition(":")[0]
        name = drafter if drafter in (NONE, AUTO) else f"{drafter}, best K"
        values = series.setdefault(name, [None] * len(loads))
        index, speed = loads.index(row["concurrency"]), row["vs_none"]
        if speed is not None:
            values[index] = max(speed, values[index] or 0.0)
    return lines(f"{workload}: speed over no drafts, by requests at once", [str(load) for load in loads], series, "x")


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['workload']} x {row['concurrency']}, {row['setting']}"


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ("tokens_per_s", "low", "high", "vs_none", "acceptance_length")
    return table(columns, [(_label(row), [row[name] for name in columns]) for row in rows])


def _theory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [row for row in rows if row["theory"] is not None]
    return table(THEORY, [(_label(row), [row["theory"][name] for name in THEORY]) for row in shown])


def _cost_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(COSTS, [(_label(row), [_told(row["costs"][name]) for name in COSTS]) for row in rows])


def _told(value: object) -> object:
    return (sum(value.values()) if value else 0) if isinstance(value, dict) else value
