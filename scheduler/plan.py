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

from scheduler.state import FrameKind, RequestState, Step, WorkerState
from scheduler.step import ONE, TWO, ZERO, Arrival, IndexArray, Int32Array, StepPlan

Count = TypeVar("Count", int, Int32Array)


@dataclass(slots=True, eq=False)
class PlannedRows:
    """Columns of a step in the making, `[num_rows]`."""

    rows: IndexArray
    num_scheduled: Int32Array
    num_drafts: Int32Array
    reserved: Int32Array
    num_propose: Int32Array
    num_new_blocks: Int32Array

    @property
    def counts(self) -> tuple[Int32Array, ...]:
        """All but the rows themselves."""
        return self.num_scheduled, self.num_drafts, self.reserved, self.num_propose, self.num_new_blocks

    def take(self, index: IndexArray) -> "PlannedRows":
        """These rows only."""
        return PlannedRows(self.rows[index], *(column[index] for column in self.counts))


@dataclass(slots=True, eq=False)
class PlanBuilder:
    """One worker's next step: running rows first, then whoever is admitted."""

    worker: WorkerState
    budget: int  # tokens left in this step
    parts: list[PlannedRows] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    admitted: list[tuple[int, ...]] = field(default_factory=list)  # the columns of PlannedRows, of each arrival
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
        rows, sampled = planned.rows, planned.reserved.astype(np.bool_)
        table.num_computed[rows] += planned.num_scheduled
        table.num_in_flight[rows] += planned.num_scheduled
        table.num_placeholders[rows] += planned.reserved
        table.num_live[rows] += sampled
        samplers = rows[sampled]
        table.prefilling[samplers] = False
        table.num_proposed[samplers] = planned.num_propose[sampled]
        self.parts.append(planned)
        self.block_ids += block_ids

    def seal(self, now_ns: int) -> StepPlan:
        """Number the step and put it in flight."""
        worker = self.worker
        if self.admitted:
            rows, *counts = np.array(self.admitted, np.int32).T.copy()
            self.add(PlannedRows(rows.astype(np.intp), *counts), [])
        planned = joined(self.parts)
        num_rows = len(planned.rows)
        block_offsets = np.zeros(num_rows + 1, np.int32)
        np.add.accumulate(planned.num_new_blocks, dtype=np.int32, out=block_offsets[1:])
        plan = StepPlan(
            session=worker.session,
            step_seq=worker.next_step_seq,
            acknowledged=worker.acknowledged,
            weights=self.weights,
            released_epochs=np.array(worker.released, np.int64),
            arrivals=tuple(self.arrivals),
            rows=planned.rows.astype(np.int32),
            epochs=worker.rows.epoch[planned.rows],
            num_scheduled=planned.num_scheduled,
            num_drafts=planned.num_drafts,
            reserved=planned.reserved,
            num_propose=planned.num_propose,
            block_offsets=block_offsets,
            block_ids=np.array(self.block_ids, np.int32),
        )
        worker.released.clear()
        kind = np.zeros(num_rows, np.int8)
        worker.in_flight[plan.step_seq] = Step(plan=plan, sent_ns=now_ns, kind=kind, rows=planned.rows)
        worker.next_step_seq += 1
        return plan


