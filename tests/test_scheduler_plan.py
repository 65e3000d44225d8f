"""What a step computes: the formulas, the budget, the order, and what a shortage of blocks takes first."""

import numpy as np
import pytest

from scheduler.events import CacheReset, StartStep, StepFinished, Tick
from scheduler.request import FinishReason
from tests.builders import Counted, Frame, Stage, all_right, cancelled, scripted, submitted


def short(frame: Frame) -> tuple[int, int, int]:
    """n, K and reserved."""
    return frame.num_scheduled, frame.num_drafts, frame.reserved


def rejects_all(_request_id: str, _num_outputs: int, _num_drafts: int) -> int:
    return 0


# ---- the formulas ----


def test_prompt_longer_than_the_budget_is_computed_in_chunks_without_drafts() -> None:
    """Budget 50, prompt 80, K = 3: 50, then 30 without drafts, then decode with drafts."""
    stage = Stage(max_num_batched_tokens=50, max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 80, max_tokens=40))
    stage.up()
    stage.answer()
    stage.answer()
    stage.answer()
    assert [short(frame) for frame in stage.frames_of("r0")] == [(50, 0, 0), (30, 0, 1), (4, 3, 4), (4, 3, 4)]
    assert [frame.num_propose for frame in stage.frames_of("r0")] == [0, 3, 3, 3]


def test_two_prompts_share_a_pipelined_step_and_decode_after_it() -> None:
    """Two prompts of 512, budget 1024: 512 and 512 planned; after the first result 1 (+K) each."""
    stage = Stage(max_num_batched_tokens=1024, max_drafts=3, max_steps_in_flight=2)
    stage.handle(submitted("r0", 512, max_tokens=40), submitted("r1", 512, max_tokens=40))
    stage.up(num_blocks=100)
    [first, second] = stage.in_flight()
    assert {name: short(frame) for name, frame in first.items()} == {"r0": (512, 0, 1), "r1": (512, 0, 1)}
    assert {name: short(frame) for name, frame in second.items()} == {"r0": (4, 3, 4), "r1": (4, 3, 4)}
    stage.answer()
    assert {name: short(frame) for name, frame in stage.in_flight()[-1].items()} == {"r0": (4, 3, 4), "r1": (4, 3, 4)}


def test_planning_raises_computed_tokens_and_placeholders() -> None:
    """C += n and PH += reserved, while T waits for results; C - PH == T - 1 for a decoding row."""
    stage = Stage(max_drafts=3, max_steps_in_flight=4)
    stage.handle(submitted("r0", 20, max_tokens=60))
    stage.up()
    assert stage.counted() == Counted(T=20, C=20 + 4 + 4 + 4, PH=1 + 4 + 4 + 4, IF=20 + 4 + 4 + 4)
    stage.answer()
    counted = stage.counted()
    assert counted.C - counted.PH == counted.T - 1
    assert counted.IF == 16


def test_budget_takes_drafts_of_the_last_row_it_reaches() -> None:
    """n = min(T + PH - C + K, budget): what is left of K is verified and reserved."""
    stage = Stage(max_num_batched_tokens=13, max_drafts=4, max_steps_in_flight=1)
    stage.handle(*(submitted(f"r{index}", 4, max_tokens=40) for index in range(3)))
    stage.up()
    stage.answer()
    [frames] = stage.in_flight()
    assert {name: short(frame) for name, frame in frames.items()} == {"r0": (5, 4, 5), "r1": (5, 4, 5), "r2": (3, 2, 3)}


def test_many_drafts_of_many_rows_leave_half_of_the_budget_to_prompts() -> None:
    stage = Stage(max_num_batched_tokens=80, max_drafts=9, max_steps_in_flight=1)
    stage.up(num_blocks=200, max_drafts=9)
    for num_rows, num_drafts in ((1, 9), (4, 9), (5, 7), (6, 5), (8, 5)):
        for index in range(num_rows):
            if f"r{index}" not in stage.scheduler.requests:
                stage.handle(submitted(f"r{index}", 4, max_tokens=400))
        for _ in range(3):
            stage.answer()
        [frames] = stage.in_flight()
        assert {frame.num_drafts for frame in frames.values()} == {num_drafts}


