"""How requests end: max_tokens, max_model_len, stop ids; and how many drafts may be planned near the end."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from scheduler.events import SchedulerConfig
from scheduler.request import FinishReason, SamplingParams
from scheduler.state import RequestState
from tests.builders import Stage, all_right, scripted, submitted


def rejects_all(_request_id: str, _num_outputs: int, _num_drafts: int) -> int:
    return 0


def accepts_half(_request_id: str, _num_outputs: int, num_drafts: int) -> int:
    return num_drafts // 2


ACCEPTANCES = [all_right, rejects_all, accepts_half]


# ---- the end of the model's positions ----


@pytest.mark.parametrize("num_accepted", ACCEPTANCES)
@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("max_drafts", [1, 4, 8])
def test_drafts_shrink_within_k_of_max_model_len(
    num_accepted: Callable[[str, int, int], int], num_steps: int, max_drafts: int
) -> None:
    """Fewer or no drafts, none verified twice, finish reason "length". vLLM issue 38711."""
    stage = Stage(
        max_model_len=48, max_drafts=max_drafts, max_steps_in_flight=num_steps, num_accepted=num_accepted
    )  # 48 is three blocks: nothing may need a fourth
    stage.handle(submitted("r0", 36, max_tokens=12))
    stage.up(num_blocks=3)
    num_plans = 0
    while stage.unanswered["a"]:
        stage.answer()
        if len(stage.plans) > num_plans and stage.unanswered["a"] and "r0" in stage.in_flight()[-1]:
            live = len(stage.in_flight()) - 1
            assert stage.in_flight()[-1]["r0"].num_drafts <= max(12 - len(stage.outputs["r0"]) - live - 1, 0)
        num_plans = len(stage.plans)
    assert stage.outputs["r0"] == scripted("r0", 0, 12)
    finish = stage.finished["r0"]
    assert (finish.reason, finish.num_output_tokens) == (FinishReason.LENGTH, 12)
    sampled = [frame for frame in stage.frames_of("r0") if frame.reserved]
    assert len(sampled) <= 12
    if num_accepted is all_right and num_steps == 1:
        stats = stage.scheduler.stats()
        assert stats.num_accepted_tokens + len(sampled) == 12  # every draft verified was used, once
        assert sum(frame.num_drafts for frame in sampled) == stats.num_draft_tokens
    stage.assert_settled()


def test_output_goes_on_without_drafts_past_the_drafters_limit() -> None:
    """The drafter stops at 80 tokens, the target ends at 200: output continues, acceptance is of real drafts only."""
    stage = Stage(max_drafts=4, max_proposals=lambda _request_id, num_tokens: max(80 - num_tokens, 0))
    stage.handle(submitted("r0", 20, max_tokens=180))
    stage.up()
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 180)
    assert stage.finished["r0"].reason is FinishReason.LENGTH
    stats = stage.scheduler.stats()
    assert 0 < stats.num_accepted_tokens == stats.num_draft_tokens < 60
    assert stage.finished["r0"].num_draft_tokens == stats.num_draft_tokens


def test_one_sequence_at_its_limit_leaves_the_drafts_of_others_alone() -> None:
    """Acceptance of the others stays as it was. vLLM issue 52873."""

    def drafts_of_r1(*, beside: bool) -> tuple[list[int], int, int]:
        stage = Stage(max_model_len=64, max_drafts=4, num_accepted=accepts_half)
        if beside:
            stage.handle(submitted("r0", 40, max_tokens=24))  # crosses the limit while r1 decodes
        stage.handle(submitted("r1", 8, max_tokens=50))
        stage.up()
        stage.run()
        finish = stage.finished["r1"]
        drafts = [frame.num_drafts for frame in stage.frames_of("r1")]
        return drafts, finish.num_draft_tokens, finish.num_accepted_tokens

    assert drafts_of_r1(beside=True) == drafts_of_r1(beside=False)


# ---- stops inside an accepted run ----


def decoding(max_tokens: int, sampling: SamplingParams) -> Stage:
    """r0 with output [7] and a frame of K = 3 in flight."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 8, max_tokens=max_tokens, sampling=sampling))
    stage.up()
    stage.reply({"r0": [7]})
    return stage