def joined(parts: list[PlannedRows]) -> PlannedRows:
    """All rows of a step, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return PlannedRows(np.empty(0, np.intp), *np.empty((5, 0), np.int32))
    counts = (np.concatenate(columns) for columns in zip(*(part.counts for part in parts), strict=True))
    return PlannedRows(np.concatenate([part.rows for part in parts]), *counts)


def plan_running(
    builder: PlanBuilder, wanted: Int32Array, block_size: int, preempt: Callable[[RequestState], None]
) -> None:
    """Plan every running row that is needed and fits.

    `wanted` is K for each row of `order()`: [num_running] int32. `preempt` takes a request off this worker.
    """
    worker = builder.worker
    planned = _wish(worker, wanted, builder.budget, block_size)
    if np.add.reduce(planned.num_new_blocks) > worker.pool.num_free:
        _plan_scarce(builder, planned, block_size, preempt)
        return
    num_planned = np.count_nonzero(planned.num_scheduled)
    if num_planned == 0:
        return
    if num_planned < len(planned.rows):
        planned = planned.take(planned.num_scheduled.nonzero()[0])
    builder.budget -= int(np.add.reduce(planned.num_scheduled))
    builder.add(planned, allocate_blocks(worker, planned))


def _wish(worker: WorkerState, wanted: Int32Array, budget: int, block_size: int) -> PlannedRows:
    """What every running row would compute if blocks were plenty. Rows with nothing to do have n == 0."""
    table = worker.rows
    rows = table.order()
    num_tokens = table.num_tokens[rows]
    pending = num_tokens + table.num_placeholders[rows] - table.num_computed[rows]
    # Tokens that no live frame has promised yet: each yields at least one.
    room = table.end[rows] - num_tokens - table.num_live[rows]
    drafts = np.minimum(wanted, table.num_proposed[rows])
    np.minimum(drafts, room - ONE, out=drafts)
    np.maximum(drafts, ZERO, out=drafts)
    drafts[table.prefilling[rows]] = 0
    num_scheduled = (pending + drafts) * (room > ZERO)
    if np.add.reduce(num_scheduled) > budget:
        before = np.add.accumulate(num_scheduled, dtype=np.int32) - num_scheduled
        num_scheduled = np.minimum(num_scheduled, np.maximum(budget - before, 0))
    return _with_blocks(worker, rows, num_scheduled, pending, room, wanted, block_size)


def _with_blocks(
    worker: WorkerState,
    rows: IndexArray,
    num_scheduled: Int32Array,
    pending: Int32Array,
    room: Int32Array,
    wanted: Int32Array,
    block_size: int,
) -> PlannedRows:
    """Drafts, reservation, lookahead and new blocks that follow from n."""
    table = worker.rows
    samples = num_scheduled >= pending  # something is pending in every row
    num_drafts = np.maximum(num_scheduled - pending, ZERO)
    num_propose = np.maximum(np.minimum(wanted, room - TWO), ZERO) * samples
    upper = table.num_computed[rows] + num_scheduled + lookahead(num_propose)
    np.minimum(upper, table.end[rows], out=upper)
    upper += block_size - 1
    num_new_blocks = np.maximum(upper // block_size - table.num_blocks[rows], ZERO)  # 0 where n is
    return PlannedRows(rows, num_scheduled, num_drafts, num_drafts + samples, num_propose, num_new_blocks)


def lookahead(num_propose: Count) -> Count:
    """Slots beyond what a step computes: the drafter writes the KV of the drafts it proposes for the next."""
    return num_propose


def allocate_blocks(worker: WorkerState, planned: PlannedRows) -> list[int]:
    """Take the planned blocks and append them to the rows' tables. Returns them row after row."""
    due = planned.num_new_blocks.nonzero()[0]
    if len(due) == 0:
        return []
    counts = planned.num_new_blocks[due]
    blocks = worker.pool.allocate(int(np.add.reduce(counts)))
    worker.rows.write_blocks(planned.rows[due], counts, blocks)
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


def convert_frames(worker: WorkerState, epoch: int, to: int) -> tuple[int, int]:
    """Frames in flight of an epoch stop being what they were. Returns (frames, tokens reserved by them)."""
    num_frames = num_reserved = 0
    for step in worker.in_flight.values():
        index = step.index_of(epoch)
        if index is not None:
            step.num_converted += int(step.kind[index] == FrameKind.LIVE)
            step.kind[index] = to
            num_frames += 1
            num_reserved += int(step.plan.reserved[index])
    return num_frames, num_reserved