def test_frame_reserves_exactly_when_the_worker_will_sample() -> None:
    """Chunks beside decodes under a small budget; the toy worker insists on it. vLLM issues 35755, 50692."""
    stage = Stage(max_num_batched_tokens=12, max_drafts=2, max_steps_in_flight=3)
    stage.up()
    lengths = {"r0": 9, "r1": 31, "r2": 5, "r3": 40}
    for request_id, length in lengths.items():
        stage.handle(submitted(request_id, length, max_tokens=12))
        stage.answer()
    stage.run()
    for request_id, length in lengths.items():
        assert stage.outputs[request_id] == scripted(request_id, 0, 12)
        frames = stage.frames_of(request_id)
        chunks = [frame for frame in frames if frame.reserved == 0]
        first_sampling = frames[len(chunks)]
        assert sum(frame.num_scheduled for frame in chunks) + first_sampling.num_scheduled == length
        assert all(frame.reserved == 1 + frame.num_drafts for frame in frames[len(chunks) :])
    assert len([frame for frame in stage.frames_of("r3") if frame.reserved == 0]) > 2
    stage.assert_settled()


@pytest.mark.parametrize(
    ("tokens", "num_verified"),
    [([], 0), ([], 3), ([1, 2, 3, 4, 5], 3), ([1, 2], 0), ([1], 4)],
    ids=["no sample", "drafts but no sample", "too many tokens", "more accepted than verified", "more than planned"],
)
def test_row_that_answers_what_no_plan_allows_ends_alone(tokens: list[int], num_verified: int) -> None:
    """A mismatch is a protocol error of that request; the step counts for the others. vLLM issue 35755."""
    stage = Stage(max_drafts=3, max_steps_in_flight=2)
    stage.handle(submitted("r0", 8, max_tokens=20), submitted("r1", 8, max_tokens=20))
    stage.up()
    stage.answer()
    assert stage.in_flight()[0]["r0"].reserved == 4
    before = stage.scheduler.stats()
    stage.reply({"r0": tokens, "r1": scripted("r1", 1, 3)}, num_verified={"r0": num_verified, "r1": 3})
    after = stage.scheduler.stats()
    assert stage.finished["r0"].reason is FinishReason.ERROR
    assert "protocol error" in stage.finished["r0"].message
    assert stage.outputs["r0"] == scripted("r0", 0, 1)
    assert stage.outputs["r1"] == scripted("r1", 0, 3)
    assert after.num_accepted_tokens - before.num_accepted_tokens == 1  # r1's
    assert after.num_draft_tokens - before.num_draft_tokens == 3
    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 20)
    stage.assert_settled()


def test_chunk_that_answers_with_a_token_ends_alone() -> None:
    """It reserved nothing, so it may return nothing."""
    stage = Stage(max_num_batched_tokens=16, max_drafts=0, max_steps_in_flight=1)
    stage.handle(submitted("r0", 4, max_tokens=20), submitted("r1", 40, max_tokens=20))
    stage.up()
    assert stage.in_flight()[0]["r1"].reserved == 0
    stage.reply({"r0": [5], "r1": [6]})
    assert sorted(stage.finished) == ["r1"]
    assert stage.finished["r1"].reason is FinishReason.ERROR
    assert stage.outputs == {"r0": [5], "r1": []}


def test_drafts_wait_for_the_next_frame_of_their_request_however_late() -> None:
    """Not planned in the next step for lack of budget: later it verifies no more than was proposed, after the true
    last token. vLLM issues 37159, 40768."""
    stage = Stage(max_num_batched_tokens=8, max_drafts=3, max_steps_in_flight=2, scheduling_policy="priority")
    stage.up()
    stage.handle(submitted("r1", 4, max_tokens=30, priority=1))
    stage.answer()
    stage.handle(submitted("r0", 24, max_tokens=1, priority=0))  # takes three budgets
    while stage.counted("r1").IF:
        stage.answer()
    num_frames = len(stage.frames_of("r1"))
    proposed = stage.frames_of("r1")[-1].num_propose
    confirmed = stage.counted("r1").T
    assert (proposed, stage.counted("r1").C) == (3, confirmed - 1)
    while len(stage.frames_of("r1")) == num_frames:
        stage.answer()
    frame = stage.frames_of("r1")[num_frames]
    assert short(frame) == (4, 3, 4)
    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 30)


