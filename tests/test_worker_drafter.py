"""Drafters: what prompt lookup finds, where it stops, and that it sees confirmed tokens only."""

import time

import numpy as np
import pytest

from scheduler.request import SamplingParams
from scheduler.step import Arrival
from tests.oracle import OracleDrafter, tokens
from worker.drafter import LONGEST_MATCH, NgramDrafter, latest_match
from worker.rows import RowState, RowTable


def row_of(*token_ids: int, end: int = 1000, request_id: str = "r0") -> RowState:
    arrival = Arrival(
        row=0,
        epoch=1,
        request_id=request_id,
        prompt_token_ids=tokens(*token_ids),
        output_token_ids=tokens(),
        num_computed_tokens=0,
        end=end,
        namespace=0,
        sampling=SamplingParams(temperature=0.0),
    )
    return RowState.of(arrival, RowTable(1, 16), vocab_size=1 << 20)


def drafts_of(drafter: NgramDrafter, *token_ids: int, wanted: int = 4) -> list[int]:
    return drafter.propose([row_of(*token_ids)], [wanted])[0]


def brute_force_match(token_ids: list[int], shortest: int, longest: int) -> tuple[int, int]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == token_ids[len(token_ids) - length :]:
                stop, told = start + length, length
                while told < min(LONGEST_MATCH, stop) and token_ids[stop - 1 - told] == token_ids[-1 - told]:
                    told += 1
                return stop, told
    return 0, 0


def test_the_longest_match_wins_then_the_latest() -> None:
    drafter = NgramDrafter(max_drafts=4, prompt_lookup_min=1, prompt_lookup_max=3)
    # The last three stand at the front; the last one alone also stands later.
    assert drafts_of(drafter, 1, 2, 3, 40, 41, 3, 50, 1, 2, 3, wanted=2) == [40, 41]
    # Two copies of the last two: the later one is followed.
    assert drafts_of(drafter, 1, 2, 70, 1, 2, 80, 81, 1, 2, wanted=2) == [80, 81]


def test_a_match_shorter_than_the_minimum_is_no_match() -> None:
    assert drafts_of(NgramDrafter(max_drafts=4, prompt_lookup_min=2, prompt_lookup_max=3), 5, 1, 6, 1) == []
    assert drafts_of(NgramDrafter(max_drafts=4, prompt_lookup_min=1, prompt_lookup_max=3), 5, 1, 6, 1)[:1] == [6]


def test_no_more_is_proposed_than_wanted_or_than_the_drafter_has() -> None:
    drafter = NgramDrafter(max_drafts=3, prompt_lookup_min=1, prompt_lookup_max=2)
    history = (1, 2, 3, 4, 5, 6, 7, 1)
    assert drafts_of(drafter, *history, wanted=2) == [2, 3]
    assert drafts_of(drafter, *history, wanted=9) == [2, 3, 4]
    assert drafts_of(drafter, *history, wanted=0) == []


def test_a_match_that_runs_into_the_end_goes_on_with_its_period() -> None:
    drafter = NgramDrafter(max_drafts=7, prompt_lookup_min=2, prompt_lookup_max=4)
    assert drafts_of(drafter, 9, 9, 9, wanted=5) == [9] * 5
    assert drafts_of(drafter, 1, 2, 3, 1, 2, 3, 1, 2, wanted=7) == [3, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("history", [[], [1], [1, 2], [1, 2, 3]])
def test_a_short_history_without_a_match_gives_nothing(history: list[int]) -> None:
    if history:
        assert drafts_of(NgramDrafter(max_drafts=2), *history) == []


def test_matches_are_those_of_a_brute_force_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        token_ids = rng.integers(0, 3, rng.integers(1, 60)).astype(np.int32)
        shortest = int(rng.integers(1, 4))
        longest = shortest + int(rng.integers(0, 4))
        assert latest_match(token_ids, shortest, longest) == brute_force_match(token_ids.tolist(), shortest, longest)


def test_trap_7_drafts_extend_the_last_confirmed_token_whatever_lies_behind_it() -> None:
    """Stale drafts of an earlier frame stand behind the confirmed tokens; the drafter must not see them."""
    row = row_of(1, 2, 3, 4, 1, 2)
    row.hold_drafts([3, 4, 1])
    assert NgramDrafter(max_drafts=4).propose([row], [2]) == [[3, 4]]
    row.append_tokens([9])
    assert row.draft_token_ids == []
    assert NgramDrafter(max_drafts=4).propose([row], [2]) == [[]]


def test_trap_16_up_to_its_own_limit_the_drafter_counts_confirmed_tokens_and_is_silent_past_it() -> None:
    drafter = NgramDrafter(max_drafts=4, max_model_len=10)
    assert drafts_of(drafter, *[7] * 6) == [7, 7, 7, 7]
    assert drafts_of(drafter, *[7] * 8) == [7, 7]
    assert drafts_of(drafter, *[7] * 10) == []
    assert drafts_of(drafter, *[7] * 15) == []


def test_trap_31_one_row_past_the_limit_leaves_the_drafts_of_others_as_they_were() -> None:
    drafter = NgramDrafter(max_drafts=4, max_model_len=10)
    assert drafter.propose([row_of(*[7] * 15), row_of(*[8] * 4)], [4, 4]) == [[], [8, 8, 8, 8]]


@pytest.mark.parametrize(
    ("max_drafts", "shortest", "longest", "named"),
    [(0, 2, 4, "num_speculative_tokens"), (2, 0, 4, "prompt_lookup_min"), (2, 5, 4, "prompt_lookup_max")],
)
def test_limits_that_make_no_sense_are_refused_by_name(
    max_drafts: int, shortest: int, longest: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        NgramDrafter(max_drafts=max_drafts, prompt_lookup_min=shortest, prompt_lookup_max=longest)


def test_lookup_in_a_long_history_is_fast() -> None:
    token_ids = np.random.default_rng(0).integers(0, 49152, 32_768).astype(np.int32)
    best = 1.0
    for _ in range(10):
        started = time.perf_counter()
        latest_match(token_ids, 2, 4)
        best = min(best, time.perf_counter() - started)
    assert best < 0.001


# ---- the test drafter itself ----


def test_the_oracle_spoils_by_position_and_not_by_call_order() -> None:
    known = list(range(100))
    drafter = OracleDrafter(max_drafts=8, vocab_size=128, spoil=0.3, seed=4)
    drafter.learn({"r0": known})
    whole = [drafter.propose([row_of(*known[:start])], [8])[0] for start in range(1, 90)]
    for start in range(1, 80):
        assert whole[start - 1][4:] == whole[start + 3][:4]
    spoiled = [drafts[0] != known[start + 1] for start, drafts in enumerate(whole)]
    assert 0.15 < np.mean(spoiled) < 0.45


def test_the_oracle_knows_nothing_of_strangers() -> None:
    drafter = OracleDrafter(max_drafts=8, vocab_size=128, spoil=0.0)
    assert drafter.propose([row_of(1, 2, request_id="stranger")], [4]) == [[]]
