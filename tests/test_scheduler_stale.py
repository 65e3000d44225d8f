"""Frames whose request has moved on: live, deliver or drop, settled once, in order, to the token."""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.events import (
    CacheReset,
    CloseSession,
    DrainRequested,
    EmitTokens,
    PreemptRequested,
    StepFailed,
    StepFinished,
    SwapRequested,
    WorkerDown,
)
from scheduler.request import FinishReason, SamplingParams
from scheduler.step import RowLogprobs, StepResult
from tests.builders import Counted, Stage, cancelled, scripted, submitted

RESET = CacheReset(reset_running=True)


def rejects_all(_request_id: str, _num_outputs: int, _num_drafts: int) -> int:
    return 0


def spoils_some(_request_id: str, num_outputs: int, num_drafts: int) -> int:
    return num_outputs % (num_drafts + 1)


def squeezed(num_steps: int = 2, *, max_drafts: int = 0) -> Stage:
    """r0 and r1 grow in a pool that holds only one of them to its end: r1 is preempted with frames in flight."""
    stage = Stage(
        block_size=8, max_steps_in_flight=num_steps, max_drafts=max_drafts, enable_prefix_caching=False,
        num_accepted=spoils_some,
    )  # fmt: skip
    stage.handle(submitted("r0", 8, max_tokens=40), submitted("r1", 12, max_tokens=36))
    stage.up(num_blocks=7)
    return stage


def until_delivering(stage: Stage) -> None:
    """Answer plans until r1 waits for tokens of frames in flight."""
    for _ in range(100):
        if "r1" not in stage.scheduler.requests:
            break
        if stage.scheduler.requests["r1"].num_deliver_frames:
            return
        stage.answer()
    raise AssertionError("r1 was never preempted with frames in flight")


# ---- resets and forced preemptions drop ----


def test_reset_with_nothing_in_flight_discards_nothing() -> None:
    """A request mid-decode with no frame in flight has nothing stale to wait for. vLLM issue 42117."""
    stage = Stage(max_num_batched_tokens=4, scheduling_policy="priority", max_drafts=0)
    stage.up()
    stage.handle(submitted("r1", 4, max_tokens=8, priority=1))
    stage.answer()
    stage.handle(submitted("r0", 16, max_tokens=1, priority=0))
    while stage.counted("r1").IF:
        stage.answer()
    assert stage.is_running("r1")
    assert stage.in_flight()  # chunks of r0 only

    stage.handle(RESET)
    assert stage.scheduler.async_tokens_to_discard("r1") == 0

    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 8)
    assert stage.scheduler.stats().stale_tokens_dropped == {"reset": 0}


def test_old_frame_moves_no_counter_of_a_request_planned_again() -> None:
    """The old frame held 1 + 5, the new one holds 1: neither is taken for the other. vLLM issue 46066."""
    stage = Stage(max_drafts=5, max_steps_in_flight=1)
    stage.handle(submitted("r0", 20, max_tokens=40))
    stage.up("a")
    stage.up("b", session=2)
    stage.answer("a")
    stage.handle(DrainRequested(worker_id="a", deadline_ns=10**12))  # so that it is planned again elsewhere, at once
    assert stage.in_flight("a")[0]["r0"].reserved == 6

    stage.handle(RESET)
    assert stage.scheduler.async_tokens_to_discard("r0") == 6
    [again] = stage.in_flight("b")
    assert (again["r0"].num_scheduled, again["r0"].reserved) == (21, 1)
    before = stage.counted("r0")
    assert before == Counted(T=21, C=21, PH=1, IF=21)

    stage.reply({"r0": [7]}, worker_id="a")
    assert stage.counted("r0") == before
    assert stage.scheduler.async_tokens_to_discard("r0") == 0
    stats = stage.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (0, 0)

    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 40)
    stage.assert_settled()


