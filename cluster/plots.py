"""Pages of numbers and plots as one HTML file each: nothing is fetched from anywhere. Knows no benchmark."""

import html
import json
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT, TOP = 560, 240, 56, 34, 12, 12
NUM_COLOURS = 8
STYLE = """
:root { color-scheme: light dark; --ink: #16202c; --paper: #fbfcfd; --line: #cbd5df; --mark: #0b63b0; --soft: #56677a;
        --c0: #0b63b0; --c1: #b3420e; --c2: #1c7a3e; --c3: #8a2b9c; --c4: #7a6200; --c5: #b3255f; --c6: #2b6f77;
        --c7: #56677a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eef4; --paper: #10161d; --line: #33414f; --mark: #6db6ff; --soft: #9fb0c1;
          --c0: #6db6ff; --c1: #ff9d6b; --c2: #74d196; --c3: #d99bea; --c4: #e3c452; --c5: #ff8fb9; --c6: #7fd0d9;
          --c7: #9fb0c1 }
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
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: 0; padding: 0; font-size: .85rem }
.legend i { display: inline-block; width: 1.2rem; height: .25rem; margin: 0 .4rem .2rem 0 }
.table { overflow-x: auto } table { border-collapse: collapse; margin: 2rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line) }
th:first-child { text-align: left }
details pre { overflow-x: auto }
"""


def document(title: str, settings: str, body: str, data: object) -> str:
    """The whole page. settings: the command that repeats the run; data: what is shown, as JSON."""
    text = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{text}</h1><p><code>{html.escape(settings)}</code></p>\n{body}\n"
        f"<details><summary>As JSON</summary><pre>{html.escape(json.dumps(data, indent=2))}</pre></details>"
        "</main></body></html>\n"
    )


def figures(shown: Sequence[tuple[str, object]]) -> str:
    """Large numbers under their names; None is a dash."""
    rows = (
        f"<div><dt>{html.escape(label)}</dt><dd>{'-' if value is None else value}</dd></div>" for label, value in shown
    )
    return f"<dl>{''.join(rows)}</dl>"


def table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[object]]]) -> str:
    """Rows of a name and a value for each column."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = []
    for label, values in rows:
        cells = "".join(f"<td>{html.escape(str(value))}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{html.escape(label)}</th>{cells}</tr>')
    body = f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="table"><table>{body}</table></div>'


def plots(drawn: Sequence[str]) -> str:
    """Plots side by side."""
    return f'<div class="plots">{"".join(drawn)}</div>'


def curve(caption: str, unit: str, values: Sequence[float]) -> str:
    """Which share of the values is at most x."""
    ordered = sorted(values) or [0.0]
    top = ordered[-1] or 1.0
    step = max(len(ordered) // 300, 1)
    points = [(0.0, 0.0), *((ordered[i], 100 * (i + 1) / len(ordered)) for i in range(0, len(ordered), step))]
    content = _line([*points, (top, 100.0)], top, 100)
    return _frame(caption, _ends(top, unit), 100, "%", content)


def rate(caption: str, times: Sequence[float]) -> str:
    """Events in each of 60 equal spans."""
    end = max(times, default=0.0) or 1.0
    counts = [0] * 60
    for time in times:
        counts[min(int(60 * time / end), 59)] += 1
    rates = [count * 60 / end for count in counts]
    top = max(rates) or 1.0
    points = [((i + 0.5) * end / 60, rate) for i, rate in enumerate(rates)]
    return _frame(caption, _ends(end, "s"), top, "", _line(points, end, top))


def dots(
    caption: str, points: Sequence[tuple[float, float]], x_unit: str, y_unit: str, *, diagonal: bool = False
) -> str:
    """A dot for each point. diagonal: both axes have one scale, and a line where they are equal."""
    x_top = max((x for x, _ in points), default=0.0) or 1.0
    y_top = max((y for _, y in points), default=0.0) or 1.0
    content = ""
    if diagonal:
        x_top = y_top = max(x_top, y_top)
        content = _line([(0.0, 0.0), (x_top, y_top)], x_top, y_top, "--line")
    placed = (_point(x, y, x_top, y_top) for x, y in points)
    content += "".join(f'<circle class="dot" cx="{x}" cy="{y}" r="4"/>' for x, y in placed)
    return _frame(caption, _ends(x_top, x_unit), y_top, f" {y_unit}", content)


def lines(caption: str, columns: Sequence[str], series: Mapping[str, Sequence[float | None]], unit: str) -> str:
    """A line for each series over columns at equal distances; None leaves a gap out."""
    y_top = max((value for values in series.values() for value in values if value is not None), default=1.0) or 1.0
    last = max(len(columns) - 1, 1)
    content, names = "", ""
    for index, (name, values) in enumerate(series.items()):
        colour = f"--c{index % NUM_COLOURS}"
        content += _line([(i, value) for i, value in enumerate(values) if value is not None], last, y_top, colour)
        names += f'<li><i style="background: var({colour})"></i>{html.escape(name)}</li>'
    marks = [(i / last, column) for i, column in enumerate(columns)]
    return _frame(caption, marks, y_top, unit, content, f'<ul class="legend">{names}</ul>')


def _ends(top: float, unit: str) -> list[tuple[float, str]]:
    return [(0.0, "0"), (1.0, f"{top:.4g} {unit}")]


def _frame(
    caption: str, x_marks: Sequence[tuple[float, str]], y_top: float, y_unit: str, content: str, legend: str = ""
) -> str:
    """Axes around what is drawn. x_marks: shares of the width and what stands there."""
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    marks = "".join(
        f'<text x="{LEFT + share * (right - LEFT):.1f}" y="{floor + 18}" text-anchor="{_anchor(share)}">'
        f"{html.escape(mark)}</text>"
        for share, mark in x_marks
    )
    axes = (
        f'<line class="axis" x1="{LEFT}" y1="{floor}" x2="{right}" y2="{floor}"/>'
        f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{floor}"/>{marks}'
        f'<text x="{LEFT - 6}" y="20" text-anchor="end">{y_top:.4g}{y_unit}</text>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>'
    )
    text = html.escape(caption)
    return (
        f'<figure><figcaption>{text}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{text}">{axes}{content}</svg>{legend}</figure>'
    )


def _anchor(share: float) -> str:
    return "start" if share == 0.0 else "end" if share == 1.0 else "middle"


def _point(x: float, y: float, x_top: float, y_top: float) -> tuple[float, float]:
    width, height = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
    return round(LEFT + width * x / x_top, 1), round(HEIGHT - BOTTOM - height * y / y_top, 1)


def _line(points: Sequence[tuple[float, float]], x_top: float, y_top: float, colour: str = "--mark") -> str:
    drawn = " ".join(f"{x},{y}" for x, y in (_point(*point, x_top, y_top) for point in points))
    return f'<polyline class="curve" style="stroke: var({colour})" points="{drawn}"/>'
