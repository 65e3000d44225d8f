"""Requests and workers come and go: submissions, attempts, cancels, deadlines, losses, drains, swaps, stories."""

from typing import Any

import pytest

from scheduler.core import MAX_ENDED_STREAMS
from scheduler.events import (
    CacheReset,
    CloseSession,
    Command,
    DrainRequested,
    EmitTokens,
    FinishRequest,
    FrontEndLost,
    PreemptRequested,
    RejectRequest,
    StartStep,
    StepFailed,
    SwapRequested,
    Tick,
    WorkerDown,
)
from scheduler.request import FinishReason, RejectCode, SamplingParams
from tests.builders import Stage, cancelled, prompt_of, scripted, submitted


def running(*request_ids: str, num_steps: int = 2, **config: Any) -> Stage:
    """Requests of 8 + 16 tokens that have their first token, without drafts unless told."""
    stage = Stage(**{"max_drafts": 0, "max_steps_in_flight": num_steps} | config)
    stage.handle(*(submitted(request_id, 8, max_tokens=16) for request_id in request_ids))
    stage.up()
    stage.answer()
    return stage


def to_clients(commands: list[Command]) -> list[Command]:
    """All that is not for workers."""
    return [command for command in commands if not isinstance(command, StartStep | CloseSession)]


# ---- submissions ----


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "prompt_token_ids is empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"prompt": 60, "max_tokens": 5}, "prompt + max_tokens is 65, beyond max_model_len 64"),
        ({"prompt": 40, "max_tokens": 9}, "beyond the largest KV pool of 3 blocks of 16"),
    ],
    ids=["empty prompt", "no tokens wanted", "too long for the model", "too large for any worker"],
)
def test_impossible_request_is_invalid(fields: dict[str, Any], says: str) -> None:
    """Told apart, naming the field and the limit; nothing of it is kept."""
    stage = Stage(max_model_len=64, largest_pool_blocks=3)
    stage.up()
    [reject] = stage.handle(submitted("r0", **fields))
    assert isinstance(reject, RejectRequest)
    assert (reject.code, reject.retry_after_ms) == (RejectCode.INVALID_ARGUMENT, None)
    assert says in reject.message
    assert stage.scheduler.requests == {}
    stage.handle(submitted("r0", 40, max_tokens=8))
    stage.run()
    assert stage.finished["r0"].reason is FinishReason.LENGTH


def test_request_is_measured_against_configured_pools_not_against_workers_up_now() -> None:
    """A small worker alone makes nothing invalid: the request waits."""
    stage = Stage(largest_pool_blocks=10)
    stage.up(num_blocks=2)
    assert stage.handle(submitted("r0", 100, max_tokens=20)) == []
    assert stage.scheduler.stats().num_waiting == 1


def test_full_queue_is_refused_with_a_hint() -> None:
    """Running requests do not count; one that leaves makes room."""
    stage = Stage(max_waiting=2, retry_after_ms=250, max_drafts=0)
    stage.handle(submitted("r0", 8), submitted("r1", 8))
    [reject] = stage.handle(submitted("r2", 8))
    assert isinstance(reject, RejectRequest)
    assert (reject.code, reject.retry_after_ms) == (RejectCode.RESOURCE_EXHAUSTED, 250)
    stage.handle(cancelled("r0"))
    assert stage.handle(submitted("r2", 8)) == []
    stage.up()
    assert stage.scheduler.stats().num_waiting == 0
    stage.handle(submitted("r3", 8), submitted("r4", 8))
    assert len(stage.rejected) == 1


def test_newer_attempt_takes_its_own_place_in_a_full_queue() -> None:
    """A stream that goes on is not turned away for the crowd it is part of."""
    stage = Stage(max_waiting=2, max_drafts=0)
    stage.handle(submitted("r0", 8), submitted("r1", 8))
    assert stage.handle(submitted("r0", 8, attempt=1)) == []
    assert stage.scheduler.stats().num_waiting == 2
    assert stage.scheduler.requests["r0"].request.attempt == 1


# ---- attempts ----


def test_higher_attempt_replaces_silently() -> None:
    """The old one's frames become drop, nobody hears of its end, the new one goes on from what it brings."""
    stage = running("r0")
    delivered = stage.outputs["r0"].copy()
    commands = stage.handle(submitted("r0", 8, attempt=3, stream=77, resume=delivered))
    assert to_clients(commands) == []
    assert stage.scheduler.async_tokens_to_discard("r0") == 2
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 16)
    finish = stage.finished["r0"]
    assert (finish.attempt, finish.stream, finish.num_output_tokens) == (3, 77, 16)
    stage.assert_settled()