@pytest.mark.parametrize("event", [PreemptRequested(request_id="r0"), RESET])
def test_forced_preemption_discards_exactly_what_its_frame_reserved(event: PreemptRequested | CacheReset) -> None:
    """One frame of K = 5 in flight: 6 to discard, PH = 0; its return changes nothing else; the next is whole."""
    stage = Stage(max_drafts=5, max_steps_in_flight=1, enable_prefix_caching=False)
    stage.handle(submitted("r0", 20, max_tokens=40))
    stage.up()
    stage.answer()
    assert stage.counted("r0").PH == 6

    assert stage.handle(event) == []
    assert stage.scheduler.async_tokens_to_discard("r0") == 6
    assert stage.counted("r0") == Counted(T=21, C=0, PH=0, IF=0)

    stage.reply({"r0": [1, 2, 3, 4, 5, 6]})
    assert stage.scheduler.async_tokens_to_discard("r0") == 0
    assert stage.outputs["r0"] == scripted("r0", 0, 1)
    assert stage.counted("r0") == Counted(T=21, C=21, PH=1, IF=21)  # the new epoch's first frame, nothing else

    stage.reply({"r0": [42]})
    assert stage.outputs["r0"] == [*scripted("r0", 0, 1), 42]


@pytest.mark.parametrize("num_accepted", [rejects_all, spoils_some, lambda *_: 8])
def test_resets_on_consecutive_steps_leave_the_stream_undisturbed(num_accepted: Callable[[str, int, int], int]) -> None:
    """K = 3, four steps in flight, resets at 6 and 7, 18 and 19. vLLM issue 48245."""
    stage = Stage(max_drafts=3, max_steps_in_flight=4, num_accepted=num_accepted)
    stage.handle(submitted("r0", 20, max_tokens=120), submitted("r1", 20, max_tokens=120))
    stage.up()
    for step in range(24):
        if step in (6, 7, 18, 19):
            stage.handle(RESET)
            assert stage.scheduler.async_tokens_to_discard("r0") > 0
        stage.answer()
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 120), "r1": scripted("r1", 0, 120)}
    assert stage.scheduler.stats().stale_tokens_dropped["reset"] > 0
    stage.assert_settled()


def test_resets_in_a_row_discard_each_epoch_by_its_own_frames() -> None:
    """Two resets before any frame returned: both epochs' frames are counted, each leaves with its own."""
    stage = Stage(max_drafts=3, max_steps_in_flight=3)
    stage.handle(submitted("r0", 8, max_tokens=60))
    stage.up()
    stage.answer()
    stage.answer()
    reserved = [frames["r0"].reserved for frames in stage.in_flight()]
    assert reserved == [4, 4, 4]

    stage.handle(RESET)
    stage.answer()  # the first of the old epoch; the new epoch begins behind the others
    assert [frames["r0"].reserved for frames in stage.in_flight()] == [4, 4, 1]
    assert stage.scheduler.async_tokens_to_discard("r0") == 8
    stage.handle(RESET)
    assert stage.scheduler.async_tokens_to_discard("r0") == 9
    left = []
    for _ in range(3):
        stage.answer()
        left.append(stage.scheduler.async_tokens_to_discard("r0"))
    assert left == [5, 1, 0]
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 60)


def test_chunk_without_placeholders_is_live_or_dropped_by_its_epoch() -> None:
    """PH == 0 does not mean stale: a chunk in flight is live until something happens to it. vllm-gaudi issue 1794."""
    stage = Stage(max_num_batched_tokens=32, max_steps_in_flight=2, max_drafts=0)
    stage.handle(submitted("r0", 80, max_tokens=2))
    stage.up()
    assert stage.counted("r0") == Counted(T=80, C=64, PH=0, IF=64)
    stage.answer()
    assert stage.counted("r0") == Counted(T=80, C=80, PH=1, IF=48)  # the chunk counted, the last one follows
    assert stage.pool().num_cached == 2

    stage.handle(RESET)
    old = stage.execute()  # a chunk of the old epoch, with no placeholders
    stage.handle(StepFinished(result=old))
    assert stage.counted("r0") == Counted(T=80, C=32, PH=0, IF=32)
    assert stage.pool().num_cached == 0
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 2)
    stage.assert_settled()