@pytest.mark.parametrize(
    ("sampling", "run", "kept", "stop_token_id"),
    [
        (SamplingParams(eos_token_ids=(2,)), [10, 2, 12], [10, 2], None),
        (SamplingParams(stop_token_ids=(42,)), [10, 42, 12], [10, 42], 42),
        (SamplingParams(stop_token_ids=(41, 42, 12)), [10, 42, 12], [10, 42], 42),
        (SamplingParams(eos_token_ids=(2,), stop_token_ids=(42,)), [42, 2], [42], 42),
        (SamplingParams(eos_token_ids=(2,), stop_token_ids=(42,)), [10, 11, 12, 2], [10, 11, 12, 2], None),
    ],
)
def test_stop_id_inside_a_run_cuts_it_there(
    sampling: SamplingParams, run: list[int], kept: list[int], stop_token_id: int | None
) -> None:
    """The stop is the last token of the stream and named, unless it is EOS."""
    stage = decoding(20, sampling)
    stage.reply({"r0": run})
    assert stage.outputs["r0"] == [7, *kept]
    finish = stage.finished["r0"]
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, stop_token_id)
    assert finish.num_output_tokens == 1 + len(kept)
    stage.run()
    stage.assert_settled()


def test_max_tokens_inside_a_run_cuts_it_there() -> None:
    """Two tokens are left; a run of [10, 11, 12, ...] gives [10, 11] and "length"."""
    stage = Stage(max_drafts=4, max_steps_in_flight=2)
    stage.handle(submitted("r0", 8, max_tokens=8))
    stage.up()
    stage.reply({"r0": [1]})
    stage.reply({"r0": [2, 3, 4, 5, 6]})
    assert stage.in_flight()[0]["r0"].reserved == 5  # planned before that run was known
    stage.reply({"r0": [10, 11, 12, 13, 14]})
    assert stage.outputs["r0"] == [1, 2, 3, 4, 5, 6, 10, 11]
    assert stage.finished["r0"].reason is FinishReason.LENGTH
    assert stage.finished["r0"].num_output_tokens == 8
    stage.run()
    stage.assert_settled()


def test_two_tokens_of_a_run_of_three_are_kept_with_max_tokens_2() -> None:
    """[10, 11, 12] gives [10, 11] and "length"; a stop at the same token is a stop."""
    request = submitted("r0", 8, max_tokens=2, sampling=SamplingParams(stop_token_ids=(42,))).request
    state = RequestState(request, SchedulerConfig(), 0, 0)
    assert state.first_stop(np.array([10, 11, 12], np.int32), 0) == (2, FinishReason.LENGTH, None)
    assert state.first_stop(np.array([10, 42, 12], np.int32), 0) == (2, FinishReason.STOP, 42)
    assert state.first_stop(np.array([10], np.int32), 0) is None


def test_ignored_eos_runs_through() -> None:
    """Without EOS ids nothing but the length ends the request."""
    stage = decoding(5, SamplingParams(eos_token_ids=()))
    stage.reply({"r0": [10, 2, 12]})
    assert stage.outputs["r0"] == [7, 10, 2, 12]
    assert stage.finished == {}
    stage.reply({"r0": [2]})
    assert stage.finished["r0"].reason is FinishReason.LENGTH


def test_min_tokens_holds_stops_back() -> None:
    """EOS and stop ids before it do not end the request, also inside one run."""
    stage = decoding(20, SamplingParams(eos_token_ids=(2,), stop_token_ids=(42,), min_tokens=4))
    stage.reply({"r0": [42, 2]})
    assert stage.finished == {}
    stage.reply({"r0": [10, 42, 11]})
    assert stage.outputs["r0"] == [7, 42, 2, 10, 42]
    assert stage.finished["r0"].stop_token_id == 42


def test_requests_with_many_and_with_no_stop_ids_share_a_step() -> None:
    """Each row stops at its own ids only."""
    stage = Stage(max_drafts=0)
    stage.handle(
        submitted("r0", 8, sampling=SamplingParams(stop_token_ids=(1, 2, 3))),
        submitted("r1", 8),
        submitted("r2", 8, sampling=SamplingParams(eos_token_ids=(4,))),
    )
    stage.up()
    stage.reply({"r0": [4], "r1": [1], "r2": [3]})
    assert stage.finished == {}
    stage.reply({"r0": [3], "r1": [2], "r2": [4]})
    assert sorted(stage.finished) == ["r0", "r2"]
    assert stage.finished["r0"].stop_token_id == 3
    assert stage.finished["r2"].stop_token_id is None


