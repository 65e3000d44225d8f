"""Columns over a worker's permanent rows: seats, order, tokens, blocks, stop ids."""

import numpy as np

from scheduler.events import SchedulerConfig
from scheduler.request import SamplingParams
from scheduler.rows import RowTable
from scheduler.state import RequestState
from tests.builders import prompt_of, submitted

CONFIG = SchedulerConfig(max_model_len=64, block_size=4, scheduling_policy="priority")


def state_of(
    request_id: str, *, priority: int = 0, arrival: int = 0, sampling: SamplingParams | None = None
) -> RequestState:
    request = submitted(request_id, 8, max_tokens=4, priority=priority, sampling=sampling).request
    return RequestState(request, CONFIG, arrival, 0)


def seat(table: RowTable, state: RequestState, epoch: int) -> int:
    state.row = table.seat(state, epoch=epoch, num_hit_tokens=0, namespace=0, front_end=0)
    return state.row


def test_rows_are_taken_lowest_first_and_used_again() -> None:
    """Permanent rows: a worker keeps one per request."""
    table = RowTable(2, 64, 4)
    assert [seat(table, state_of("r0"), 1), seat(table, state_of("r1", arrival=1), 2)] == [0, 1]
    assert (table.num_free_rows, table.num_running) == (0, 2)
    table.vacate(0)
    assert seat(table, state_of("r2", arrival=2), 3) == 0


def test_order_is_by_priority_then_arrival_and_follows_every_change() -> None:
    """The last is the first to go."""
    table = RowTable(4, 64, 4)
    for epoch, (priority, arrival) in enumerate([(1, 0), (0, 3), (1, 1), (0, 2)], 1):
        seat(table, state_of(f"r{epoch}", priority=priority, arrival=arrival), epoch)
    assert table.order().tolist() == [3, 1, 0, 2]
    table.vacate(1)
    assert table.order().tolist() == [3, 0, 2]
    seat(table, state_of("r9", priority=-1, arrival=9), 9)
    assert table.order().tolist() == [1, 3, 0, 2]


def test_tokens_and_blocks_go_back_with_the_request() -> None:
    """It leaves with all it has confirmed; its blocks are returned first to last."""
    table = RowTable(1, 64, 4)
    state = state_of("r0")
    row = seat(table, state, 1)
    table.append_blocks(row, [7, 3])
    table.append_blocks(row, [5])
    table.write_tokens(np.array([row]), np.array([8], np.int32), np.array([2], np.int32), np.array([41, 42], np.int32))
    table.num_tokens[row] = 10
    table.num_draft_tokens[row], table.num_accepted[row] = 6, 2
    assert table.vacate(row) == [7, 3, 5]
    assert state.token_ids.tolist() == [*prompt_of("r0", 8).tolist(), 41, 42]
    assert (state.num_tokens, state.num_outputs) == (10, 2)
    assert (state.num_draft_tokens, state.num_accepted_tokens) == (6, 2)


def test_next_tenant_starts_from_nothing() -> None:
    """No counter of the one before is left."""
    table = RowTable(1, 64, 4)
    row = seat(table, state_of("r0"), 1)
    columns = (
        table.num_placeholders, table.num_in_flight, table.num_live, table.num_proposed, table.num_blocks,
        table.num_published, table.num_draft_tokens, table.num_accepted,
    )  # fmt: skip
    for column in columns:
        column[row] = 5
    table.prefilling[row] = False
    table.num_blocks[row] = 0
    table.vacate(row)
    assert seat(table, state_of("r1"), 2) == row
    assert [int(column[row]) for column in columns] == [0] * len(columns)
    assert table.prefilling[row]
    assert table.num_computed[row] == 0


def test_run_past_the_model_length_is_cut_where_the_row_ends() -> None:
    """A worker's last run may be longer than what is left."""
    table = RowTable(2, 16, 4)
    starts, counts = np.array([14, 3], np.int32), np.array([3, 1], np.int32)
    table.write_tokens(np.array([0, 1]), starts, counts, np.array([1, 2, 3, 4], np.int32))
    assert table.token_ids[0, 14:].tolist() == [1, 2]
    assert table.token_ids[1, 3] == 4


def test_stop_ids_are_those_of_the_running_requests() -> None:
    """Whichever row they belong to; an id shared by two stays until both are gone."""
    table = RowTable(3, 64, 4)
    tokens = np.array([9, 2, 5, 1, 6, 2, 7, 0], np.int32)
    assert table.may_stop(tokens).tolist() == []
    seat(table, state_of("r0", sampling=SamplingParams(eos_token_ids=(2,))), 1)
    assert table.may_stop(tokens).tolist() == [1, 5]
    seat(table, state_of("r1", sampling=SamplingParams(eos_token_ids=(2,), stop_token_ids=(7, 6))), 2)
    seat(table, state_of("r2"), 3)
    assert table.may_stop(tokens).tolist() == [1, 4, 5, 6]
    table.vacate(0)
    assert table.may_stop(tokens).tolist() == [1, 4, 5, 6]
    table.vacate(1)
    assert table.may_stop(tokens).tolist() == []