def test_history_after_a_discarded_row_is_the_confirmed_one() -> None:
    """The token fed on after a drop is the last confirmed, never by the optimistic length. vLLM issue 38419."""
    stage = Stage(max_drafts=4, max_steps_in_flight=2)
    stage.handle(submitted("r0", 20, max_tokens=40))
    stage.up()
    stage.answer()
    stage.answer()
    assert stage.counted("r0").C > stage.counted("r0").T  # optimistic by the drafts in flight

    stage.handle(PreemptRequested(request_id="r0"))
    confirmed = stage.outputs["r0"].copy()
    stage.answer()
    stage.answer()
    arrival = stage.arrivals_of("r0")[-1]
    assert arrival.output_token_ids.tolist() == confirmed == scripted("r0", 0, len(confirmed))
    assert stage.outputs["r0"] == confirmed
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 40)


def test_weights_swap_drops_what_the_old_weights_sampled() -> None:
    """Streams go on with the new weights from their confirmed tokens."""
    stage = Stage(max_drafts=0, max_steps_in_flight=2)
    stage.handle(submitted("r0", 8, max_tokens=10))
    stage.up()
    stage.answer()
    stage.handle(SwapRequested(weights="new"))
    assert stage.scheduler.async_tokens_to_discard("r0") == 0  # the swap takes effect with its plan
    stage.answer()  # still live: it was planned before
    assert stage.outputs["r0"] == scripted("r0", 0, 2)
    assert stage.plans[-1].weights == "new"
    assert stage.scheduler.async_tokens_to_discard("r0") == 1
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 10)
    assert stage.scheduler.stats().stale_tokens_dropped == {"swap": 1}


# ---- preempted for lack of blocks delivers ----


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("num_steps", [2, 3, 4])
def test_tokens_of_a_preempted_request_are_delivered_before_it_runs_again(num_steps: int, max_drafts: int) -> None:
    """Two or more steps in flight and a small pool: every token once, in order. vLLM issues 47900, 48245."""
    stage = squeezed(num_steps, max_drafts=max_drafts)
    until_delivering(stage)
    before = len(stage.outputs["r1"])
    epoch = stage.scheduler.requests["r1"].epoch
    num_arrivals = len(stage.arrivals_of("r1"))
    assert stage.scheduler.async_tokens_to_discard("r1") == 0
    assert stage.counted("r1")[1:] == (0, 0, 0)
    while any(epoch in plan.epochs for plan in stage.unanswered["a"]):
        assert len(stage.arrivals_of("r1")) == num_arrivals
        stage.answer()
    delivered = len(stage.outputs["r1"]) - before
    assert delivered > 0
    assert stage.scheduler.stats().tokens_salvaged == delivered

    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 40), "r1": scripted("r1", 0, 36)}
    stage.assert_settled()


def test_resume_prefills_prompt_and_all_outputs_in_chunks() -> None:
    """Chunked prefill after a preemption: no output is cut off. vLLM issue 28787."""
    stage = Stage(max_num_batched_tokens=16, max_drafts=0, max_steps_in_flight=1, enable_prefix_caching=False)
    stage.handle(submitted("r0", 40, max_tokens=30))
    stage.up()
    while len(stage.outputs["r0"]) < 20:
        stage.answer()
    stage.handle(PreemptRequested(request_id="r0"))
    num_planned = len(stage.frames_of("r0"))
    stage.answer()
    stage.answer()
    stage.answer()
    stage.answer()
    [first, *more] = stage.frames_of("r0")[num_planned:][:4]
    assert [frame.num_scheduled for frame in (first, *more)] == [16, 16, 16, 12]  # 40 + 20
    assert [frame.reserved for frame in (first, *more)] == [0, 0, 0, 1]
    assert stage.arrivals_of("r0")[-1].output_token_ids.tolist() == scripted("r0", 0, 20)
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_no_placeholder_ever_stands_in_a_history() -> None:
    """Penalties and bad words need real ids: an arrival holds confirmed tokens only. vLLM issues 30122, 27878."""
    stage = squeezed(4, max_drafts=3)
    stage.run()
    again = stage.arrivals_of("r1")[1:]
    assert again
    for arrival in again:
        assert arrival.output_token_ids.tolist() == scripted("r1", 0, len(arrival.output_token_ids))
        assert arrival.prompt_token_ids.tolist() == stage.arrivals_of("r1")[0].prompt_token_ids.tolist()


