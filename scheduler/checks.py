"""Every invariant of the core, as assertions. Run after every event in tests; never in production."""

from collections import Counter
from typing import TYPE_CHECKING

from scheduler.state import FrameKind, WorkerState

if TYPE_CHECKING:
    from scheduler.core import Scheduler


Frame = tuple[int, int, int, int]  # one epoch's row in one step in flight: (epoch, kind, num_scheduled, reserved)


def check_scheduler(scheduler: "Scheduler") -> None:
    """Assert all of it. O(everything)."""
    discards: Counter[tuple[str, int]] = Counter()
    for worker in scheduler.workers.values():
        check_steps(worker, scheduler.config.max_steps_in_flight)
        check_blocks(worker)
        frames = frames_by_epoch(worker)
        for row in worker.rows.order().tolist():
            check_row(worker, row, frames.pop(int(worker.rows.epoch[row]), []))
        check_former(worker, frames, discards)
    check_queue(scheduler)
    assert scheduler.discards == discards, f"{scheduler.discards} to discard, not {dict(discards)}"


def frames_by_epoch(worker: WorkerState) -> dict[int, list[Frame]]:
    """Every frame in flight."""
    frames: dict[int, list[Frame]] = {}
    for step in worker.in_flight.values():
        plan = step.plan
        columns = plan.epochs.tolist(), step.kind.tolist(), plan.num_scheduled.tolist(), plan.reserved.tolist()
        for frame in zip(*columns, strict=True):
            frames.setdefault(frame[0], []).append(frame)
    return frames


def check_steps(worker: WorkerState, max_steps_in_flight: int) -> None:
    """Steps in flight are consecutive; results are applied in order."""
    in_flight = worker.in_flight
    expected = range(worker.acknowledged + 1, worker.next_step_seq)
    assert in_flight.keys() == set(expected), f"{worker.worker_id}: steps {sorted(in_flight)}, not {expected}"
    assert len(expected) <= max_steps_in_flight
    assert worker.early_results.keys() <= in_flight.keys()
    for step in in_flight.values():
        kinds, rows = step.kind.tolist(), step.plan.rows.tolist()
        assert step.num_converted == len(kinds) - kinds.count(FrameKind.LIVE)
        assert len(set(rows)) == len(rows)
        assert step.rows.tolist() == rows


def check_blocks(worker: WorkerState) -> None:
    """free + used == total; a block's references are exactly the tables it stands in."""
    table = worker.rows
    used = table.num_blocks.tolist()
    tables = {row: table.block_table[row, : used[row]].tolist() for row in table.order().tolist()}
    for row, blocks in tables.items():
        assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
        slots = min(table.num_computed.item(row), table.end.item(row))
        assert len(blocks) * table.block_size >= slots, f"row {row}: {len(blocks)} blocks for {slots} computed tokens"
    worker.pool.check(tables.values())


def check_row(worker: WorkerState, row: int, frames: list[Frame]) -> None:
    """The row's counters are those of its live frames; C - PH == T - 1 while it decodes."""
    table = worker.rows
    state = table.states[row]
    assert state is not None
    assert (state.worker, state.row, state.epoch) == (worker, row, table.epoch.item(row))
    num_in_flight = reserved = num_live = 0
    for _, kind, frame_scheduled, frame_reserved in frames:
        assert kind == FrameKind.LIVE, "a running epoch has only live frames"
        num_in_flight += frame_scheduled
        reserved += frame_reserved
        num_live += frame_reserved > 0
    assert table.num_in_flight.item(row) == num_in_flight, f"{state.key}: IF"
    assert table.num_placeholders.item(row) == reserved, f"{state.key}: PH"
    assert table.num_live.item(row) == num_live, f"{state.key}: live frames"
    num_tokens, num_computed, num_blocks = (
        column.item(row) for column in (table.num_tokens, table.num_computed, table.num_blocks)
    )
    assert table.kv_end.item(row) <= num_blocks * table.block_size, f"{state.key}: KV without a block"
    if table.prefilling.item(row):
        assert num_computed <= num_tokens
        assert reserved == 0
    else:
        assert num_computed - reserved == num_tokens - 1, f"{state.key}: C={num_computed} PH={reserved} T={num_tokens}"
    assert num_tokens < table.end.item(row), f"{state.key} should have ended"
    assert table.num_published.item(row) <= num_blocks


def check_former(worker: WorkerState, frames: dict[int, list[Frame]], discards: Counter[tuple[str, int]]) -> None:
    """Epochs that left their row are remembered exactly while frames of theirs fly.

    async_tokens_to_discard is the sum of `reserved` over drop frames, per attempt, to the token.
    """
    assert worker.former.keys() == frames.keys()
    for epoch, former in worker.former.items():
        assert [kind for _, kind, _, _ in frames[epoch]] == [former.kind] * former.num_frames
        if former.kind == FrameKind.DELIVER:
            assert former.state.epoch == epoch
            assert former.state.worker is None
            assert former.state.num_deliver_frames == former.num_frames
        elif reserved := sum(reserved for _, _, _, reserved in frames[epoch]):
            discards[former.state.key] += reserved


def check_queue(scheduler: "Scheduler") -> None:
    """Every live request is either running or waiting; the queue is in order."""
    waiting, workers = scheduler.waiting, scheduler.workers.values()
    keys = [state.order_key for state in waiting]
    assert keys == sorted(set(keys)), "the queue is out of order"
    assert scheduler.num_waiting_tokens == sum(state.request.most_tokens for state in waiting)
    running = [state for worker in workers for state in worker.rows.states if state is not None]
    assert set(map(id, scheduler.requests.values())) == {id(state) for state in [*waiting, *running]}
    assert len(scheduler.requests) == len(waiting) + len(running)
    for state in waiting:
        assert state.worker is None
        assert state.num_tokens < state.end, f"{state.key} should have ended"
        delivering = 0
        for worker in workers:
            former = worker.former.get(state.epoch)
            if former is not None and former.kind == FrameKind.DELIVER:
                delivering += former.num_frames
        assert state.num_deliver_frames == delivering, f"{state.key} waits for frames that do not fly"