def test_new_epoch_verifies_no_draft_of_the_old_one() -> None:
    """K = 0 in the frame that ends a prefill, first or resumed."""
    stage = Stage(max_drafts=3, max_steps_in_flight=2)
    stage.handle(submitted("r0", 8, max_tokens=30))
    stage.up()
    stage.answer()
    stage.answer()
    num_frames = len(stage.frames_of("r0"))
    stage.handle(CacheReset(reset_running=True))
    stage.run()
    first, second = stage.frames_of("r0")[num_frames:][:2]
    assert (first.num_drafts, first.reserved) == (0, 1)
    assert second.num_drafts == first.num_propose == 3
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_slots_cover_the_lookahead_but_never_pass_the_end() -> None:
    """Blocks for min(C + n + lookahead, prompt + max_tokens)."""
    stage = Stage(block_size=4, max_drafts=4, max_steps_in_flight=1)
    stage.handle(submitted("r0", 6, max_tokens=40), submitted("r1", 6, max_tokens=3))
    stage.up()
    frames = stage.in_flight()[0]
    assert len(frames["r0"].block_ids) == 3  # 6 + 4 proposed
    assert frames["r1"].num_propose == 1
    assert len(frames["r1"].block_ids) == 2  # 6 + 1 proposed
    stage.answer()
    assert len(stage.block_table("r0")) == 4  # 11 computed + 4 proposed
    assert len(stage.block_table("r1")) == 2  # 8 computed, none proposed: the last token never needs its slot
    stage.run()
    stage.assert_settled()


# ---- the pipeline ----


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_steps_in_flight_are_as_many_as_allowed_and_numbered_in_order(num_steps: int) -> None:
    """Each worker counts for itself."""
    stage = Stage(max_steps_in_flight=num_steps, max_drafts=1)
    stage.handle(submitted("r0", 8, max_tokens=30), submitted("r1", 8, max_tokens=30))
    stage.up("a", max_num_seqs=1)
    stage.up("b", session=2, max_num_seqs=1)
    for _ in range(5):
        for worker_id in ("a", "b"):
            assert len(stage.in_flight(worker_id)) == num_steps
            stage.answer(worker_id)
    for session in (1, 2):
        assert [plan.step_seq for plan in stage.plans if plan.session == session] == list(range(5 + num_steps))


def test_every_plan_acknowledges_all_results_applied() -> None:
    """Cumulative: a lost plan loses no acknowledgement."""
    stage = Stage(max_steps_in_flight=2, max_drafts=0)
    stage.handle(submitted("r0", 8, max_tokens=30))
    stage.up()
    assert [plan.acknowledged for plan in stage.plans] == [-1, -1]
    stage.answer()
    stage.answer()
    first, second = stage.execute(), stage.execute()
    stage.handle(StepFinished(result=second))
    assert [plan.acknowledged for plan in stage.plans] == [-1, -1, 0, 1]  # the one before is still on its way
    stage.handle(StepFinished(result=first))
    assert [plan.acknowledged for plan in stage.plans] == [-1, -1, 0, 1, 3, 3]


def test_empty_plan_carries_releases_when_there_is_nothing_to_compute() -> None:
    """The worker hears of every epoch that left."""
    stage = Stage(max_drafts=0, max_steps_in_flight=2)
    stage.handle(submitted("r0", 8, max_tokens=1))
    stage.up()
    stage.answer()
    [plan] = stage.unanswered["a"]
    assert len(plan.rows) == 0
    assert plan.released_epochs.tolist() == [stage.arrivals[0].epoch]
    stage.answer()
    assert stage.workers["a"].rows == {}
    assert stage.unanswered["a"] == []


def test_epochs_are_never_reused_even_for_a_repeated_request_id() -> None:
    """Identity decides what a frame belongs to."""
    stage = Stage(max_drafts=0)
    stage.up("a")
    stage.up("b", session=2)
    for life in range(3):
        stage.handle(*(submitted(f"r{index}", 8, max_tokens=2, stream=10 * life + index) for index in range(2)))
        stage.handle(CacheReset(reset_running=True), cancelled("r1"))
        stage.run()
    epochs = [arrival.epoch for arrival in stage.arrivals]
    assert len(set(epochs)) == len(epochs) > 6