def test_row_of_an_ended_request_forgets_its_stop_ids() -> None:
    """The next request in that row stops at its own."""
    stage = Stage(max_drafts=0, max_steps_in_flight=1)
    stage.up(max_num_seqs=1)
    stage.handle(submitted("r0", 8, sampling=SamplingParams(stop_token_ids=(1, 2))))
    stage.handle(submitted("r1", 8, max_tokens=3))
    stage.reply({"r0": [2]})
    assert stage.arrivals_of("r1")[0].row == stage.arrivals_of("r0")[0].row
    stage.reply({"r1": [2]})
    assert sorted(stage.finished) == ["r0"]
    stage.run()
    assert stage.outputs["r1"] == [2, *scripted("r1", 1, 3)]


# ---- how many frames and drafts ----


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_pipelined_requests_need_no_extra_frame(max_tokens: int) -> None:
    """Always one step ahead, a second request one step later: exactly max_tokens outputs and sampling frames."""
    stage = Stage(max_drafts=0, max_steps_in_flight=2)
    stage.up()
    stage.handle(submitted("r0", 8, max_tokens=max_tokens))
    stage.answer()
    stage.handle(submitted("r1", 8, max_tokens=max_tokens))
    stage.run()
    for request_id in ("r0", "r1"):
        assert stage.outputs[request_id] == scripted(request_id, 0, max_tokens)
        assert [frame.reserved for frame in stage.frames_of(request_id)] == [1] * max_tokens
        assert stage.finished[request_id].reason is FinishReason.LENGTH
    assert stage.scheduler.stats().stale_tokens_dropped == {}
    stage.assert_settled()


def test_draft_cap_follows_the_confirmed_length() -> None:
    """Rejected drafts leave room for new ones: K <= max_tokens - outputs - live frames - 1. vLLM issue 18668."""
    stage = Stage(max_drafts=4, max_steps_in_flight=1, num_accepted=rejects_all)
    stage.handle(submitted("r0", 8, max_tokens=7))
    stage.up()
    stage.run()
    assert [frame.num_drafts for frame in stage.frames_of("r0")] == [0, 4, 4, 3, 2, 1, 0]


def test_draft_cap_counts_live_frames() -> None:
    """Each frame in flight yields at least one token."""
    stage = Stage(max_drafts=8, max_steps_in_flight=4)
    stage.handle(submitted("r0", 8, max_tokens=6))
    stage.up()
    assert [frames["r0"].num_drafts for frames in stage.in_flight()] == [0, 4, 3, 2]
    assert [frames["r0"].num_propose for frames in stage.in_flight()] == [4, 3, 2, 1]


def test_nothing_is_planned_that_cannot_be_needed() -> None:
    """Two tokens left and two frames in flight: the pipeline stays as it is."""
    stage = Stage(max_drafts=0, max_steps_in_flight=4)
    stage.handle(submitted("r0", 8, max_tokens=2))
    stage.up()
    assert len(stage.in_flight()) == 2
    stage.answer()
    assert len(stage.in_flight()) == 1
    stage.answer()
    assert len(stage.frames_of("r0")) == 2


@pytest.mark.parametrize(
    ("of_worker", "expected"), [(4, [2, 4, 0, 4]), (8, [2, 5, 0, 5])], ids=["small drafter", "large drafter"]
)
def test_drafts_are_capped_by_the_request_the_worker_and_the_server(of_worker: int, expected: list[int]) -> None:
    """The least of them, for each request."""
    stage = Stage(max_drafts=5, max_steps_in_flight=2)
    for index, max_drafts in enumerate([2, None, 0, 9]):
        stage.handle(submitted(f"r{index}", 8, max_drafts=max_drafts))
    stage.up(max_drafts=of_worker)
    assert [stage.in_flight()[1][f"r{index}"].num_drafts for index in range(4)] == expected


@pytest.mark.parametrize("wanted", [[0, 0, 0, 0], [4, 0, 2, 9]])
def test_drafts_are_what_was_chosen_for_the_step(wanted: Sequence[int]) -> None:
    """K is chosen per step; a frame verifies no more than the one before was asked to propose."""
    choices = iter(wanted)
    stage = Stage(
        max_drafts=4,
        max_steps_in_flight=1,
        choose_drafts=lambda _worker_id, rows: np.full(len(rows), next(choices, 0), np.int32),
    )
    stage.up()
    stage.handle(submitted("r0", 8, max_tokens=40))
    for _ in range(4):
        stage.answer()
    frames = stage.frames_of("r0")
    assert [frame.num_propose for frame in frames[1:5]] == [min(k, 4) for k in wanted]
    for before, frame in pairwise(frames):
        assert frame.num_drafts <= before.num_propose
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 40)
