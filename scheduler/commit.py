"""Applying one worker's result to its live rows: append tokens, roll back, publish full blocks.

Rollback is by the frame's own numbers: `C -= K - A; PH -= 1 + K; T += A + 1`, token by token: no block is
freed or moved, the garbage KV is overwritten by the next step. All rows at once; a row to which
something happens (a stop, a protocol error) is named in the outcome and handled by the caller.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.blocks import block_digest
from scheduler.events import SchedulerConfig
from scheduler.request import FinishReason
from scheduler.state import FrameKind, RequestState, Step, WorkerState
from scheduler.stats import Counters
from scheduler.step import ONE, ZERO, IndexArray, Int32Array, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """A live row whose new tokens end its request."""

    state: RequestState
    reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """What a result added to the live rows, as columns; rows without tokens are left out."""

    index: IndexArray  # [num_rows] into the plan's rows
    rows: IndexArray  # [num_rows]
    offsets: Int32Array  # [num_rows] absolute output offset of the first token
    num_tokens: Int32Array  # [num_rows] kept, after stops
    token_ids: Int32Array  # [sum(num_tokens)]
    endings: list[Ending]

    def take(self, mask: NDArray[np.bool_]) -> "Committed":
        """Some of the rows: [num_rows] bool."""
        tokens = self.token_ids[mask.repeat(self.num_tokens)]
        kept = self.offsets[mask], self.num_tokens[mask]
        return Committed(self.index[mask], self.rows[mask], *kept, tokens, self.endings)


def is_protocol_error(step: Step, result: StepResult) -> NDArray[np.bool_]:
    """Rows whose answer no plan allows: a sample too few or too many, or drafts never planned. [num_rows] bool.

    Right is `0 <= accepted <= verified <= planned`, where a chunk, which samples nothing, "accepts" its tokens.
    """
    num_drafts, num_verified = step.plan.num_drafts, result.num_verified
    num_accepted = result.num_tokens - (step.plan.reserved - num_drafts)
    return np.asarray((num_accepted < ZERO) | (num_accepted > num_verified) | (num_verified > num_drafts))


def commit_live(
    worker: WorkerState,
    step: Step,
    result: StepResult,
    live: IndexArray,
    counters: Counters,
    config: SchedulerConfig,
) -> Committed:
    """Commit the live rows `live` ([n], indices into the plan's rows, none of them in error)."""
    table, plan = worker.rows, step.plan
    everything = len(live) == len(step.rows)
    chosen = slice(None) if everything else live  # the usual step: its columns as they are, not copies
    rows = step.rows[chosen]
    num_drafts, reserved = plan.num_drafts[chosen], plan.reserved[chosen]
    num_tokens, num_verified = result.num_tokens[chosen], result.num_verified[chosen]
    token_ids = result.token_ids if everything else tokens_of_rows(result, live)
    samples = reserved - num_drafts  # 1, or 0 for a chunk
    num_accepted = num_tokens - samples
    num_rejected = num_drafts - num_accepted

    table.num_computed[rows] -= num_rejected
    table.num_placeholders[rows] -= reserved
    table.num_in_flight[rows] -= plan.num_scheduled[chosen]
    table.num_live[rows] -= samples
    if counters.count_acceptance(num_verified, num_accepted):
        table.num_draft_tokens[rows] += num_verified
        table.num_accepted[rows] += num_accepted
        written = completed_tokens(worker, rows) + num_verified - num_accepted
        table.kv_end[rows] = np.maximum(table.kv_end[rows], written)
    counters.tokens_rolled_back += int(np.add.reduce(num_rejected))

    before = table.num_tokens[rows]
    num_tokens, token_ids, endings = _append(worker, rows, before, num_tokens, token_ids)
    if config.enable_prefix_caching:
        publish_full_blocks(worker, rows, config.block_size)
    counters.num_generation_tokens += len(token_ids)
    offsets = before - table.num_prompt[rows]
    if np.count_nonzero(num_tokens) == len(rows):
        return Committed(live, rows, offsets, num_tokens, token_ids, endings)
    kept = num_tokens.nonzero()[0]
    return Committed(live[kept], rows[kept], offsets[kept], num_tokens[kept], token_ids, endings)


def tokens_of_rows(result: StepResult, index: IndexArray) -> Int32Array:
    """The tokens of these rows of a result, row after row."""
    wanted = np.zeros(len(result.rows), np.bool_)
    wanted[index] = True
    return result.token_ids[wanted.repeat(result.num_tokens)]


def _append(
    worker: WorkerState, rows: IndexArray, before: Int32Array, num_tokens: Int32Array, token_ids: Int32Array
) -> tuple[Int32Array, Int32Array, list[Ending]]:
    """T += A + 1 for every row, cut where a stop or the end falls inside the run."""
    table = worker.rows
    table.write_tokens(rows, before, num_tokens, token_ids)
    after = before + num_tokens
    ends = after >= table.end[rows]
    stopped = table.may_stop(token_ids)
    if len(stopped):
        ends[num_tokens.cumsum().searchsorted(stopped, side="right")] = True
    endings: list[Ending] = []
    if np.count_nonzero(ends):
        num_tokens, token_ids, endings = _cut(worker, rows, before, num_tokens, token_ids, ends.nonzero()[0])
        after = before + num_tokens
    table.num_tokens[rows] = after
    return num_tokens, token_ids, endings


def _cut(
    worker: WorkerState,
    rows: IndexArray,
    before: Int32Array,
    num_tokens: Int32Array,
    token_ids: Int32Array,
    suspects: IndexArray,
) -> tuple[Int32Array, Int32Array, list[Ending]]:
    """Look at the rows `suspects` that may end one by one: (num_tokens, token_ids, endings) as they are then."""
    kept, endings = num_tokens.copy(), []
    first = num_tokens.cumsum() - num_tokens
    mask = np.ones(len(token_ids), np.bool_)
    for index in suspects.tolist():
        state = worker.rows.states[int(rows[index])]
        assert state is not None
        start, count = int(first[index]), int(num_tokens[index])
        stop = state.first_stop(token_ids[start : start + count], int(before[index]) - state.num_prompt)
        if stop is not None:
            kept[index] = stop[0]
            mask[start + stop[0] : start + count] = False
            endings.append(Ending(state, stop[1], stop[2]))
    return kept, token_ids[mask], endings


def publish_full_blocks(worker: WorkerState, rows: IndexArray, block_size: int) -> None:
    """Offer every block to the prefix cache in which all tokens are confirmed and all steps have completed."""
    table = worker.rows
    full = publishable_tokens(worker, rows) // block_size
    due = (full > table.num_published[rows]).nonzero()[0]
    due = due[may_publish(worker, rows[due])]
    if len(due) == 0:
        return
    rows, full = rows[due], full[due]
    published = table.num_published[rows]
    table.num_published[rows] = full
    # One entry per block, row after row.
    counts = full - published
    blocks, tokens = table.blocks_with_tokens(rows, published, counts)
    made: list[bytes] = []
    width, start = 4 * block_size, 0
    for row, place, stop in zip(rows.tolist(), published.tolist(), full.tolist(), strict=True):
        state = table.states[row]
        assert state is not None
        digests = state.digests
        while len(digests) < stop:
            parent = digests[-1] if digests else state.root
            at = start + (len(digests) - place) * width
            digests.append(block_digest(parent, tokens[at : at + width]))
        made += digests[place:stop]
        start += (stop - place) * width
    worker.pool.publish(blocks, made)


def publishable_tokens(worker: WorkerState, rows: IndexArray) -> Int32Array:
    """`min(T - 1, C - IF)`: the last token's KV may never be written, and a row in flight may fail alone."""
    return np.asarray(np.minimum(worker.rows.num_tokens[rows] - ONE, completed_tokens(worker, rows)))


def completed_tokens(worker: WorkerState, rows: IndexArray) -> Int32Array:
    """C - IF: tokens whose KV was written by steps that have completed."""
    return np.asarray(worker.rows.num_computed[rows] - worker.rows.num_in_flight[rows])


def may_publish(worker: WorkerState, rows: IndexArray) -> NDArray[np.bool_]:
    """Only under the namespace in which the epoch began: older KV may be another model's. [num_rows] bool."""
    return np.asarray(worker.rows.namespace[rows] == worker.pool.namespace)


def delivered_tokens(result: StepResult, index: int) -> Int32Array:
    """One row's tokens."""
    stop = int(np.add.reduce(result.num_tokens[: index + 1]))
    return result.token_ids[stop - int(result.num_tokens[index]) : stop]


def is_live(step: Step) -> IndexArray:
    """Rows of a step whose result is to be committed."""
    if step.num_converted == 0:
        return np.arange(len(step.rows))
    return np.flatnonzero(step.kind == FrameKind.LIVE)