def test_delivered_token_that_ends_its_request_takes_it_off_the_queue() -> None:
    """Its other frames become drop, and nothing follows its end."""
    stage = Stage(max_drafts=3, max_steps_in_flight=3, scheduling_policy="priority")
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 8, max_tokens=30, priority=1, sampling=SamplingParams(stop_token_ids=(42,))))
    stage.reply({"r0": [1]})
    stage.handle(submitted("r1", 8, max_tokens=2, priority=0))
    stage.reply({"r0": [2]})
    assert [frames["r0"].reserved for frames in stage.in_flight() if "r0" in frames] == [4, 4]
    assert stage.scheduler.requests["r0"].num_deliver_frames == 2
    stage.reply({"r0": [3, 42, 5]})
    assert stage.outputs["r0"] == [1, 2, 3, 42]
    assert stage.finished["r0"].reason is FinishReason.STOP
    assert stage.scheduler.async_tokens_to_discard("r0") == 4
    assert stage.scheduler.waiting == []
    stage.reply({"r0": [6, 7]})
    assert stage.scheduler.stats().stale_tokens_dropped == {"finished": 2}
    stage.run()
    stage.assert_settled()


def ousted() -> Stage:
    """r0 gave its row to r1 of higher priority while one frame of K = 3 was in flight; outputs [1, 2]."""
    stage = Stage(max_drafts=3, max_steps_in_flight=2, scheduling_policy="priority")
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 8, max_tokens=30, priority=1, sampling=SamplingParams(stop_token_ids=(42,))))
    stage.reply({"r0": [1]})
    stage.handle(submitted("r1", 8, max_tokens=2, priority=0))
    stage.reply({"r0": [2]})
    assert stage.scheduler.requests["r0"].num_deliver_frames == 1
    assert stage.in_flight()[0]["r0"].num_drafts == 3
    return stage


def test_delivered_tokens_count_in_acceptance_and_move_no_counter() -> None:
    """C and PH of a waiting request stay 0; what was verified and accepted counts."""
    stage = ousted()
    before = stage.scheduler.stats()
    assert stage.counted("r0") == Counted(T=10, C=0, PH=0, IF=0)
    stage.reply({"r0": [3, 4, 5]})
    after = stage.scheduler.stats()
    assert stage.counted("r0") == Counted(T=13, C=0, PH=0, IF=0)
    assert stage.outputs["r0"] == [1, 2, 3, 4, 5]
    assert after.num_draft_tokens - before.num_draft_tokens == 3
    assert after.num_accepted_tokens - before.num_accepted_tokens == 2
    assert after.tokens_salvaged == 3
    assert stage.scheduler.async_tokens_to_discard("r0") == 0
    stage.run()
    assert stage.outputs["r0"] == [1, 2, 3, 4, 5, *scripted("r0", 5, 30)]


def test_delivered_tokens_and_logprobs_are_cut_at_a_stop() -> None:
    """The same rules as for a running request, in a command of its own."""
    stage = ousted()
    top = np.array([[10], [11], [12]], np.int32)
    logprobs = RowLogprobs(
        row_index=0,
        logprobs=np.array([-1, -2, -3], np.float32),
        top_token_ids=top,
        top_logprobs=-top.astype(np.float32),
    )
    [emit] = [c for c in stage.reply({"r0": [3, 42, 5]}, logprobs=(logprobs,)) if isinstance(c, EmitTokens)]
    assert (emit.streams.tolist(), emit.offsets.tolist(), emit.token_ids.tolist()) == ([0], [2], [3, 42])
    [row] = emit.logprobs
    assert (row.row_index, row.logprobs.tolist(), row.top_token_ids.tolist()) == (0, [-1, -2], [[10], [11]])
    assert (stage.finished["r0"].reason, stage.finished["r0"].stop_token_id) == (FinishReason.STOP, 42)
    assert stage.finished["r0"].num_accepted_tokens == 2
    stage.run()
    stage.assert_settled()


