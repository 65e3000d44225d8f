"""Planning one step of one worker: which running rows compute how much, before the last results are known.

The formulas are the design's: `n = min(T + PH - C + K, budget)`; a row that reaches `T + PH - C` samples
and reserves `1 + K`; then `C += n, PH += reserved`. Blocks are taken for `min(C + n + lookahead, end)`.
The plan is columns from the start; only a shortage of blocks is handled row by row. Knows nothing about
waiting requests or messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.state import FrameKind, RequestState, Step, WorkerState
from scheduler.step import Arrival, Int32Array, StepPlan

Count = TypeVar("Count", int, Int32Array)


@dataclass(slots=True, eq=False)
class PlannedRows:
    """Columns of a step in the making, `[num_rows]` int32."""

    rows: Int32Array
    num_scheduled: Int32Array
    num_drafts: Int32Array
    reserved: Int32Array
    num_propose: Int32Array
    num_new_blocks: Int32Array

    def take(self, index: NDArray[np.intp]) -> "PlannedRows":
        """These rows only."""
        return PlannedRows(*(getattr(self, name)[index] for name in PLANNED_COLUMNS))


PLANNED_COLUMNS = ("rows", "num_scheduled", "num_drafts", "reserved", "num_propose", "num_new_blocks")


@dataclass(slots=True, eq=False)
class PlanBuilder:
    """One worker's next step: running rows first, then whoever is admitted."""

    worker: WorkerState
    budget: int  # tokens left in this step
    parts: list[PlannedRows] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    admitted: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)  # PLANNED_COLUMNS of each
    weights: str | None = None
    closed: bool = False  # a plan that preempted admits nobody

    @property
    def is_empty(self) -> bool:
        """Whether the worker need not hear of it."""
        return not (self.parts or self.admitted or self.weights or self.worker.released)

    def admit(
        self, arrival: Arrival, *, num_scheduled: int, samples: bool, num_propose: int, block_ids: list[int]
    ) -> None:
        """Add the first chunk of a row that was seated just now. All of them are moved at once, by seal()."""
        self.arrivals.append(arrival)
        self.admitted.append((arrival.row, num_scheduled, 0, int(samples), num_propose, len(block_ids)))
        self.block_ids += block_ids
        self.budget -= num_scheduled

    def add(self, planned: PlannedRows, block_ids: list[int]) -> None:
        """Put rows into the step and move their counters: C += n, PH += reserved."""
        table = self.worker.rows
        rows, sampled = planned.rows, planned.reserved > 0
        table.num_computed[rows] += planned.num_scheduled
        table.num_in_flight[rows] += planned.num_scheduled
        table.num_placeholders[rows] += planned.reserved
        table.num_live[rows] += sampled
        table.prefilling[rows] &= ~sampled
        table.num_proposed[rows[sampled]] = planned.num_propose[sampled]
        self.parts.append(planned)
        self.block_ids += block_ids

    def seal(self, now_ns: int) -> StepPlan:
        """Number the step and put it in flight."""
        worker = self.worker
        if self.admitted:
            self.add(PlannedRows(*np.array(self.admitted, np.int32).T), [])
        rows, num_scheduled, num_drafts, reserved, num_propose, num_new_blocks = (
            np.concatenate([getattr(part, name) for part in self.parts] or [NO_ROWS]) for name in PLANNED_COLUMNS
        )
        plan = StepPlan(
            session=worker.session,
            step_seq=worker.next_step_seq,
            acknowledged=worker.acknowledged,
            weights=self.weights,
            released_epochs=np.array(worker.released, np.int64),
            arrivals=tuple(self.arrivals),
            rows=rows,
            epochs=worker.rows.epoch[rows],
            num_scheduled=num_scheduled,
            num_drafts=num_drafts,
            reserved=reserved,
            num_propose=num_propose,
            block_offsets=np.concatenate((FIRST_OFFSET, np.cumsum(num_new_blocks, dtype=np.int32))),
            block_ids=np.array(self.block_ids, np.int32),
        )
        worker.released.clear()
        index_of_row = np.full(worker.rows.max_rows, -1, np.int32)
        index_of_row[rows] = np.arange(len(rows))
        kind = np.zeros(len(rows), np.int8)
        worker.in_flight[plan.step_seq] = Step(plan=plan, sent_ns=now_ns, kind=kind, index_of_row=index_of_row)
        worker.next_step_seq += 1
        return plan


NO_ROWS = np.empty(0, np.int32)
FIRST_OFFSET = np.zeros(1, np.int32)


def plan_running(
    builder: PlanBuilder, wanted: Int32Array, block_size: int, preempt: Callable[[RequestState], None]
) -> None:
    """Plan every running row that is needed and fits.

    `wanted` is K for each row of `order()`: [num_running] int32. `preempt` takes a request off this worker.
    """
    worker = builder.worker
    planned = _wish(worker, wanted, builder.budget, block_size)
    if int(planned.num_new_blocks.sum()) > worker.pool.num_free:
        _plan_scarce(builder, planned, block_size, preempt)
        return
    keep = np.flatnonzero(planned.num_scheduled)
    if len(keep) == 0:
        return
    if len(keep) < len(planned.rows):
        planned = planned.take(keep)
    builder.budget -= int(planned.num_scheduled.sum())
    builder.add(planned, allocate_blocks(worker, planned))


