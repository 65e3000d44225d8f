"""Applying one worker's result to its live rows: append tokens, roll back, publish full blocks.

Rollback is by the frame's own numbers: `C -= K - A; PH -= 1 + K; T += A + 1`, token by token: no block is
freed or moved, the garbage KV is overwritten by the next step. All rows at once; a row to which
something happens (a stop, a protocol error) is named in the outcome and handled by the caller.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.blocks import chain_digests
from scheduler.events import SchedulerConfig
from scheduler.request import FinishReason
from scheduler.state import FrameKind, RequestState, Step, WorkerState
from scheduler.stats import Counters
from scheduler.step import Int32Array, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """A live row whose new tokens end its request."""

    state: RequestState
    reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """What a result added to the live rows, as columns; rows without tokens are left out."""

    index: NDArray[np.intp]  # [num_rows] into the plan's rows
    rows: Int32Array  # [num_rows]
    offsets: Int32Array  # [num_rows] absolute output offset of the first token
    num_tokens: Int32Array  # [num_rows] kept, after stops
    token_ids: Int32Array  # [sum(num_tokens)]
    endings: list[Ending]

    def take(self, mask: NDArray[np.bool_]) -> "Committed":
        """Some of the rows: [num_rows] bool."""
        tokens = self.token_ids[np.repeat(mask, self.num_tokens)]
        kept = self.offsets[mask], self.num_tokens[mask]
        return Committed(self.index[mask], self.rows[mask], *kept, tokens, self.endings)


def is_protocol_error(step: Step, result: StepResult) -> NDArray[np.bool_]:
    """Rows whose answer no plan allows: a sample too few or too many, or drafts never planned. [num_rows] bool."""
    reserved, num_tokens = step.plan.reserved, result.num_tokens
    samples = reserved > 0
    wrong_count = np.where(samples, (num_tokens < 1) | (num_tokens > reserved), num_tokens != 0)
    wrong_drafts = (result.num_verified > step.plan.num_drafts) | (result.num_verified < num_tokens - samples)
    return np.asarray(wrong_count | wrong_drafts)


def commit_live(
    worker: WorkerState,
    step: Step,
    result: StepResult,
    live: NDArray[np.intp],
    counters: Counters,
    config: SchedulerConfig,
) -> Committed:
    """Commit the live rows `live` ([n], indices into the plan's rows, none of them in error)."""
    table, plan = worker.rows, step.plan
    everything = len(live) == len(plan.rows)
    chosen = slice(None) if everything else live  # the usual step: its columns as they are, not copies
    rows = plan.rows[chosen]
    num_drafts, reserved = plan.num_drafts[chosen], plan.reserved[chosen]
    num_tokens, num_verified = result.num_tokens[chosen], result.num_verified[chosen]
    token_ids = result.token_ids if everything else tokens_of_rows(result, live)
    num_accepted = np.maximum(num_tokens - 1, 0)

    table.num_computed[rows] -= num_drafts - num_accepted
    table.num_placeholders[rows] -= reserved
    table.num_in_flight[rows] -= plan.num_scheduled[chosen]
    table.num_live[rows] -= reserved > 0
    written = completed_tokens(worker, rows) + num_verified - num_accepted
    table.kv_end[rows] = np.maximum(table.kv_end[rows], written)
    table.num_draft_tokens[rows] += num_verified
    table.num_accepted[rows] += num_accepted
    counters.count_acceptance(num_verified, num_accepted)
    counters.tokens_rolled_back += int((num_drafts - num_accepted).sum())

    before = table.num_tokens[rows]
    num_tokens, token_ids, endings = _append(worker, rows, before, num_tokens, token_ids)
    if config.enable_prefix_caching:
        publish_full_blocks(worker, rows, config.block_size)
    counters.num_generation_tokens += len(token_ids)
    kept = np.flatnonzero(num_tokens)
    offsets = before - table.num_prompt[rows]
    if len(kept) == len(rows):
        return Committed(live, rows, offsets, num_tokens, token_ids, endings)
    return Committed(live[kept], rows[kept], offsets[kept], num_tokens[kept], token_ids, endings)


def tokens_of_rows(result: StepResult, index: NDArray[np.intp]) -> Int32Array:
    """The tokens of these rows of a result, row after row."""
    wanted = np.zeros(len(result.rows), np.bool_)
    wanted[index] = True
    return result.token_ids[np.repeat(wanted, result.num_tokens)]


def _append(
    worker: WorkerState, rows: Int32Array, before: Int32Array, num_tokens: Int32Array, token_ids: Int32Array
) -> tuple[Int32Array, Int32Array, list[Ending]]:
    """T += A + 1 for every row, cut where a stop or the end falls inside the run."""
    table = worker.rows
    first = np.cumsum(num_tokens) - num_tokens
    row_of_token = np.repeat(rows, num_tokens)
    positions = np.repeat(before - first, num_tokens) + np.arange(len(token_ids))
    table.write_tokens(row_of_token, positions, token_ids)
    ends = before + num_tokens >= table.end[rows]
    stopped = np.flatnonzero((token_ids == table.stop_ids[:, row_of_token]).any(axis=0))
    if len(stopped):
        ends[np.searchsorted(first, stopped, side="right") - 1] = True
    endings = []
    if ends.any():
        counted, num_tokens = num_tokens, num_tokens.copy()
        for index in np.flatnonzero(ends & (num_tokens > 0)).tolist():
            state = table.states[int(rows[index])]
            assert state is not None
            run = token_ids[first[index] : first[index] + num_tokens[index]]
            stop = state.first_stop(run, int(before[index]) - state.num_prompt)
            if stop is not None:
                num_tokens[index] = stop[0]
                endings.append(Ending(state, stop[1], stop[2]))
        within = np.arange(len(token_ids)) - np.repeat(first, counted)
        token_ids = token_ids[within < np.repeat(num_tokens, counted)]
    table.num_tokens[rows] = before + num_tokens
    return num_tokens, token_ids, endings


def publish_full_blocks(worker: WorkerState, rows: Int32Array, block_size: int) -> None:
    """Offer every block to the prefix cache in which all tokens are confirmed and all steps have completed."""
    table = worker.rows
    full = publishable_tokens(worker, rows) // block_size
    due = np.flatnonzero((full > table.num_published[rows]) & may_publish(worker, rows))
    rows, full = rows[due], full[due]
    published = table.num_published[rows]
    table.num_published[rows] = full
    counts = full - published
    # Everything at once that can be: one entry per block, its row and its place in the row's table.
    row_of = np.repeat(rows, counts)
    place = np.arange(len(row_of)) + np.repeat(published - np.cumsum(counts) + counts, counts)
    blocks = table.block_table[row_of, place].tolist()
    token_bytes = table.token_ids[row_of[:, None], place[:, None] * block_size + np.arange(block_size)].tobytes()
    width, first = 4 * block_size, 0
    for row, start, stop in zip(rows.tolist(), published.tolist(), full.tolist(), strict=True):
        state, last = table.states[row], first + stop - start
        assert state is not None
        digests = state.digests
        if stop > len(digests):
            known = len(digests) - start
            chain_digests(digests, state.root, token_bytes[(first + known) * width : last * width], width)
        worker.pool.publish(blocks[first:last], digests[start:stop])
        first = last


def publishable_tokens(worker: WorkerState, rows: Int32Array) -> Int32Array:
    """`min(T - 1, C - IF)`: the last token's KV may never be written, and a row in flight may fail alone."""
    return np.asarray(np.minimum(worker.rows.num_tokens[rows] - 1, completed_tokens(worker, rows)))


def completed_tokens(worker: WorkerState, rows: Int32Array) -> Int32Array:
    """C - IF: tokens whose KV was written by steps that have completed."""
    return np.asarray(worker.rows.num_computed[rows] - worker.rows.num_in_flight[rows])


def may_publish(worker: WorkerState, rows: Int32Array) -> NDArray[np.bool_]:
    """Only under the namespace in which the epoch began: older KV may be another model's. [num_rows] bool."""
    return np.asarray(worker.rows.namespace[rows] == worker.pool.namespace)


def delivered_tokens(result: StepResult, index: int) -> Int32Array:
    """One row's tokens."""
    stop = int(result.num_tokens[: index + 1].sum())
    return result.token_ids[stop - int(result.num_tokens[index]) : stop]


def is_live(step: Step) -> NDArray[np.intp]:
    """Rows of a step whose result is to be committed."""
    if step.num_converted == 0:
        return np.arange(len(step.plan.rows))
    return np.flatnonzero(step.kind == FrameKind.LIVE)