def test_equal_or_lower_attempt_changes_nothing() -> None:
    """The same one again was sent twice; another stream's is told, or it would wait in vain."""
    stage = running("r0")
    outputs = stage.outputs["r0"].copy()
    stage.handle(submitted("r0", 8, attempt=2, resume=outputs, stream=7))
    assert stage.handle(submitted("r0", 8, attempt=2, resume=outputs, stream=7)) == []
    for attempt in (2, 1):
        [reject] = stage.handle(submitted("r0", 8, attempt=attempt, stream=9))
        assert isinstance(reject, RejectRequest)
        assert (reject.code, reject.stream, reject.attempt) == (RejectCode.ALREADY_EXISTS, 9, attempt)
    stage.run()
    assert stage.finished["r0"].attempt == 2


def test_submission_that_comes_again_after_its_end_does_not_live_again() -> None:
    """A stray copy, after any kind of end; another front end of that name counts its streams anew."""
    stage = running("r0")
    copies = [submitted("r0", 8), submitted("r0", 8, attempt=1, stream=9), submitted("r1", 8, max_tokens=2)]
    stage.handle(*copies[1:])
    stage.run()
    assert {name: finish.attempt for name, finish in stage.finished.items()} == {"r0": 1, "r1": 0}
    assert stage.handle(*copies) == []
    assert stage.scheduler.requests == {}
    stage.handle(FrontEndLost(front_end="front"), copies[0])
    assert sorted(stage.scheduler.requests) == ["r0"]


def test_ended_streams_are_remembered_up_to_a_bound() -> None:
    """The oldest is forgotten first."""
    stage = Stage()
    for stream in range(MAX_ENDED_STREAMS + 1):
        stage.handle(submitted("r0", 8, stream=stream), cancelled("r0"))
    stage.handle(submitted("r0", 8, stream=1))
    assert stage.scheduler.requests == {}
    stage.handle(submitted("r0", 8, stream=0))
    assert sorted(stage.scheduler.requests) == ["r0"]


def test_first_attempt_of_a_live_id_already_exists() -> None:
    """It is somebody else's; the same one repeated is ignored."""
    stage = running("r0")
    assert stage.handle(submitted("r0", 8)) == []  # the same stream of the same front end
    [reject] = stage.handle(submitted("r0", 8, stream=9))
    assert isinstance(reject, RejectRequest)
    assert (reject.code, reject.stream) == (RejectCode.ALREADY_EXISTS, 9)
    [reject] = stage.handle(submitted("r0", 8, front_end="other"))
    assert isinstance(reject, RejectRequest)
    assert reject.front_end == "other"
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 16)


def test_id_may_be_used_again_after_its_end() -> None:
    """Also while frames of the first life fly: they belong to an older epoch."""
    stage = running("r0")
    stage.handle(cancelled("r0"))
    stage.handle(submitted("r0", 8, max_tokens=5, stream=9))
    assert stage.scheduler.async_tokens_to_discard("r0") == 2
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 5)
    assert stage.scheduler.stats().num_finished == {"abort": 1, "length": 1}
    stage.assert_settled()


@pytest.mark.parametrize(
    ("resume", "reason", "stop_token_id"),
    [
        ([10, 11, 12, 13], FinishReason.LENGTH, None),
        ([10, 42], FinishReason.STOP, 42),
        ([10, 2], FinishReason.STOP, None),
    ],
    ids=["all tokens", "stop id", "eos"],
)
def test_resumed_request_whose_tokens_already_end_it_finishes_at_once(
    resume: list[int], reason: FinishReason, stop_token_id: int | None
) -> None:
    """The end was lost, the tokens were not: nothing is computed or emitted."""
    stage = Stage(max_drafts=0)
    stage.up()
    sampling = SamplingParams(eos_token_ids=(2,), stop_token_ids=(42,))
    [finish] = stage.handle(submitted("r0", 8, max_tokens=4, attempt=1, resume=resume, sampling=sampling))
    assert isinstance(finish, FinishRequest)
    assert (finish.reason, finish.stop_token_id, finish.num_output_tokens) == (reason, stop_token_id, len(resume))
    assert (finish.num_prompt_tokens, finish.attempt) == (8, 1)
    stage.assert_settled()


