"""Each rule of the KV sanitizer is shown to fire, and none of them without cause."""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.request import SamplingParams
from scheduler.step import Arrival
from tests.oracle import tokens
from worker.rows import RowState, RowTable
from worker.sanitizer import KVSanitizer, KVViolation, is_wanted, prefix_hashes

BLOCK = 4
HISTORY = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


class Pool:
    """A sanitizer over 16 blocks, and rows to move KV in and out of it."""

    def __init__(self) -> None:
        self.sanitizer = KVSanitizer(16, BLOCK)
        self.table = RowTable(8, BLOCK, num_tokens=64)
        self.num_rows = 0

    def row(
        self,
        *token_ids: int,
        block_ids: tuple[int, ...],
        num_computed_tokens: int = 0,
        namespace: int = 0,
        request_id: str = "r0",
    ) -> RowState:
        arrival = Arrival(
            row=self.num_rows,
            epoch=self.num_rows + 1,
            request_id=request_id,
            prompt_token_ids=tokens(*token_ids),
            output_token_ids=tokens(),
            num_computed_tokens=num_computed_tokens,
            end=60,
            namespace=namespace,
            sampling=SamplingParams(temperature=0.0),
        )
        self.num_rows += 1
        row = RowState.of(arrival, self.table, vocab_size=1000)
        row.append_blocks(tokens(*block_ids))
        return row

    def compute(self, row: RowState, stop: int) -> None:
        """One step of one row: write what it computes, check what it reads, move on."""
        self.sanitizer.write(row, stop)
        self.sanitizer.check(row, stop)
        row.num_computed_tokens = min(stop, row.num_tokens)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_row_that_reads_what_it_wrote_passes(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(3, 1, 2))
    pool.compute(row, 4)
    pool.compute(row, 7)
    pool.compute(row, 10)


def test_a_prefix_hit_on_the_same_tokens_passes(pool: Pool) -> None:
    pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2)), 10)
    pool.compute(pool.row(*HISTORY[:8], 77, block_ids=(3, 1, 5), num_computed_tokens=8), 9)


def test_rejected_drafts_are_overwritten_in_peace(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(0, 1, 2, 3))
    row.hold_drafts([20, 21, 22])
    pool.compute(row, 13)
    row.append_tokens([20, 99])  # the first draft was right, the others were not
    row.num_computed_tokens = 11
    row.hold_drafts([30])
    pool.compute(row, 13)


def test_a_slot_that_was_never_written_is_named(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(3, 1, 2), num_computed_tokens=4)
    pool.sanitizer.write(row, 10)
    with pytest.raises(KVViolation, match=r"request r0 \(epoch 1\) would read position 0 from slot 12 \(block 3\)"):
        pool.sanitizer.check(row, 10)


def test_a_prefix_hit_on_other_tokens_is_found_at_the_first_that_differs(pool: Pool) -> None:
    pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2)), 10)
    other = pool.row(5, 6, 99, 8, 9, block_ids=(3, 6), num_computed_tokens=4, request_id="other")
    with pytest.raises(KVViolation, match=r"request other .* position 2 from slot 14 .* KV of other tokens; 2 of 5"):
        pool.compute(other, 5)


def test_a_hit_on_the_right_tokens_at_the_wrong_positions_is_found(pool: Pool) -> None:
    pool.compute(pool.row(1, 1, 1, 1, 1, 1, 1, 1, 1, block_ids=(3, 1, 2)), 9)
    swapped = pool.row(1, 1, 1, 1, 1, 1, 1, 1, 1, block_ids=(1, 3, 4), num_computed_tokens=8)
    with pytest.raises(KVViolation):
        pool.compute(swapped, 9)


def test_a_hit_across_namespaces_is_found(pool: Pool) -> None:
    pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2), namespace=0), 10)
    with pytest.raises(KVViolation):
        pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2), namespace=1, num_computed_tokens=8), 10)


def test_a_block_given_away_while_its_owner_reads_on_is_found(pool: Pool) -> None:
    first = pool.row(*HISTORY, block_ids=(3, 1, 2))
    pool.compute(first, 9)
    pool.compute(pool.row(50, 51, 52, block_ids=(1,), request_id="thief"), 2)
    with pytest.raises(KVViolation, match="position 4 from slot 4"):
        pool.compute(first, 10)


def test_two_rows_that_write_one_slot_in_one_step_are_found(pool: Pool) -> None:
    first = pool.row(*HISTORY, block_ids=(3, 1, 2))
    second = pool.row(50, 51, 52, block_ids=(3,))
    pool.sanitizer.write(first, 9)
    pool.sanitizer.write(second, 2)
    pool.sanitizer.check(second, 2)
    with pytest.raises(KVViolation, match="position 0 from slot 12"):
        pool.sanitizer.check(first, 9)


def test_a_rejected_draft_taken_for_a_confirmed_token_is_found(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(0, 1, 2, 3))
    row.hold_drafts([20, 21, 22])
    pool.compute(row, 13)
    row.append_tokens([20, 99, 98])
    row.num_computed_tokens = 12  # one too many: position 11 holds draft 21, not 99
    with pytest.raises(KVViolation, match="position 11"):
        pool.compute(row, 13)


def test_a_position_skipped_is_found(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(0, 1, 2))
    pool.compute(row, 4)
    row.num_computed_tokens = 5
    with pytest.raises(KVViolation, match=r"position 4 .* holds nothing"):
        pool.compute(row, 8)


def test_after_a_reset_nothing_is_known(pool: Pool) -> None:
    pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2)), 10)
    pool.sanitizer.reset()
    with pytest.raises(KVViolation, match="holds nothing"):
        pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2), num_computed_tokens=8), 10)


def test_what_a_failed_row_did_not_write_is_known_as_empty(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(3, 1, 2))
    pool.sanitizer.write(row, 10)
    pool.sanitizer.unwrite(row, 10)
    with pytest.raises(KVViolation, match="holds nothing"):
        pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 2), num_computed_tokens=8), 10)


def test_slots_of_a_released_epoch_stay_known_for_hits(pool: Pool) -> None:
    row = pool.row(*HISTORY, block_ids=(3, 1, 2))
    pool.compute(row, 10)
    pool.sanitizer.forget(row.epoch)
    pool.compute(pool.row(*HISTORY, block_ids=(3, 1, 5), num_computed_tokens=8), 10)


def test_hashes_grown_step_by_step_are_those_of_the_whole() -> None:
    pool = Pool()
    row = pool.row(*HISTORY, block_ids=(0, 1, 2))
    for stop in (1, 2, 5, 6, 10):
        pool.compute(row, stop)
    assert np.array_equal(pool.sanitizer._believed[row.epoch].hashes[:10], prefix_hashes(0, tokens(*HISTORY)))


@pytest.mark.parametrize(
    "change",
    [
        lambda token_ids: token_ids[::-1],
        lambda token_ids: np.concatenate((token_ids[1:2], token_ids[0:1], token_ids[2:])),
        lambda token_ids: token_ids + 1,
    ],
)
def test_hashes_know_order_and_values(change: Callable[[np.ndarray], np.ndarray]) -> None:
    token_ids = tokens(*HISTORY)
    assert prefix_hashes(0, token_ids)[-1] != prefix_hashes(0, change(token_ids))[-1]


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_wanted()  # tests run with it
    monkeypatch.setenv("SLIPSTREAM_SANITIZE_KV", "0")
    assert not is_wanted()