def test_reset_turns_deliver_into_drop() -> None:
    """What a preemption would have delivered is dropped by a later reset, and accounted for to the token."""
    stage = squeezed(4)
    until_delivering(stage)
    frames = [planned["r1"] for planned in stage.in_flight() if "r1" in planned]
    delivered = stage.outputs["r1"].copy()
    stage.handle(RESET)
    assert stage.scheduler.async_tokens_to_discard("r1") == sum(frame.reserved for frame in frames) > 0
    assert stage.scheduler.requests["r1"].num_deliver_frames == 0
    stage.answer()
    assert stage.outputs["r1"] == delivered
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 40), "r1": scripted("r1", 0, 36)}
    stage.assert_settled()


def test_cancel_turns_deliver_into_drop_and_nothing_more_is_emitted() -> None:
    """A request cancelled while its tokens are on their way emits none of them."""
    stage = squeezed(4)
    until_delivering(stage)
    delivered = stage.outputs["r1"].copy()
    stage.handle(cancelled("r1"))
    assert stage.finished["r1"].reason is FinishReason.ABORT
    assert stage.scheduler.async_tokens_to_discard("r1") > 0  # of a request already gone
    stage.run()
    assert stage.outputs["r1"] == delivered
    assert stage.outputs["r0"] == scripted("r0", 0, 40)
    stage.assert_settled()


def test_lost_worker_settles_deliver_frames_at_once() -> None:
    """The request waits for nobody and resumes on any worker."""
    stage = squeezed(4)
    until_delivering(stage)
    delivered = len(stage.outputs["r1"])
    stage.up("b", session=2)
    stage.handle(WorkerDown(worker_id="a", session=1))
    assert stage.scheduler.requests["r1"].num_deliver_frames == 0
    assert len(stage.arrivals_of("r1")[-1].output_token_ids) == delivered
    stage.unanswered["a"].clear()
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 40), "r1": scripted("r1", 0, 36)}
    stage.assert_settled()


def test_row_that_fails_in_a_deliver_frame_ends_its_waiting_request() -> None:
    """Its other frames become drop; nobody else notices."""
    stage = squeezed(4)
    until_delivering(stage)
    while "r1" not in stage.in_flight()[0]:
        stage.answer()
    names = stage.in_flight()[0]
    stage.reply({name: scripted(name, len(stage.outputs[name]), len(stage.outputs[name]) + 1)
                 for name in names if name != "r1"}, failed={"r1": "out of luck"})  # fmt: skip
    assert (stage.finished["r1"].reason, stage.finished["r1"].message) == (FinishReason.ERROR, "out of luck")
    assert "r0" not in stage.finished


@pytest.mark.parametrize("tokens", [[], [1, 2, 3, 4, 5, 6]])
def test_deliver_frame_with_tokens_no_plan_allows_is_a_protocol_error(tokens: list[int]) -> None:
    """A sample too few or too many ends that request alone, waiting or running."""
    stage = squeezed(4)
    until_delivering(stage)
    while "r1" not in stage.in_flight()[0]:
        stage.answer()
    before = stage.scheduler.stats()
    others = {name: scripted(name, len(stage.outputs[name]), len(stage.outputs[name]) + 1)
              for name in stage.in_flight()[0] if name != "r1"}  # fmt: skip
    stage.reply(others | {"r1": tokens}, num_verified={"r1": max(len(tokens) - 1, 0)})
    assert stage.finished["r1"].reason is FinishReason.ERROR
    assert "protocol error" in stage.finished["r1"].message
    after = stage.scheduler.stats()
    assert (after.num_draft_tokens, after.tokens_salvaged) == (before.num_draft_tokens, before.tokens_salvaged)
    assert "r0" not in stage.finished


# ---- results late, repeated, reordered, of another session ----


def started(num_steps: int = 2) -> Stage:
    stage = Stage(max_drafts=2, max_steps_in_flight=num_steps)
    stage.handle(submitted("r0", 8, max_tokens=30))
    stage.up()
    return stage


