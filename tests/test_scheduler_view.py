"""What a live page is told: the kinds of blocks against the requests' own counters, and steps placed in time."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from cluster.clock_offset import ClockOffset
from scheduler.state import Step
from scheduler.step import StepPlan, StepResult
from scheduler.trail import StepTrail, Trail, WorkerClock
from scheduler.view import BLOCK_KINDS, view_of
from tests.builders import Stage, submitted
from tests.whole_stack import whole_stack

MS = 1_000_000


def kinds_of(stage: Stage) -> str:
    """One letter a block, those of r0 and later in the order they were taken."""
    [worker] = view_of(stage.scheduler)["workers"]
    assert sum(worker["block_counts"].values()) == worker["num_blocks"]
    return "".join(BLOCK_KINDS[int(cell)][0] for cell in worker["block_map"]).rstrip("f")


def test_blocks_are_what_their_tokens_are() -> None:
    stage = Stage(max_drafts=3, max_steps_in_flight=1, block_size=4)
    stage.handle(submitted("r0", 8, max_tokens=60))
    stage.up(max_num_seqs=4, num_blocks=32)
    assert kinds_of(stage)[:3] == "ccp"  # two of the prompt, one for the token to come
    stage.reply({"r0": [7]})
    # 9 confirmed, 1 + 3 reserved up to position 13, whose lookahead is 3 more; the prompt's blocks can be hit.
    assert kinds_of(stage)[:4] == "sspp"
    stage.reply({"r0": [1]})  # no draft was right: KV of three is garbage until the next step has ended
    assert "g" in kinds_of(stage)
    [worker] = view_of(stage.scheduler)["workers"]
    assert worker["garbage_kv_tokens"] == stage.scheduler.stats().garbage_kv_tokens == 3
    [row] = view_of(stage.scheduler)["requests"]
    assert (row["state"], row["worker_id"], row["num_output_tokens"]) == ("running", "a", 2)


def test_released_blocks_are_cached_or_free() -> None:
    stage = Stage(max_drafts=0, max_steps_in_flight=1, block_size=4)
    stage.handle(submitted("r0", 8, max_tokens=1))
    stage.up(num_blocks=32)
    stage.reply({"r0": [7]})
    assert kinds_of(stage) == "cc"
    assert view_of(stage.scheduler)["requests"] == []


def test_a_large_pool_is_drawn_in_fewer_cells() -> None:
    stage = Stage(max_drafts=0, max_steps_in_flight=1, block_size=4)
    stage.up(num_blocks=5000)
    [worker] = view_of(stage.scheduler)["workers"]
    assert (len(worker["block_map"]), worker["blocks_per_cell"]) == (1000, 5)


@pytest.mark.parametrize("offset_ms", [0, -7_000, 123_456])
def test_steps_of_another_clock_are_placed_between_plan_and_answer(offset_ms: int) -> None:
    """The worker tells durations only; delays of its messages vary."""
    rng = np.random.default_rng(1)
    clock, now, worst = WorkerClock(), 0, 0
    for seq in range(200):
        idle = 1 * MS if seq else 0
        began = now + idle
        ended = began + 5 * MS
        sent, received = began - int(rng.integers(0, 4 * MS)), ended + int(rng.integers(0, 4 * MS))
        offset = offset_ms * MS
        result = StepResult(worker_id="a", session=1, step_seq=seq, verify_ns=4 * MS, draft_ns=1 * MS, idle_ns=idle)
        trail = StepTrail("a", step_of(seq), sent + offset, seq)
        started = clock.place(trail, result, received + offset)
        assert sent + offset <= started
        assert started + 5 * MS <= received + offset
        worst = max(worst, abs(started - began - offset)) if seq > 64 else 0
        now = ended
    assert worst < MS // 2


def step_of(seq: int) -> Step:
    return Step(
        plan=StepPlan(session=1, step_seq=seq, acknowledged=seq - 1),
        sent_ns=0,
        kind=np.zeros(0, np.int8),
        rows=np.zeros(0, np.intp),
    )


def test_a_trail_tells_what_is_new_and_what_was_lost() -> None:
    trail = Trail()
    trail.planned("a", step_of(0), 10)
    trail.planned("a", step_of(0), 15)  # sent again
    trail.planned("a", None, 16)
    first = trail.since(0, frames=False, most=10)
    assert [(step["seq"], step["received_ns"]) for step in first["steps"]] == [(0, None)]
    trail.planned("a", step_of(1), 20)
    trail.answered(StepResult(worker_id="a", session=1, step_seq=0, verify_ns=5), 30)
    trail.answered(StepResult(worker_id="a", session=1, step_seq=0, verify_ns=5), 40)
    trail.lost("a", 1)
    second = trail.since(first["number"], frames=True, most=10)
    told = [(step["seq"], step["received_ns"], step["lost"]) for step in second["steps"]]
    assert told == [(0, 30, False), (1, None, True)]
    assert trail.since(second["number"], frames=True, most=10)["steps"] == []


def test_the_quickest_answer_sets_the_clock() -> None:
    clock = ClockOffset()
    clock.heard("1", 100, 5_000, 200)
    clock.heard("1", 1_000, 9_999, 2_000)
    assert (clock.offset_ns, clock.error_ns) == (4_850, 50)
    clock.heard("2", 1_000, 9_999, 2_000)
    assert (clock.offset_ns, clock.error_ns) == (8_499, 500)


async def test_a_view_of_the_whole_stack_has_every_step_and_frame() -> None:
    async with whole_stack() as up:
        answers = [
            up.client.generate([7, 8, 9, i], request_id=f"r{i}", max_tokens=20, ignore_eos=True) for i in range(20, 23)
        ]
        await asyncio.gather(*(answer.aresult() for answer in answers))
        await up.idle()
        view: dict[str, Any] = await up.client.aview(frames=True)
        assert json.loads(json.dumps(view)) == view
        steps = view["trail"]["steps"]
        assert len(steps) == view["scheduler"]["num_steps"]
        assert [step["seq"] for step in steps] == list(range(len(steps)))
        for step in steps:
            assert step["sent_ns"] <= step["started_ns"]
            assert step["started_ns"] + step["verify_ns"] + step["draft_ns"] <= step["received_ns"] <= view["now_ns"]
            assert len(step["frames"]) == step["num_rows"]
            assert sum(frame["num_tokens"] for frame in step["frames"]) == step["num_tokens"]
            assert {frame["request_id"] for frame in step["frames"]} <= {"r20", "r21", "r22"}
        kinds = [message[0] for message in view["trail"]["messages"]]
        assert kinds.count("submit") == 3
        delivered = {message[3] for message in view["trail"]["messages"] if message[0] == "deliver"}
        assert delivered == {name for _, name in view["deliveries"]}
        assert {row["request_id"]: row["num_output_tokens"] for row in view["trail"]["ended"]} == {
            f"r{i}": 20 for i in range(20, 23)
        }
        assert sum(view["time_to_first_token"]["counts"]) == 3
        assert abs(view["clock"]["offset_ns"]) <= view["clock"]["error_ns"]  # one process, one clock
        later = await up.client.aview(view["trail"]["number"], frames=True)
        assert later["trail"]["steps"] == later["trail"]["messages"] == []
