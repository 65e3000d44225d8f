"""The page of `slipstream top`: what the live page shows, for a terminal."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from scheduler.view import BLOCK_KINDS

EVERY_S = 1.0
SPAN_NS = 2_000_000_000  # of the timeline
DELAY_NS = 300_000_000  # what is drawn has been answered
MAX_REQUESTS = 20
MAX_MAP_LINES = 3
MAX_STEPS = 2000
STYLES = dict(zip(BLOCK_KINDS, ("bright_black", "dark_cyan", "cyan", "blue", "grey62", "yellow", "red"), strict=True))
NAMES = {"cached": "prefix-cached", "shared": "confirmed and cached"}
IDLE, PLANNED, VERIFYING, DRAFTING, STALE = (
    ("·", "bright_black"),
    ("─", "white"),
    ("█", "blue"),
    ("▓", "magenta"),
    ("▚", "red"),
)

View = Mapping[str, Any]


class Top:
    """What was seen so far, and its frame for a terminal of some width."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._before: View | None = None
        self._view: View | None = None
        self._steps: dict[tuple[str, str, int], View] = {}

    @property
    def after(self) -> int:
        """What the next view is asked to go on from."""
        return 0 if self._view is None else int(self._view["trail"]["number"])

    def take(self, view: View) -> None:
        """The next view."""
        if self._view is not None and self._view["life"] != view["life"]:
            self._view, self._steps = None, {}
        self._before, self._view = self._view, view
        for step in view["trail"]["steps"]:
            self._steps[step["worker_id"], step["session"], step["seq"]] = step
        while len(self._steps) > MAX_STEPS:
            del self._steps[next(iter(self._steps))]

    def frame(self, width: int) -> RenderableType:
        """All of it."""
        assert self._view is not None
        view = self._view
        parts: list[RenderableType] = [Rule(f"[bold]{escape(self._title)}[/bold]", align="left"), *self._totals(view)]
        for worker in view["workers"]:
            parts += self._worker(worker, width)
        if not view["workers"]:
            parts.append(Text("no worker is up", style="red"))
        parts.append(_requests(view))
        return Group(*parts)

    def _totals(self, view: View) -> Iterator[RenderableType]:
        scheduler = view["scheduler"]
        for notice in scheduler["notices"]:
            yield Text(notice, style="bold red")
        table = Table.grid(padding=(0, 3))
        num_blocks = sum(worker["num_blocks"] for worker in view["workers"])
        num_free = sum(worker["num_free_blocks"] for worker in view["workers"])
        table.add_row(
            _fact("running", scheduler["num_running"]),
            _fact("waiting", scheduler["num_waiting"]),
            _fact("tokens/s", self._rate()),
            _fact("KV in use", share(num_blocks - num_free, num_blocks)),
            _fact("prefix hits", share(scheduler["prefix_cache_hits"], scheduler["prefix_cache_queries"])),
        )
        first, between = self._recent("time_to_first_token"), self._recent("inter_token_latency")
        table.add_row(
            _fact("first token", _seconds(quantile(*first, 0.5))),
            _fact("95 %", _seconds(quantile(*first, 0.95))),
            _fact("between tokens", _seconds(quantile(*between, 0.5))),
            _fact("95 %", _seconds(quantile(*between, 0.95))),
            _fact("preempted", sum(scheduler["num_preemptions"].values())),
        )
        drafts = scheduler["num_drafts"]
        table.add_row(
            _fact("tokens/frame", f"{scheduler['mean_acceptance_length']:.2f}"),
            _fact("stale kept", scheduler["tokens_salvaged"]),
            _fact("placeholders", scheduler["placeholders"]),
            _fact("garbage", scheduler["garbage_kv_tokens"]),
            _fact("dropped stale", sum(scheduler["stale_tokens_dropped"].values())),
        )
        yield table
        depths = (share(count, drafts) for count in scheduler["num_accepted_tokens_per_pos"])
        yield _fact("accepted by depth", " / ".join(depths) if drafts else "-")

    def _worker(self, worker: View, width: int) -> Iterator[RenderableType]:
        draining = ", draining" if worker["draining"] else ""
        yield Rule(
            f"{escape(worker['worker_id'])}: {worker['num_running']} running, "
            f"{worker['num_steps_in_flight']} steps in flight{draining}",
            align="left",
            style="bright_black",
        )
        steps = [step for step in self._steps.values() if step["worker_id"] == worker["worker_id"]]
        yield _runs(timeline(steps, self._view["now_ns"] - DELAY_NS if self._view else 0, width))
        yield from _map(worker["block_map"], width)
        legend = Text()
        for kind in BLOCK_KINDS:
            if worker["block_counts"][kind]:
                legend.append("■ ", STYLES[kind]).append(f"{worker['block_counts'][kind]} {NAMES.get(kind, kind)}   ")
        if worker["draft_blocks"] is not None:
            legend.append("■ ", "magenta").append("{used} of {total} draft group".format(**worker["draft_blocks"]))
        yield legend

    def _rate(self) -> str:
        if self._before is None or self._view is None:
            return "-"
        generated, passed_s = (
            self._view["scheduler"]["num_generation_tokens"] - self._before["scheduler"]["num_generation_tokens"],
            (self._view["now_ns"] - self._before["now_ns"]) / 1e9,
        )
        return f"{generated / passed_s:.0f}" if passed_s > 0 else "-"

    def _recent(self, name: str) -> tuple[Sequence[float], list[int]]:
        """A histogram since the view before, or since the beginning while that has nothing."""
        assert self._view is not None
        counts = list(self._view[name]["counts"])
        if self._before is not None:
            new = [now - before for now, before in zip(counts, self._before[name]["counts"], strict=True)]
            counts = new if any(new) else counts
        return self._view[name]["bounds_s"], counts