def test_repeated_result_is_applied_once() -> None:
    """Its step is in flight no more."""
    stage = started()
    result = stage.execute()
    stage.handle(StepFinished(result=result))
    before = stage.counted()
    assert stage.handle(StepFinished(result=result)) == []
    assert stage.counted() == before
    assert stage.scheduler.stats().num_stale_results == 1
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_results_out_of_order_are_applied_in_order() -> None:
    """A later one waits for the earlier, however often it comes."""
    stage = started(3)
    results = [stage.execute() for _ in range(3)]
    for early in (results[2], results[1], results[2]):
        assert stage.handle(StepFinished(result=early)) == []
        assert stage.outputs["r0"] == []
    commands = stage.handle(StepFinished(result=results[0]))
    assert commands
    assert len(stage.outputs["r0"]) == sum(int(result.num_tokens.sum()) for result in results)
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_result_of_another_session_is_dropped() -> None:
    """A worker that registered anew answers for its new session only."""
    stage = started()
    old = stage.execute()
    stage.up("a", session=2)
    before = stage.counted()
    assert stage.handle(StepFinished(result=old)) == []
    assert stage.counted() == before
    assert stage.outputs["r0"] == []
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_result_of_an_unknown_worker_is_dropped() -> None:
    """Nobody by that name."""
    stage = started()
    old = stage.execute()
    stage.handle(WorkerDown(worker_id="a", session=1))
    assert stage.handle(StepFinished(result=old)) == []
    assert stage.scheduler.stats().num_stale_results == 1


def test_news_of_another_session_is_ignored() -> None:
    """WorkerDown, StepFailed and WorkerUp name their session."""
    stage = started()
    stage.up("a", session=2)
    before = stage.counted()
    assert stage.handle(WorkerDown(worker_id="a", session=1)) == []
    assert stage.handle(StepFailed(worker_id="a", session=1, step_seq=0, message="late")) == []
    assert stage.handle(StepFailed(worker_id="z", session=1, step_seq=0, message="who")) == []
    assert stage.counted() == before
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_repeated_registration_of_the_current_session_changes_nothing() -> None:
    """Otherwise a repeated message would empty the pool under running requests."""
    stage = started()
    before = stage.counted()
    assert stage.scheduler.handle(stage.workers["a"].up) == []
    stage.scheduler.check()
    assert stage.counted() == before
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


def wrong_epochs(result: StepResult) -> StepResult:
    return StepResult(
        worker_id=result.worker_id, session=result.session, step_seq=result.step_seq, rows=result.rows,
        epochs=result.epochs + 1, num_tokens=result.num_tokens, num_verified=result.num_verified,
        token_ids=result.token_ids,
    )  # fmt: skip


def missing_tokens(result: StepResult) -> StepResult:
    return StepResult(
        worker_id=result.worker_id, session=result.session, step_seq=result.step_seq, rows=result.rows,
        epochs=result.epochs, num_tokens=result.num_tokens, num_verified=result.num_verified,
    )  # fmt: skip


def missing_counts(result: StepResult) -> StepResult:
    return StepResult(
        worker_id=result.worker_id, session=result.session, step_seq=result.step_seq, rows=result.rows,
        epochs=result.epochs,
    )  # fmt: skip


def negative_counts(result: StepResult) -> StepResult:
    return StepResult(
        worker_id=result.worker_id, session=result.session, step_seq=result.step_seq, rows=result.rows,
        epochs=result.epochs, num_tokens=np.array([3, -1], np.int32), num_verified=result.num_verified,
        token_ids=result.token_ids,
    )  # fmt: skip


@pytest.mark.parametrize("broken", [wrong_epochs, missing_tokens, missing_counts, negative_counts])
def test_answer_that_does_not_match_its_plan_closes_the_session(broken: Callable[[StepResult], StepResult]) -> None:
    """No row of it can be trusted; its requests resume in the next session from their confirmed tokens."""
    stage = Stage(max_drafts=0)
    stage.handle(submitted("r0", 8, max_tokens=4), submitted("r1", 8, max_tokens=4))
    stage.up()
    [close] = stage.handle(StepFinished(result=broken(stage.execute())))
    assert isinstance(close, CloseSession)
    assert (close.worker_id, close.session) == ("a", 1)
    assert stage.scheduler.workers == {}
    stage.up("a", session=2)
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 4), "r1": scripted("r1", 0, 4)}
