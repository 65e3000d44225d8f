"""Every invariant of the core, as assertions. Run after every event in tests; never in production."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from scheduler.state import FrameKind, RequestState, WorkerState

if TYPE_CHECKING:
    from scheduler.core import Scheduler


def check_scheduler(scheduler: "Scheduler") -> None:
    """Assert all of it. O(everything)."""
    for worker in scheduler.workers.values():
        check_steps(worker, scheduler.config.max_steps_in_flight)
        check_blocks(worker, scheduler.config.block_size)
        for row in worker.rows.order().tolist():
            check_row(worker, row)
        check_former(worker)
    check_queue(scheduler)
    check_discards(scheduler)


def check_steps(worker: WorkerState, max_steps_in_flight: int) -> None:
    """Steps in flight are consecutive; results are applied in order."""
    expected = list(range(worker.acknowledged + 1, worker.next_step_seq))
    assert sorted(worker.in_flight) == expected, f"{worker.worker_id}: steps {sorted(worker.in_flight)}, not {expected}"
    assert len(expected) <= max_steps_in_flight
    assert set(worker.early_results) <= set(worker.in_flight)
    for step in worker.in_flight.values():
        assert step.num_converted == np.count_nonzero(step.kind != FrameKind.LIVE)
        assert len(np.unique(step.plan.rows)) == len(step.plan.rows)


def check_blocks(worker: WorkerState, block_size: int) -> None:
    """free + used == total; a block's references are exactly the tables it stands in."""
    worker.pool.check()
    table = worker.rows
    references: Counter[int] = Counter()
    for row in table.order().tolist():
        blocks = table.block_table[row, : table.num_blocks[row]].tolist()
        assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
        references.update(blocks)
        slots = min(int(table.num_computed[row]), int(table.end[row]))
        assert len(blocks) * block_size >= slots, f"row {row}: {len(blocks)} blocks for {slots} computed tokens"
    for block in range(worker.pool.num_blocks):
        assert worker.pool.reference_count(block) == references[block], f"block {block} leaks"


def check_row(worker: WorkerState, row: int) -> None:
    """The row's counters are those of its live frames; C - PH == T - 1 while it decodes."""
    table = worker.rows
    state = table.states[row]
    assert state is not None
    assert (state.worker, state.row, state.epoch) == (worker, row, int(table.epoch[row]))
    scheduled = reserved = live = 0
    for step in worker.in_flight.values():
        index = step.index_of(row, state.epoch)
        if index is not None:
            assert step.kind[index] == FrameKind.LIVE, "a running epoch has only live frames"
            scheduled += int(step.plan.num_scheduled[index])
            reserved += int(step.plan.reserved[index])
            live += int(step.plan.reserved[index] > 0)
    assert (scheduled, reserved, live) == (
        int(table.num_in_flight[row]),
        int(table.num_placeholders[row]),
        int(table.num_live[row]),
    ), f"{state.key}: IF, PH, live frames"
    num_tokens, num_computed = int(table.num_tokens[row]), int(table.num_computed[row])
    if table.prefilling[row]:
        assert num_computed <= num_tokens
        assert reserved == 0
    else:
        assert num_computed - reserved == num_tokens - 1, f"{state.key}: C={num_computed} PH={reserved} T={num_tokens}"
    assert num_tokens < int(table.end[row]), f"{state.key} should have ended"
    assert int(table.num_published[row]) <= int(table.num_blocks[row])


def check_former(worker: WorkerState) -> None:
    """Epochs that left their row are remembered exactly while frames of theirs fly."""
    frames: Counter[int] = Counter()
    for step in worker.in_flight.values():
        for index in np.flatnonzero(step.kind != FrameKind.LIVE).tolist():
            epoch = int(step.plan.epochs[index])
            frames[epoch] += 1
            assert worker.former[epoch].kind == step.kind[index]
    assert {epoch: former.num_frames for epoch, former in worker.former.items()} == dict(frames)
    for epoch, former in worker.former.items():
        if former.kind is FrameKind.DELIVER:
            assert former.state.epoch == epoch
            assert former.state.worker is None
            assert former.state.num_deliver_frames == former.num_frames


def check_queue(scheduler: "Scheduler") -> None:
    """Every live request is either running or waiting; the queue is in order."""
    waiting: list[RequestState] = scheduler.waiting
    keys = [state.order_key for state in waiting]
    assert keys == sorted(set(keys)), "the queue is out of order"
    assert all(state.worker is None for state in waiting)
    running = [s for worker in scheduler.workers.values() for s in worker.rows.states if s is not None]
    assert {id(state) for state in scheduler.requests.values()} == {id(state) for state in [*waiting, *running]}
    assert len(scheduler.requests) == len(waiting) + len(running)
    for state in waiting:
        assert state.num_tokens < state.end, f"{state.key} should have ended"
        flying = [w for w in scheduler.workers.values() if state.epoch in w.former]
        delivering = sum(w.former[state.epoch].num_frames for w in flying if is_deliver(w, state.epoch))
        assert state.num_deliver_frames == delivering, f"{state.key} waits for frames that do not fly"


def is_deliver(worker: WorkerState, epoch: int) -> bool:
    """Whether an epoch that left its row still delivers."""
    return worker.former[epoch].kind is FrameKind.DELIVER


def check_discards(scheduler: "Scheduler") -> None:
    """async_tokens_to_discard is the sum of `reserved` over drop frames, per attempt, to the token."""
    expected: Counter[tuple[str, int]] = Counter()
    for worker in scheduler.workers.values():
        for step in worker.in_flight.values():
            for index in np.flatnonzero(step.kind == FrameKind.DROP).tolist():
                reserved = int(step.plan.reserved[index])
                if reserved:
                    expected[worker.former[int(step.plan.epochs[index])].state.key] += reserved
    assert scheduler.discards == dict(expected), f"{scheduler.discards} to discard, not {dict(expected)}"
