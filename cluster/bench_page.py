"""The serving benchmark's result as one HTML file: numbers and plots."""

from collections.abc import Sequence

from cluster.bench import Record
from cluster.plots import curve, document, dots, figures, plots, rate, table

TIMES = {"ttft_ms": "Time to first token", "itl_ms": "Between tokens", "latency_ms": "Whole request"}
FIGURES = {
    "tokens_per_s": "Output tokens per second",
    "requests": "Requests",
    "failed": "Failed",
    "goodput_per_s": "Good requests per second",
    "acceptance_rate": "Drafts accepted",
    "mean_acceptance_length": "Tokens per step",
}


def page(title: str, settings: str, summary: dict[str, object], records: Sequence[Record]) -> str:
    """The whole document. settings: the command that repeats the run."""
    good = [record for record in records if record.error is None and record.token_s]
    drawn = (
        curve("Time to first token, share of requests", "ms", [1000 * record.ttft_s for record in good]),
        curve("Time between tokens, share of tokens", "ms", [1000 * gap for record in good for gap in record.itl_s]),
        rate("Tokens per second", [time for record in good for time in record.token_s]),
        dots("Time to first token by arrival", [(record.sent_s, 1000 * record.ttft_s) for record in good], "s", "ms"),
    )
    numbers = figures([(label, summary[name]) for name, label in FIGURES.items()])
    return document(title, settings, f"{numbers}\n{plots(drawn)}\n{_table(summary)}", summary)


def _table(summary: dict[str, object]) -> str:
    columns = ("mean", "p50", "p90", "p99")
    rows = []
    for name, label in TIMES.items():
        values = summary[name]
        assert isinstance(values, dict)
        rows.append((f"{label}, ms", [values.get(column, "-") for column in columns]))
    return table(columns, rows)