def test_resumed_request_goes_on_at_its_offset() -> None:
    """Outputs in all count towards max_tokens, resumed ones included."""
    stage = Stage(max_drafts=2)
    stage.up()
    stage.handle(submitted("r0", 8, max_tokens=10, attempt=1, resume=scripted("r0", 0, 6)))
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 10)
    assert stage.scheduler.stats().num_generation_tokens == 4


# ---- cancels ----


def test_cancelled_request_has_as_many_outputs_as_results_before() -> None:
    """Ten requests, two steps queued, one cancelled before each result."""
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    stage = Stage(max_drafts=0, max_steps_in_flight=2)
    stage.handle(*(submitted(f"r{index}", 8, max_tokens=100) for index in range(10)))
    stage.up()
    for index in order:
        [finish, *plans] = stage.handle(cancelled(f"r{index}"))
        assert isinstance(finish, FinishRequest)
        assert finish.reason is FinishReason.ABORT
        assert plans == []
        stage.answer()
    stage.run()
    for num_results, index in enumerate(order):
        assert stage.outputs[f"r{index}"] == scripted(f"r{index}", 0, num_results)
        assert stage.finished[f"r{index}"].num_output_tokens == num_results
    stage.assert_settled()


def test_request_cancelled_after_its_last_chunk_was_sent_emits_nothing() -> None:
    """The sample is on its way and nobody wants it. sglang issue 34149."""
    stage = Stage(max_num_batched_tokens=16, max_drafts=0, max_steps_in_flight=2)
    stage.handle(submitted("r0", 32, max_tokens=20))
    stage.up()
    stage.answer()
    assert stage.frames_of("r0")[1].reserved == 1
    commands = stage.handle(cancelled("r0"))
    stage.run()
    assert [type(command) for command in to_clients(commands)] == [FinishRequest]
    assert stage.outputs["r0"] == []
    assert stage.scheduler.stats().num_generation_tokens == 0
    assert stage.scheduler.stats().stale_tokens_dropped["finished"] >= 1
    stage.assert_settled()


def test_cancel_names_an_attempt() -> None:
    """Unknown and older ones are ignored; a repeated one too."""
    stage = running("r0")
    stage.handle(submitted("r0", 8, attempt=2, resume=stage.outputs["r0"]))
    assert stage.handle(cancelled("r0", 1), cancelled("r9")) == []
    assert "r0" in stage.scheduler.requests
    assert len(to_clients(stage.handle(cancelled("r0", 2), cancelled("r0", 2)))) == 1
    stage.run()
    stage.assert_settled()


def test_waiting_request_can_be_cancelled() -> None:
    """It never reaches a worker."""
    stage = Stage()
    stage.handle(submitted("r0", 8), submitted("r1", 8), cancelled("r0"))
    stage.up()
    stage.run()
    assert [arrival.request_id for arrival in stage.arrivals] == ["r1"]
    assert stage.finished["r0"].reason is FinishReason.ABORT


# ---- deadlines ----


def test_deadline_ends_running_and_waiting_requests() -> None:
    """On the scheduler's clock; what was delivered stays."""
    stage = Stage(max_drafts=0, max_steps_in_flight=1)
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 8, deadline_ns=100), submitted("r1", 8, deadline_ns=50), submitted("r2", 8))
    stage.answer()
    stage.handle(Tick(now_ns=49))
    assert stage.finished == {}
    stage.handle(Tick(now_ns=60))
    assert stage.finished["r1"].reason is FinishReason.DEADLINE
    stage.handle(Tick(now_ns=100))
    assert stage.finished["r0"].reason is FinishReason.DEADLINE
    assert stage.finished["r0"].num_output_tokens == 1
    stage.run()
    assert stage.finished["r2"].reason is FinishReason.LENGTH
    stage.assert_settled()


def test_deadline_of_an_earlier_life_kills_no_later_one() -> None:
    """An id used again, with a later deadline or none, and a newer attempt."""
    stage = Stage()
    stage.handle(submitted("r0", 8, deadline_ns=100), cancelled("r0"), submitted("r0", 8, stream=9))
    stage.handle(submitted("r1", 8, deadline_ns=100), cancelled("r1"), submitted("r1", 8, deadline_ns=300, stream=10))
    stage.handle(submitted("r2", 8, deadline_ns=100), submitted("r2", 8, attempt=1))
    stage.handle(Tick(now_ns=200))
    assert sorted(stage.scheduler.requests) == ["r0", "r1", "r2"]
    stage.handle(Tick(now_ns=300))
    assert stage.finished["r1"].reason is FinishReason.DEADLINE