def timeline(steps: Iterable[View], until_ns: int, width: int) -> list[tuple[str, str]]:
    """What the worker did in each of `width` slices of the last seconds: (character, style)."""
    slices = [IDLE] * width

    def fill(start_ns: float, end_ns: float, what: tuple[str, str]) -> None:
        first, last = ((ns - until_ns + SPAN_NS) / SPAN_NS * width for ns in (start_ns, end_ns))
        for index in range(max(round(first), 0), min(max(round(last), round(first) + 1), width)):
            slices[index] = what

    shown = sorted(steps, key=lambda step: int(step["sent_ns"]))
    for step in shown:
        if not step["lost"]:
            fill(step["sent_ns"], step["received_ns"] or until_ns, PLANNED)
    for step in shown:
        if step["started_ns"] is not None:
            verified_ns = step["started_ns"] + step["verify_ns"]
            fill(step["started_ns"], verified_ns, STALE if step["num_drop"] else VERIFYING)
            if step["draft_ns"]:
                fill(verified_ns, verified_ns + step["draft_ns"], DRAFTING)
    return slices


def quantile(bounds_s: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Of a histogram, evenly spread within each range; None without any."""
    left = q * sum(counts)
    if left <= 0:
        return None
    for low, high, count in zip((0.0, *bounds_s), bounds_s, counts, strict=False):
        if left <= count:
            return low + (high - low) * left / count
        left -= count
    return bounds_s[-1]


def share(part: float, whole: float) -> str:
    """As a percentage; a dash of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def run_top(ask: Callable[[int], View], title: str, *, once: bool, console: Console | None = None) -> None:
    """Draws until Ctrl-C; `once`: one frame, of one second. `ask` gets a view of what changed since a number."""
    console = console or Console()
    top = Top(title)
    top.take(ask(0))
    time.sleep(EVERY_S)
    top.take(ask(top.after))
    if once:
        console.print(top.frame(console.width))
        return
    with Live(top.frame(console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            top.take(ask(top.after))
            live.update(top.frame(console.width), refresh=True)


def _fact(name: str, value: object) -> Text:
    return Text.assemble((f"{name} ", "bright_black"), (str(value), "bold"))


def _seconds(duration_s: float | None) -> str:
    if duration_s is None:
        return "-"
    return f"{duration_s * 1000:.3g} ms" if duration_s < 1 else f"{duration_s:.3g} s"


def _runs(slices: Iterable[tuple[str, str]]) -> Text:
    text = Text(no_wrap=True)
    for character, style in slices:
        text.append(character, style)
    return text


def _map(cells: str, width: int) -> Iterator[Text]:
    """The pool in at most a few lines: each cell the most passing of those it stands for."""
    room = min(width, len(cells)) if len(cells) <= width else width * min(MAX_MAP_LINES, math.ceil(len(cells) / width))
    per_cell = math.ceil(len(cells) / max(room, 1))
    kinds = [max(cells[start : start + per_cell]) for start in range(0, len(cells), per_cell)]
    for start in range(0, len(kinds), width):
        yield _runs(("■", STYLES[BLOCK_KINDS[int(kind)]]) for kind in kinds[start : start + width])


def _requests(view: View) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", header_style="bright_black")
    for name in ("request", "state", "worker"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "output", "accepted", "preempted"):
        table.add_column(name, justify="right", no_wrap=True)
    known = {request["request_id"] for request in view["requests"]}
    ended = [request for request in view["trail"]["ended"] if request["request_id"] not in known]
    for request in [*view["requests"], *ended][:MAX_REQUESTS]:
        of = f" of {request['max_tokens']}" if "max_tokens" in request else ""
        table.add_row(
            escape(request["request_id"]),
            request["state"],
            request.get("worker_id") or "-",
            str(request["num_prompt_tokens"]),
            f"{request['num_output_tokens']}{of}",
            share(request["num_accepted_tokens"], request["num_draft_tokens"]),
            str(request["num_preemptions"]),
        )
    return table
