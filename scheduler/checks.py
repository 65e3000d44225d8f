"""Every invariant of the core, as assertions. Run after every event in tests; never in production."""

from functools import lru_cache
from typing import TYPE_CHECKING

from scheduler.state import FrameKind, Step, WorkerState

if TYPE_CHECKING:
    from scheduler.core import Scheduler


Frame = tuple[int, int, int]  # one epoch's row in one step in flight: (kind, num_scheduled, reserved)


def check_scheduler(scheduler: "Scheduler") -> None:
    """Assert all of it. O(everything)."""
    discards: dict[tuple[str, int], int] = {}
    for worker in scheduler.workers.values():
        frames = check_steps(worker, scheduler.config.max_steps_in_flight)
        check_blocks(worker)
        for row in worker.rows.order().tolist():
            check_row(worker, row, frames.pop(worker.rows.epoch.item(row), []))
        check_former(worker, frames, discards)
    check_queue(scheduler)
    assert scheduler.discards == discards, f"{scheduler.discards} to discard, not {discards}"


def check_steps(worker: WorkerState, max_steps_in_flight: int) -> dict[int, list[Frame]]:
    """Steps in flight are consecutive; results are applied in order. Returns every frame in flight, by epoch."""
    expected = [*range(worker.acknowledged + 1, worker.next_step_seq)]
    assert [*worker.in_flight] == expected, f"{worker.worker_id}: steps {[*worker.in_flight]}, not {expected}"
    assert len(expected) <= max_steps_in_flight
    assert not worker.early_results or worker.early_results.keys() <= worker.in_flight.keys()
    frames: dict[int, list[Frame]] = {}
    for step in worker.in_flight.values():
        kinds = step.kind.tolist()
        assert step.num_converted == len(kinds) - kinds.count(FrameKind.LIVE)
        for kind, (epoch, num_scheduled, reserved) in zip(kinds, planned_frames(step), strict=True):
            frames.setdefault(epoch, []).append((kind, num_scheduled, reserved))
    return frames


@lru_cache(maxsize=1024)
def planned_frames(step: Step) -> list[tuple[int, int, int]]:
    """(epoch, num_scheduled, reserved) of each row of a step, which nobody can change from now on."""
    plan = step.plan
    rows = plan.rows.tolist()
    assert len(set(rows)) == len(rows)
    assert step.rows.tolist() == rows
    for column in (step.rows, plan.rows, plan.epochs, plan.num_scheduled, plan.reserved):
        column.flags.writeable = False
    return list(zip(plan.epochs.tolist(), plan.num_scheduled.tolist(), plan.reserved.tolist(), strict=True))


def check_blocks(worker: WorkerState) -> None:
    """free + used == total; a block's references are exactly the tables it stands in."""
    table = worker.rows
    tables = []
    for row in table.order().tolist():
        blocks = table.block_table[row, : table.num_blocks.item(row)].tolist()
        assert len(set(blocks)) == len(blocks), f"row {row} holds a block twice"
        slots = min(table.num_computed.item(row), table.end.item(row))
        assert len(blocks) * table.block_size >= slots, f"row {row}: {len(blocks)} blocks for {slots} computed tokens"
        tables.append(blocks)
    worker.pool.check(tables)


def check_row(worker: WorkerState, row: int, frames: list[Frame]) -> None:
    """The row's counters are those of its live frames; C - PH == T - 1 while it decodes."""
    table = worker.rows
    state = table.states[row]
    assert state is not None
    assert (state.worker, state.row, state.epoch) == (worker, row, table.epoch.item(row))
    num_in_flight = reserved = num_live = 0
    for kind, frame_scheduled, frame_reserved in frames:
        assert kind == FrameKind.LIVE, "a running epoch has only live frames"
        num_in_flight += frame_scheduled
        reserved += frame_reserved
        num_live += frame_reserved > 0
    assert table.num_in_flight.item(row) == num_in_flight, f"{state.key}: IF"
    assert table.num_placeholders.item(row) == reserved, f"{state.key}: PH"
    assert table.num_live.item(row) == num_live, f"{state.key}: live frames"
    num_tokens, num_computed = table.num_tokens.item(row), table.num_computed.item(row)
    num_blocks = table.num_blocks.item(row)
    assert table.kv_end.item(row) <= num_blocks * table.block_size, f"{state.key}: KV without a block"
    if table.prefilling.item(row):
        assert num_computed <= num_tokens
        assert reserved == 0
    else:
        assert num_computed - reserved == num_tokens - 1, f"{state.key}: C={num_computed} PH={reserved} T={num_tokens}"
    assert num_tokens < table.end.item(row), f"{state.key} should have ended"
    assert table.num_published.item(row) <= num_blocks


def check_former(worker: WorkerState, frames: dict[int, list[Frame]], discards: dict[tuple[str, int], int]) -> None:
    """Epochs that left their row are remembered exactly while frames of theirs fly.

    async_tokens_to_discard is the sum of `reserved` over drop frames, per attempt, to the token.
    """
    assert worker.former.keys() == frames.keys()
    for epoch, former in worker.former.items():
        assert [kind for kind, _, _ in frames[epoch]] == [former.kind] * former.num_frames
        if former.kind == FrameKind.DELIVER:
            assert former.state.epoch == epoch
            assert former.state.worker is None
            assert former.state.num_deliver_frames == former.num_frames
        elif reserved := sum(reserved for _, _, reserved in frames[epoch]):
            discards[former.state.key] = discards.get(former.state.key, 0) + reserved


def check_queue(scheduler: "Scheduler") -> None:
    """Every live request is either running or waiting; the queue is in order."""
    waiting, workers = scheduler.waiting, scheduler.workers.values()
    keys = [state.order_key for state in waiting]
    assert keys == sorted(set(keys)), "the queue is out of order"
    assert scheduler.num_waiting_tokens == sum([state.request.most_tokens for state in waiting])
    live = waiting.copy()
    for worker in workers:
        live.extend(filter(None, worker.rows.states))
    assert len(scheduler.requests) == len(live)
    assert set(scheduler.requests.values()) == set(live)
    flying = [worker.former for worker in workers if worker.former]
    for state in waiting:
        assert state.worker is None
        assert state.num_tokens < state.end, f"{state.key} should have ended"
        former = [epochs[state.epoch] for epochs in flying if state.epoch in epochs]
        delivering = sum([epoch.num_frames for epoch in former if epoch.kind == FrameKind.DELIVER])
        assert state.num_deliver_frames == delivering, f"{state.key} waits for frames that do not fly"