def test_unanswered_plan_is_sent_again_after_a_timeout() -> None:
    """The same plan, as often as it takes; an answered one never."""
    stage = Stage(max_drafts=0, max_steps_in_flight=2, resend_after_ns=100)
    stage.handle(Tick(now_ns=1000), submitted("r0", 8, max_tokens=30))
    stage.up()
    sent = stage.unanswered["a"].copy()
    assert stage.handle(Tick(now_ns=1099)) == []
    assert stage.handle(Tick(now_ns=1100)) == [StartStep(worker_id="a", plan=plan) for plan in sent]
    assert stage.handle(Tick(now_ns=1150)) == []
    first, second = stage.execute(), stage.execute()
    stage.handle(StepFinished(result=second))
    assert stage.handle(Tick(now_ns=1250)) == [StartStep(worker_id="a", plan=sent[0])]  # the second is here
    stage.handle(StepFinished(result=first))
    assert stage.scheduler.stats().num_resends == 3
    assert all(plan is not again for plan in sent for again in stage.unanswered["a"])
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


# ---- order and scarcity ----


def test_running_rows_are_planned_in_order_of_arrival() -> None:
    """Budget for one row: the first to come is the first to be planned."""
    stage = Stage(max_num_batched_tokens=8, max_drafts=0, max_steps_in_flight=1)
    stage.handle(submitted("r1", 4, max_tokens=9), submitted("r0", 4, max_tokens=9), submitted("r2", 4, max_tokens=9))
    stage.up()
    assert list(stage.in_flight()[0]) == ["r1", "r0"]
    stage.answer()
    assert list(stage.in_flight()[0]) == ["r1", "r0", "r2"]


def crowded(*, max_drafts: int, num_steps: int, prompts: tuple[int, int], num_blocks: int) -> Stage:
    """r0 and r1 decode to 24 tokens in a pool of blocks of 4."""
    stage = Stage(
        block_size=4, max_drafts=max_drafts, max_steps_in_flight=num_steps, num_accepted=rejects_all,
        enable_prefix_caching=False,
    )  # fmt: skip
    for index, num_tokens in enumerate(prompts):
        stage.handle(submitted(f"r{index}", num_tokens, max_tokens=24 - num_tokens))
    stage.up(num_blocks=num_blocks)
    return stage


def test_row_that_lacks_blocks_first_loses_its_drafts() -> None:
    """Neither drafts to verify nor to propose, and nobody is preempted."""
    stage = crowded(max_drafts=3, num_steps=1, prompts=(8, 8), num_blocks=6)
    assert stage.pool().num_free == 0  # 8 + 3 proposed: three blocks each
    stage.answer()
    frames = stage.in_flight()[0]
    assert short(frames["r0"]) == (1, 0, 1)  # 9 computed fit in three blocks, with drafts they need 15 slots
    assert frames["r0"].num_propose == 0
    assert short(frames["r1"]) == (1, 0, 1)
    assert stage.scheduler.stats().num_preemptions == {}


def test_row_that_lacks_blocks_then_waits_for_its_frames() -> None:
    """While its frames fly it is skipped and nobody is preempted: the end of another may give it blocks."""
    stage = crowded(max_drafts=0, num_steps=2, prompts=(5, 10), num_blocks=6)
    while "r0" in stage.in_flight()[-1]:
        stage.answer()
    assert stage.pool().num_free == 0
    assert stage.counted("r0") == Counted(T=8, C=8, PH=1, IF=1)
    assert list(stage.in_flight()[-1]) == ["r1"]
    stage.handle(cancelled("r1"))
    stage.run()
    assert stage.scheduler.stats().num_preemptions == {}
    assert stage.outputs["r0"] == scripted("r0", 0, 19)


def test_row_that_has_nothing_to_wait_for_preempts_the_last() -> None:
    """Its own frames are settled, those of the victim still fly and will be delivered."""
    stage = crowded(max_drafts=0, num_steps=2, prompts=(5, 10), num_blocks=6)
    while "r0" in stage.in_flight()[-1]:
        stage.answer()
    stage.answer()
    assert stage.counted("r0").IF == 1  # it got a block of the victim
    assert not stage.is_running("r1")
    assert stage.scheduler.requests["r1"].num_deliver_frames == 1
    assert stage.scheduler.stats().num_preemptions == {"blocks": 1}
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 19), "r1": scripted("r1", 0, 14)}


