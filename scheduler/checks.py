"""Every invariant of the core, as assertions. Run after every event in tests; never in production."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from scheduler.state import FrameKind, RequestState, WorkerState

if TYPE_CHECKING:
    from scheduler.core import Scheduler


def check_scheduler(scheduler: "Scheduler") -> None:
    """Assert all of it. O(everything)."""
    discards: Counter[tuple[str, int]] = Counter()
    for worker in scheduler.workers.values():
        check_steps(worker, scheduler.config.max_steps_in_flight)
        check_blocks(worker, scheduler.config.block_size)
        frames = frames_by_epoch(worker)
        for row in worker.rows.order().tolist():
            check_row(worker, row, frames.pop(int(worker.rows.epoch[row]), []))
        check_former(worker, frames, discards)
    check_queue(scheduler)
    assert scheduler.discards == dict(discards), f"{scheduler.discards} to discard, not {dict(discards)}"


class Frame(NamedTuple):
    """One epoch's row in one step in flight."""

    kind: int
    num_scheduled: int
    reserved: int


def frames_by_epoch(worker: WorkerState) -> dict[int, list[Frame]]:
    """Every frame in flight."""
    frames: dict[int, list[Frame]] = {}
    for step in worker.in_flight.values():
        columns = (step.plan.epochs, step.kind, step.plan.num_scheduled, step.plan.reserved)
        for epoch, *frame in zip(*(column.tolist() for column in columns), strict=True):
            frames.setdefault(epoch, []).append(Frame(*frame))
    return frames


def check_steps(worker: WorkerState, max_steps_in_flight: int) -> None:
    """Steps in flight are consecutive; results are applied in order."""
    expected = list(range(worker.acknowledged + 1, worker.next_step_seq))
    assert sorted(worker.in_flight) == expected, f"{worker.worker_id}: steps {sorted(worker.in_flight)}, not {expected}"
    assert len(expected) <= max_steps_in_flight
    assert set(worker.early_results) <= set(worker.in_flight)
    for step in worker.in_flight.values():
        kinds, rows = step.kind.tolist(), step.plan.rows.tolist()
        assert step.num_converted == len(kinds) - kinds.count(FrameKind.LIVE)
        assert len(set(rows)) == len(rows)
        assert step.rows.tolist() == rows


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
    assert worker.pool.num_used == len(references), "a block leaks"
    for block, count in references.items():
        assert worker.pool.reference_count(block) == count, f"block {block} leaks"


def check_row(worker: WorkerState, row: int, frames: list[Frame]) -> None:
    """The row's counters are those of its live frames; C - PH == T - 1 while it decodes."""
    table = worker.rows
    state = table.states[row]
    assert state is not None
    assert (state.worker, state.row, state.epoch) == (worker, row, int(table.epoch[row]))
    assert all(frame.kind == FrameKind.LIVE for frame in frames), "a running epoch has only live frames"
    reserved = sum(frame.reserved for frame in frames)
    assert int(table.num_in_flight[row]) == sum(frame.num_scheduled for frame in frames), f"{state.key}: IF"
    assert int(table.num_placeholders[row]) == reserved, f"{state.key}: PH"
    assert int(table.num_live[row]) == sum(frame.reserved > 0 for frame in frames), f"{state.key}: live frames"
    num_tokens, num_computed = int(table.num_tokens[row]), int(table.num_computed[row])
    assert int(table.kv_end[row]) <= int(table.num_blocks[row]) * table.block_size, f"{state.key}: KV without a block"
    if table.prefilling[row]:
        assert num_computed <= num_tokens
        assert reserved == 0
    else:
        assert num_computed - reserved == num_tokens - 1, f"{state.key}: C={num_computed} PH={reserved} T={num_tokens}"
    assert num_tokens < int(table.end[row]), f"{state.key} should have ended"
    assert int(table.num_published[row]) <= int(table.num_blocks[row])


def check_former(worker: WorkerState, frames: dict[int, list[Frame]], discards: Counter[tuple[str, int]]) -> None:
    """Epochs that left their row are remembered exactly while frames of theirs fly.

    async_tokens_to_discard is the sum of `reserved` over drop frames, per attempt, to the token.
    """
    assert {epoch: former.num_frames for epoch, former in worker.former.items()} == {
        epoch: len(own) for epoch, own in frames.items()
    }
    for epoch, former in worker.former.items():
        assert all(frame.kind == former.kind for frame in frames[epoch])
        if former.kind == FrameKind.DELIVER:
            assert former.state.epoch == epoch
            assert former.state.worker is None
            assert former.state.num_deliver_frames == former.num_frames
        elif reserved := sum(frame.reserved for frame in frames[epoch]):
            discards[former.state.key] += reserved


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
    return worker.former[epoch].kind == FrameKind.DELIVER