def test_time_never_runs_backwards() -> None:
    """A late tick changes nothing."""
    stage = Stage()
    stage.handle(Tick(now_ns=100), Tick(now_ns=50))
    assert stage.scheduler.now_ns == 100


# ---- front ends ----


def test_each_front_end_gets_its_own_tokens() -> None:
    """Rows of one step are told apart by where they go."""
    stage = Stage(max_drafts=2)
    for index in range(6):
        stage.handle(submitted(f"r{index}", 8, front_end=f"front{index % 3}", stream=index // 3))
    stage.up()
    emits = [command for command in stage.answer() if isinstance(command, EmitTokens)]
    assert sorted(emit.front_end for emit in emits) == ["front0", "front1", "front2"]
    assert all(emit.streams.tolist() == [0, 1] for emit in emits)
    stage.run()
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, 16) for index in range(6)}


def test_lost_front_end_takes_its_requests_along() -> None:
    """Silently, running and waiting; those of others never notice."""
    stage = Stage(max_drafts=0)
    stage.up(max_num_seqs=2)
    stage.handle(submitted("r0", 8, front_end="west"), submitted("r1", 8, front_end="east"))
    stage.handle(submitted("r2", 8, front_end="west"))
    stage.answer()
    commands = stage.handle(FrontEndLost(front_end="west"))
    assert to_clients(commands) == []
    assert sorted(stage.scheduler.requests) == ["r1"]
    stage.run()
    assert sorted(stage.finished) == ["r1"]
    assert stage.outputs["r1"] == scripted("r1", 0, 16)
    stage.assert_settled()


# ---- workers ----


def test_several_workers_run_at_once() -> None:
    """Each in a session of its own, with its own steps, rows and blocks."""
    stage = Stage(max_drafts=3, num_accepted=lambda _request_id, outputs, drafts: outputs % (drafts + 1))
    for session, worker_id in enumerate("abc", 1):
        stage.up(worker_id, session, max_num_seqs=4)
    for index in range(20):
        stage.handle(submitted(f"r{index}", 5 + 3 * index, max_tokens=10 + index))
    stage.run()
    assert {plan.session for plan in stage.plans} == {1, 2, 3}
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, 10 + index) for index in range(20)}
    stage.assert_settled()


def test_requests_of_a_lost_worker_resume_anywhere_from_their_confirmed_tokens() -> None:
    """All frames of the session leave every counter at once; the whole pool is forgotten."""
    stage = running("r0", "r1", max_drafts=3)
    stage.handle(PreemptRequested(request_id="r1"))
    assert stage.scheduler.async_tokens_to_discard("r1") > 0
    stage.up("b", session=2)
    stage.handle(WorkerDown(worker_id="a", session=1, message="gone"))
    stage.unanswered["a"].clear()
    assert stage.scheduler.async_tokens_to_discard("r1") == 0
    stage.run()
    for name in ("r0", "r1"):
        assert stage.arrivals_of(name)[-1].output_token_ids.tolist() == scripted(name, 0, 1)
    assert stage.outputs == {"r0": scripted("r0", 0, 16), "r1": scripted("r1", 0, 16)}
    stage.assert_settled()


def test_nothing_written_in_a_lost_session_is_ever_a_hit() -> None:
    """A step fails or its worker dies after planning: the next session begins with an empty pool."""
    for lost in (
        WorkerDown(worker_id="a", session=1),
        StepFailed(worker_id="a", session=1, step_seq=1, message="out of memory"),
    ):
        stage = Stage(max_drafts=0)
        stage.up()
        stage.handle(submitted("r0", 64, max_tokens=30))
        stage.answer()
        assert stage.pool().num_cached == 4
        stage.handle(lost)
        stage.up("a", session=2)
        assert stage.pool().num_cached == 0
        assert stage.arrivals_of("r0")[-1].num_computed_tokens == 0
        stage.run()
        assert stage.outputs["r0"] == scripted("r0", 0, 30)


def test_failed_step_closes_its_session() -> None:
    """The worker registers anew; its requests go on meanwhile, if they can."""
    stage = running("r0")
    stage.up("b", session=2)
    commands = stage.handle(StepFailed(worker_id="a", session=1, step_seq=1, message="broken"))
    close = next(command for command in commands if isinstance(command, CloseSession))
    assert (close.worker_id, close.session) == ("a", 1)
    assert "step 1 failed: broken" in close.message
    stage.unanswered["a"].clear()
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 16)