def _wish(worker: WorkerState, wanted: Int32Array, budget: int, block_size: int) -> PlannedRows:
    """What every running row would compute if blocks were plenty. Rows with nothing to do have n == 0."""
    table = worker.rows
    rows = table.order()
    num_computed = table.num_computed[rows]
    end = table.end[rows]
    pending = table.num_tokens[rows] + table.num_placeholders[rows] - num_computed
    # Tokens that no live frame has promised yet: each yields at least one.
    room = end - table.num_tokens[rows] - table.num_live[rows]
    allowed = np.minimum(np.minimum(wanted, table.num_proposed[rows]), room - 1)
    drafts = np.where(table.prefilling[rows], 0, np.maximum(allowed, 0))
    num_scheduled = np.where(room > 0, pending + drafts, 0)
    before = np.cumsum(num_scheduled) - num_scheduled
    num_scheduled = np.clip(budget - before, 0, num_scheduled)
    return _with_blocks(worker, rows, num_scheduled, pending, room, wanted, block_size)


def _with_blocks(
    worker: WorkerState,
    rows: Int32Array,
    num_scheduled: Int32Array,
    pending: Int32Array,
    room: Int32Array,
    wanted: Int32Array,
    block_size: int,
) -> PlannedRows:
    """Drafts, reservation, lookahead and new blocks that follow from n."""
    table = worker.rows
    samples = (num_scheduled >= pending) & (num_scheduled > 0)
    num_drafts = np.where(samples, num_scheduled - pending, 0)
    num_propose = np.where(samples, np.maximum(np.minimum(wanted, room - 2), 0), 0)
    upper = np.minimum(table.num_computed[rows] + num_scheduled + lookahead(num_propose), table.end[rows])
    blocks = np.maximum(-(-upper // block_size) - table.num_blocks[rows], 0)
    columns = (num_scheduled, num_drafts, np.where(samples, num_drafts + 1, 0), num_propose)
    new_blocks = np.where(num_scheduled > 0, blocks, 0)
    return PlannedRows(rows, *(column.astype(np.int32, copy=False) for column in (*columns, new_blocks)))


def lookahead(num_propose: Count) -> Count:
    """Slots beyond what a step computes: the drafter writes the KV of the drafts it proposes for the next."""
    return num_propose


def allocate_blocks(worker: WorkerState, planned: PlannedRows) -> list[int]:
    """Take the planned blocks and append them to the rows' tables. Returns them row after row."""
    counts = planned.num_new_blocks
    total = int(counts.sum())
    if total == 0:
        return []
    table = worker.rows
    blocks = worker.pool.allocate(total)
    within = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.repeat(table.num_blocks[planned.rows], counts) + within
    table.block_table[np.repeat(planned.rows, counts), columns] = blocks
    table.num_blocks[planned.rows] += counts
    return blocks


def _plan_scarce(
    builder: PlanBuilder, planned: PlannedRows, block_size: int, preempt: Callable[[RequestState], None]
) -> None:
    """Blocks are short: a row loses its drafts first, then waits for its frames, and only then
    is the last running request preempted; it is never planned already."""
    worker = builder.worker
    last = len(planned.rows) - 1
    index = 0
    while index <= last:
        one = planned.take(np.array([index], np.intp))
        if one.num_scheduled[0] > 0 and one.num_new_blocks[0] > worker.pool.num_free:
            one = _without_drafts(worker, one, block_size)
        waits = worker.rows.num_in_flight[one.rows[0]] > 0
        while one.num_new_blocks[0] > worker.pool.num_free and not waits and last >= index:
            victim = worker.rows.states[int(planned.rows[last])]
            assert victim is not None
            preempt(victim)
            builder.closed = True
            last -= 1
        if last >= index and one.num_scheduled[0] > 0 and one.num_new_blocks[0] <= worker.pool.num_free:
            builder.budget -= int(one.num_scheduled[0])
            builder.add(one, allocate_blocks(worker, one))
        index += 1


def _without_drafts(worker: WorkerState, one: PlannedRows, block_size: int) -> PlannedRows:
    """The same row with no drafts to verify and none to propose."""
    table = worker.rows
    num_scheduled = one.num_scheduled - one.num_drafts
    pending = table.num_tokens[one.rows] + table.num_placeholders[one.rows] - table.num_computed[one.rows]
    none = np.zeros(1, np.int32)
    return _with_blocks(worker, one.rows, num_scheduled, pending, none, none, block_size)


def convert_frames(worker: WorkerState, row: int, epoch: int, to: int) -> tuple[int, int]:
    """Frames in flight of an epoch stop being what they were. Returns (frames, tokens reserved by them)."""
    num_frames = num_reserved = 0
    for step in worker.in_flight.values():
        index = step.index_of(row, epoch)
        if index is not None:
            step.num_converted += int(step.kind[index] == FrameKind.LIVE)
            step.kind[index] = to
            num_frames += 1
            num_reserved += int(step.plan.reserved[index])
    return num_frames, num_reserved
