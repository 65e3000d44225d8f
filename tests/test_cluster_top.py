"""`slipstream top` and `slipstream trace` over the whole stack: one frame as text, one trace read back."""

import asyncio
import io
import itertools
import json
import random
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.errors import ServerError
from cluster.top import DRAFTING, IDLE, PLANNED, SPAN_NS, STALE, VERIFYING, Top, quantile, run_top, timeline
from cluster.trace import SCHEDULER_PID, Trace, collect
from tests.live_stack import LiveStack, live_stack

WIDTH = 100


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [([0, 0, 0], 0.5, None), ([4, 0, 0], 0.5, 0.5), ([1, 1, 0], 1.0, 2.0), ([0, 0, 9], 0.5, 2.0)],
)
def test_quantiles_of_a_histogram(counts: list[int], q: float, expected: float | None) -> None:
    assert quantile((1.0, 2.0), counts, q) == expected


def test_a_timeline_has_what_the_worker_did() -> None:
    part = SPAN_NS // 10
    step = {"sent_ns": part, "received_ns": 6 * part, "lost": False, "num_drop": 0}
    step |= {"started_ns": 2 * part, "verify_ns": 2 * part, "draft_ns": part}
    assert timeline([step], SPAN_NS, 10) == [IDLE, PLANNED, VERIFYING, VERIFYING, DRAFTING, PLANNED, *[IDLE] * 4]
    open_step = {"sent_ns": 8 * part, "received_ns": None, "started_ns": None, "lost": False, "num_drop": 0}
    assert timeline([step | {"num_drop": 1}, open_step], SPAN_NS, 10)[3:] == [
        STALE,
        DRAFTING,
        PLANNED,
        *[IDLE] * 2,
        *[PLANNED] * 2,
    ]


async def with_load(up: LiveStack, work: Any, *arguments: Any, **options: Any) -> Any:
    """Something that asks as a command does, from a thread, while clients are served."""
    load = asyncio.create_task(up.load(4, random.Random(1)))
    try:
        await asyncio.sleep(0.5)
        return await asyncio.to_thread(work, *arguments, **options)
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load


async def test_one_frame_for_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=False)
    async with live_stack(verify_s=0.005, draft_s=0.005) as up:
        await with_load(up, run_top, up.client.view, "tiny on [somewhere]", once=True, console=console)
    text = out.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("tiny on [somewhere] ─")
    for fact in (
        "running ",
        "tokens/s ",
        "accepted by depth",
        "worker-0: ",
        "worker-1: ",
        "chat-0-",
        "■",
        "█",
        "▓",
    ):
        assert fact in text, fact


async def test_a_frame_without_workers_says_so() -> None:
    async with live_stack(num_workers=0) as up:
        top = Top("tiny")
        top.take(await up.client.aview())
        console = Console(file=io.StringIO(), width=40)
        with console.capture() as captured:
            console.print(top.frame(40))
    assert "no worker is up" in captured.get()


async def test_a_trace_can_be_read_back_and_its_parts_fit(tmp_path: Path) -> None:
    async with live_stack(verify_s=0.004, draft_s=0.002) as up:
        trace = await with_load(up, collect, [lambda after: up.client.view(after, frames=True)], 1.5)
    file = tmp_path / "out.json"
    file.write_text(json.dumps(trace.document()))
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"scheduler", "front end front", "worker worker-0", "worker worker-1"}
    for event in events:
        assert event["ph"] in ("M", "X", "b", "e", "s", "f")
        assert event["pid"] in names
        assert event["ph"] == "M" or isinstance(event["ts"], float)
    check_nesting(events)
    check_arrows(events, names)
    frames = [event for event in events if event.get("cat", "").startswith("frame,")]
    assert {event["name"].split("-")[0] for event in frames} == {"chat"}
    assert any(event["args"].get("num_verified") for event in frames)
    flights = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            flights[event["id"], event["name"]].append(event["ph"])
    assert all(phases in (["b"], ["b", "e"]) for phases in flights.values())
    assert len(flights) > 20


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Steps of a worker follow each other, and verify and draft lie within theirs."""
    for pid in {event["pid"] for event in events if event["name"] == "verify"}:
        here = [event for event in events if event["pid"] == pid and event["ph"] == "X" and "dur" in event]
        steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in here if e["name"].startswith("step "))
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(steps))
        for part in (event for event in here if event["name"] in ("verify", "draft")):
            assert any(start - 1 <= part["ts"] and part["ts"] + part["dur"] <= end + 1 for start, end in steps)


def check_arrows(events: list[dict[str, Any]], names: dict[int, str]) -> None:
    """Every message leaves one process before it reaches another: the clocks are one."""
    ends: dict[str, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["id"]][event["ph"]] = event
    kinds: dict[str, int] = defaultdict(int)
    for identity, both in ends.items():
        assert both["s"]["ts"] <= both["f"]["ts"], identity
        assert SCHEDULER_PID in (both["s"]["pid"], both["f"]["pid"])
        assert names[both["s"]["pid"]] != names[both["f"]["pid"]]
        kinds[identity.partition("/")[0]] += 1
    assert min(kinds[kind] for kind in ("plan", "result", "deliver")) > 20


def test_a_scheduler_that_began_anew_ends_a_trace() -> None:
    empty = {"now_ns": 1, "trail": {"steps": [], "messages": []}, "front_end": {"name": "f"}, "deliveries": []}
    empty["clock"] = {"offset_ns": 0, "error_ns": 0}
    trace = Trace()
    trace.take(empty | {"life": "1"})
    with pytest.raises(ServerError, match="restarted"):
        trace.take(empty | {"life": "2"})