def test_last_running_request_is_preempted_and_never_one_already_planned() -> None:
    """Once the row has nothing in flight; a plan that preempted admits nobody, the victim neither."""
    stage = crowded(max_drafts=0, num_steps=1, prompts=(8, 8), num_blocks=6)
    while not stage.scheduler.stats().num_preemptions:
        stage.answer()
    assert stage.scheduler.stats().num_preemptions == {"blocks": 1}
    assert not stage.is_running("r1")
    assert list(stage.in_flight()[0]) == ["r0"]
    assert stage.unanswered["a"][0].released_epochs.tolist() == [stage.arrivals_of("r1")[0].epoch]
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 16), "r1": scripted("r1", 0, 16)}


def test_preemption_makes_progress_and_takes_no_more_than_it_needs() -> None:
    """A full pool of many requests: each plan that preempts computes something, and one victim is enough for one
    block. vLLM issue 49674, vllm-ascend issue 16315."""
    stage = Stage(block_size=4, max_drafts=0, max_steps_in_flight=1, enable_prefix_caching=False)
    for index in range(6):
        stage.handle(submitted(f"r{index}", 8 + index % 3, max_tokens=16))
    stage.up(num_blocks=18)
    preempted = 0
    while stage.unanswered["a"]:
        stage.answer()
        count = sum(stage.scheduler.stats().num_preemptions.values())
        lacking = count - preempted
        preempted = count
        if lacking and stage.unanswered["a"]:
            assert len(stage.in_flight()[-1]) > 0
            assert lacking <= len(stage.in_flight()[-1])
    assert preempted > 0
    for index in range(6):
        assert stage.outputs[f"r{index}"] == scripted(f"r{index}", 0, 16)
    stage.assert_settled()


def test_priority_victim_before_the_cursor_makes_nobody_lose_its_turn() -> None:
    """The victim stands first among the running; all others are planned with the whole budget. vLLM issue 49206."""
    stage = Stage(max_drafts=2, max_steps_in_flight=1, scheduling_policy="priority", max_num_batched_tokens=32)
    stage.up(max_num_seqs=3)
    stage.handle(submitted("r0", 4, max_tokens=30, priority=5))
    stage.answer()
    stage.handle(submitted("r1", 4, max_tokens=30, priority=1), submitted("r2", 4, max_tokens=30, priority=1))
    stage.answer()
    assert sorted(stage.in_flight()[0]) == ["r0", "r1", "r2"]
    stage.handle(submitted("r3", 26, max_tokens=30, priority=0))  # no row is free: r0 must go
    stage.answer()
    frames = stage.in_flight()[0]
    assert {name: frame.num_scheduled for name, frame in frames.items()} == {"r1": 3, "r2": 3, "r3": 26}
    assert not stage.is_running("r0")
    assert stage.counted("r0")[1:] == (0, 0, 0)
    stage.run()
    assert all(stage.outputs[f"r{index}"] == scripted(f"r{index}", 0, 30) for index in range(4))
    stage.assert_settled()


def test_worker_hears_that_a_row_left_before_its_next_tenant_arrives() -> None:
    """One slot: after a reset, B with higher priority comes before A returns. vLLM issue 46974."""
    stage = Stage(max_drafts=0, max_steps_in_flight=2, scheduling_policy="priority")
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 8, max_tokens=20, priority=1))
    stage.handle(CacheReset(reset_running=True), submitted("r1", 8, max_tokens=4, priority=0))
    stage.answer()
    [first] = stage.arrivals_of("r1")
    plan = next(plan for plan in stage.plans if plan.arrivals and plan.arrivals[0] is first)
    released = [epoch for before in stage.plans[: stage.plans.index(plan) + 1] for epoch in before.released_epochs]
    assert stage.arrivals_of("r0")[0].epoch in released
    assert first.row == stage.arrivals_of("r0")[0].row
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 20), "r1": scripted("r1", 0, 4)}


def test_plans_are_columns_of_one_length() -> None:
    """Rows, epochs and counts line up, and block columns with them."""
    stage = Stage(max_drafts=2, num_accepted=all_right)
    stage.up()
    for index in range(5):
        stage.handle(submitted(f"r{index}", 10 * index + 3, max_tokens=20))
        stage.answer()
    stage.run()
    for plan in stage.plans:
        columns = (plan.epochs, plan.num_scheduled, plan.num_drafts, plan.reserved, plan.num_propose)
        assert {len(column) for column in columns} == {len(plan.rows)}
        assert len(plan.block_offsets) == len(plan.rows) + 1
        assert plan.block_offsets[-1] == len(plan.block_ids)
        assert len(np.unique(plan.rows)) == len(plan.rows)