def test_worker_that_registers_anew_loses_its_former_session() -> None:
    """WorkerUp of a known worker implies WorkerDown of its previous session."""
    stage = running("r0", "r1")
    stage.up("a", session=2)
    assert [worker.session for worker in stage.scheduler.stats().workers] == [2]
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 16), "r1": scripted("r1", 0, 16)}
    stage.assert_settled()


def test_request_that_loses_too_many_workers_ends_with_an_error() -> None:
    """It may be what kills them."""
    stage = Stage(max_attempts=2, max_drafts=0)
    stage.handle(submitted("r0", 8))
    for session in (1, 2):
        stage.up("a", session)
        stage.answer()
    assert stage.finished == {}
    stage.up("a", session=3)
    assert stage.is_running("r0")
    stage.handle(WorkerDown(worker_id="a", session=3, message="segmentation fault"))
    finish = stage.finished["r0"]
    assert finish.reason is FinishReason.ERROR
    assert "3 times" in finish.message
    assert "max_attempts 2" in finish.message
    assert "segmentation fault" in finish.message
    assert finish.num_output_tokens == 2


def test_preemptions_and_resets_are_no_losses() -> None:
    """Only a lost worker counts towards max_attempts."""
    stage = running("r0", max_attempts=0)
    for _ in range(3):
        stage.handle(PreemptRequested(request_id="r0"), CacheReset(reset_running=True))
        stage.answer()
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 16)


# ---- drain ----


def test_draining_worker_finishes_what_it_can_and_the_rest_migrates_at_the_deadline() -> None:
    """Its frames in flight are dropped then; nobody's stream shows it."""
    stage = Stage(max_drafts=2, max_steps_in_flight=2)
    stage.up("a")
    stage.handle(submitted("r0", 8, max_tokens=4), submitted("r1", 8, max_tokens=40))
    stage.answer("a")
    stage.up("b", session=2)
    stage.handle(DrainRequested(worker_id="a", deadline_ns=1000))
    stage.handle(submitted("r2", 8, max_tokens=4))
    stage.answer("a")
    stage.answer("a")
    assert "r0" in stage.finished
    stage.handle(Tick(now_ns=999))
    assert stage.scheduler.requests["r1"].worker is stage.scheduler.workers["a"]
    stage.handle(Tick(now_ns=1000))
    assert not stage.is_running("r1")
    assert stage.scheduler.async_tokens_to_discard("r1") > 0
    stage.answer("b")
    assert stage.scheduler.requests["r1"].worker is stage.scheduler.workers["b"]
    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 40)
    assert stage.scheduler.stats().num_preemptions == {"drain": 1}
    assert [worker.draining for worker in stage.scheduler.stats().workers] == [True, False]
    stage.assert_settled()


def test_last_worker_can_be_drained() -> None:
    """Its requests wait for another one."""
    stage = running("r0")
    stage.handle(DrainRequested(worker_id="a", deadline_ns=10), DrainRequested(worker_id="z", deadline_ns=10))
    stage.handle(Tick(now_ns=10))
    stage.run()
    assert stage.scheduler.stats().num_waiting == 1
    stage.up("b", session=2)
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 16)


# ---- weights ----


def test_swap_is_part_of_a_plan_and_bumps_the_namespace_with_it() -> None:
    """Bumped earlier, KV of the old weights would be published under the new namespace."""
    stage = Stage(max_drafts=0, max_steps_in_flight=2)
    stage.up()
    stage.handle(submitted("r0", 40, max_tokens=30))
    stage.answer()
    before = stage.pool().namespace
    stage.handle(SwapRequested(weights="new"))  # the pipeline is full: nothing can be planned
    assert stage.pool().namespace == before
    assert stage.pool().num_cached == 2
    stage.answer()
    assert stage.pool().namespace == before + 1
    assert stage.pool().num_cached == 0
    [swap] = [plan for plan in stage.plans if plan.weights is not None]
    assert swap.weights == "new"
    assert [(arrival.request_id, arrival.namespace) for arrival in swap.arrivals] == [("r0", before + 1)]
    assert swap.arrivals[0].num_computed_tokens == 0
    assert swap.released_epochs.tolist() == [stage.arrivals_of("r0")[0].epoch]
    stage.answer()  # planned before the swap: dropped
    assert stage.pool().num_cached == 0
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)
    assert stage.pool().num_cached == 4
    stage.assert_settled()


