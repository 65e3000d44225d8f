"""The benchmark's result as one HTML file: numbers and plots, nothing fetched from anywhere."""

import html
import json
from collections.abc import Sequence

from cluster.bench import Record

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 56, 34
STYLE = """
:root { color-scheme: light dark; --ink: #16202c; --paper: #fbfcfd; --line: #cbd5df; --mark: #0b63b0; --soft: #56677a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eef4; --paper: #10161d; --line: #33414f; --mark: #6db6ff; --soft: #9fb0c1 }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 74rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } p { color: var(--soft); margin: .2rem 0 1.5rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; margin: 0 0 2rem }
dt { color: var(--soft); font-size: .85rem } dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 2rem }
figure { margin: 0 } figcaption { font-weight: 600; margin-bottom: .3rem } svg { width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft) } .axis { stroke: var(--line) }
.curve { fill: none; stroke: var(--mark); stroke-width: 2 } .dot { fill: var(--mark); opacity: .55 }
table { border-collapse: collapse; margin: 2rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line) }
th:first-child { text-align: left }
details pre { overflow-x: auto }
"""
TIMES = {"ttft_ms": "Time to first token", "itl_ms": "Between tokens", "latency_ms": "Whole request"}


def page(title: str, settings: str, summary: dict[str, object], records: Sequence[Record]) -> str:
    """The whole document. settings: the command that repeats the run."""
    good = [record for record in records if record.error is None and record.token_s]
    plots = (
        _curve("Time to first token, share of requests", "ms", [1000 * record.ttft_s for record in good]),
        _curve("Time between tokens, share of tokens", "ms", [1000 * gap for record in good for gap in record.itl_s]),
        _rate("Tokens per second", [time for record in good for time in record.token_s]),
        _dots("Time to first token by arrival", [(record.sent_s, 1000 * record.ttft_s) for record in good]),
    )
    text = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{text}</h1><p><code>{html.escape(settings)}</code></p>\n{_figures(summary)}\n"
        f'<div class="plots">{"".join(plots)}</div>\n{_table(summary)}\n'
        f"<details><summary>As JSON</summary><pre>{html.escape(json.dumps(summary, indent=2))}</pre></details>"
        "</main></body></html>\n"
    )


def _figures(summary: dict[str, object]) -> str:
    shown = (
        ("Output tokens per second", "tokens_per_s"),
        ("Requests", "requests"),
        ("Failed", "failed"),
        ("Good requests per second", "goodput_per_s"),
        ("Drafts accepted", "acceptance_rate"),
        ("Tokens per step", "mean_acceptance_length"),
    )
    rows = (
        f"<div><dt>{label}</dt><dd>{'-' if summary[name] is None else summary[name]}</dd></div>"
        for label, name in shown
    )
    return f"<dl>{''.join(rows)}</dl>"


def _table(summary: dict[str, object]) -> str:
    lines = []
    for name, label in TIMES.items():
        values = summary[name]
        assert isinstance(values, dict)
        cells = "".join(f"<td>{values.get(column, '-')}</td>" for column in ("mean", "p50", "p90", "p99"))
        lines.append(f'<tr><th scope="row">{label}, ms</th>{cells}</tr>')
    columns = "".join(f'<th scope="col">{name}</th>' for name in ("mean", "p50", "p90", "p99"))
    return f"<table><thead><tr><td></td>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _frame(caption: str, x_label: str, x_top: float, y_top: float, y_label: str, content: str) -> str:
    """Axes with their extremes around what is drawn."""
    right, floor = WIDTH - 12, HEIGHT - BOTTOM
    axes = (
        f'<line class="axis" x1="{LEFT}" y1="{floor}" x2="{right}" y2="{floor}"/>'
        f'<line class="axis" x1="{LEFT}" y1="12" x2="{LEFT}" y2="{floor}"/>'
        f'<text x="{LEFT}" y="{floor + 18}">0</text>'
        f'<text x="{right}" y="{floor + 18}" text-anchor="end">{x_top:.4g} {x_label}</text>'
        f'<text x="{LEFT - 6}" y="20" text-anchor="end">{y_top:.4g}{y_label}</text>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>'
    )
    return (
        f'<figure><figcaption>{caption}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(caption)}">{axes}{content}</svg></figure>'
    )


def _point(x: float, y: float, x_top: float, y_top: float) -> tuple[float, float]:
    width, height = WIDTH - 12 - LEFT, HEIGHT - BOTTOM - 12
    return round(LEFT + width * x / x_top, 1), round(HEIGHT - BOTTOM - height * y / y_top, 1)


def _line(points: Sequence[tuple[float, float]], x_top: float, y_top: float) -> str:
    drawn = " ".join(f"{x},{y}" for x, y in (_point(*point, x_top, y_top) for point in points))
    return f'<polyline class="curve" points="{drawn}"/>'


def _curve(caption: str, unit: str, values: Sequence[float]) -> str:
    """Which share of the values is at most x."""
    ordered = sorted(values) or [0.0]
    top = ordered[-1] or 1.0
    step = max(len(ordered) // 300, 1)
    points = [(0.0, 0.0), *((ordered[i], 100 * (i + 1) / len(ordered)) for i in range(0, len(ordered), step))]
    return _frame(caption, unit, top, 100, "%", _line([*points, (top, 100.0)], top, 100))


def _rate(caption: str, times: Sequence[float]) -> str:
    """Events in each of 60 equal spans."""
    end = max(times, default=0.0) or 1.0
    counts = [0] * 60
    for time in times:
        counts[min(int(60 * time / end), 59)] += 1
    rates = [count * 60 / end for count in counts]
    top = max(rates) or 1.0
    points = [((i + 0.5) * end / 60, rate) for i, rate in enumerate(rates)]
    return _frame(caption, "s", end, top, "", _line(points, end, top))


def _dots(caption: str, points: Sequence[tuple[float, float]]) -> str:
    x_top = max((x for x, _ in points), default=0.0) or 1.0
    y_top = max((y for _, y in points), default=0.0) or 1.0
    placed = (_point(x, y, x_top, y_top) for x, y in points)
    return _frame(
        caption, "s", x_top, y_top, " ms", "".join(f'<circle class="dot" cx="{x}" cy="{y}" r="4"/>' for x, y in placed)
    )