def test_every_worker_swaps_once_in_its_own_order() -> None:
    """Idle ones too, and those that come later."""
    stage = Stage(max_drafts=0)
    stage.up("a")
    stage.up("b", session=2)
    stage.handle(submitted("r0", 8, max_tokens=20))
    stage.handle(SwapRequested(weights="new"))
    stage.run()
    stage.handle(SwapRequested(weights="new"))
    stage.up("c", session=3)
    stage.run()
    assert sorted(plan.session for plan in stage.plans if plan.weights) == [1, 2, 3]
    assert stage.outputs["r0"] == scripted("r0", 0, 20)


# ---- resets ----


def test_reset_while_requests_run_disturbs_nobody() -> None:
    """A namespace bump only: frames in flight stay live."""
    stage = running("r0", max_drafts=2)
    before = stage.counted("r0")
    assert stage.handle(CacheReset(reset_running=False)) == []
    assert stage.counted("r0") == before
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 16)
    assert "reset" not in stage.scheduler.stats().stale_tokens_dropped


def test_reset_twice_with_nothing_in_between() -> None:
    """The second finds nobody running and drops nothing more."""
    stage = running("r0", "r1", max_drafts=2)
    reset = CacheReset(reset_running=True)
    stage.handle(reset)
    discarded = stage.scheduler.stats().async_tokens_to_discard
    stage.handle(reset, reset)
    assert stage.scheduler.stats().async_tokens_to_discard == discarded > 0
    stage.run()
    assert stage.outputs == {"r0": scripted("r0", 0, 16), "r1": scripted("r1", 0, 16)}
    stage.assert_settled()


def test_forced_preemption_of_an_unknown_request_is_ignored() -> None:
    """It may just have ended."""
    stage = running("r0")
    assert stage.handle(PreemptRequested(request_id="r9")) == []


# ---- rows that fail alone ----


def test_row_that_fails_alone_ends_its_request_and_drops_its_other_frames() -> None:
    """The others never notice; later errors of the same epoch are nobody's."""
    stage = running("r0", "r1", num_steps=3)
    stage.reply({"r1": scripted("r1", 1, 2)}, failed={"r0": "not a number"})
    finish = stage.finished["r0"]
    assert (finish.reason, finish.message) == (FinishReason.ERROR, "not a number")
    assert stage.scheduler.async_tokens_to_discard("r0") == 2
    stage.reply({"r1": scripted("r1", 2, 3)}, failed={"r0": "not a number"})
    stage.reply({"r1": scripted("r1", 3, 4)}, failed={"r0": "not a number"})
    assert stage.scheduler.async_tokens_to_discard("r0") == 0
    stage.run()
    assert stage.outputs["r1"] == scripted("r1", 0, 16)
    stage.assert_settled()


# ---- stories ----


def test_story_tells_what_happened_to_a_request() -> None:
    """Line by line, with time and attempt; also after its end."""
    stage = Stage(max_drafts=2, trace=True, num_accepted=lambda *_: 1)
    stage.handle(Tick(now_ns=1_500_000_000))
    stage.up()
    stage.handle(submitted("r0", 8, max_tokens=9))
    stage.answer()
    stage.handle(PreemptRequested(request_id="r0"))
    stage.run()
    story = stage.scheduler.story("r0")
    lines = story.splitlines()
    assert lines[0] == "[1.500s] r0#0 submitted, attempt 0, 8+0 tokens"
    assert "seated: worker a session 1" in lines[1]
    assert any("preempted: requested" in line for line in lines)
    assert any("tokens reserved) become drop" in line for line in lines)
    assert any("-> 2 tokens" in line for line in lines)
    assert "finished: length" in lines[-1]
    assert stage.scheduler.story("r9") == "r9: never heard of it"


def test_stories_of_ended_requests_are_kept_within_limits() -> None:
    """Memory does not grow with the number of requests served."""
    stage = Stage()
    for index in range(300):
        stage.handle(submitted(f"r{index}", 4), cancelled(f"r{index}"))
    assert "never heard" in stage.scheduler.story("r0")
    assert "abort" in stage.scheduler.story("r299")


def test_identical_prompts_of_different_requests_are_told_apart() -> None:
    """Shared blocks, separate streams."""
    stage = Stage(max_drafts=2)
    stage.up()
    prompt = prompt_of("r0", 40).tolist()
    for index in range(4):
        stage.handle(submitted(f"r{index}", prompt, max_tokens=20))
        stage.answer()
    stage.run()
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, 20) for index in range(4)}
    stage.assert_settled()
