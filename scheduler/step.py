"""What the scheduler and a worker say to each other: one StepPlan down, one StepResult up.

Plans and results are columns over a worker's permanent rows, so that a step of 1,000 requests
is a dozen arrays, not 1,000 objects. A result is matched to its plan by (session, step_seq) and
each of its rows by epoch. Knows nothing about how messages travel.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.request import SamplingParams

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
IndexArray = NDArray[np.intp]  # what numpy indexes with as it is; other integers cost it three times as much

# For columns: converting a Python number costs numpy as much again as the operation on some hundred rows.
ZERO: Final = np.array(0, np.int32)
ONE: Final = np.array(1, np.int32)
TWO: Final = np.array(2, np.int32)


def empty_int32() -> Int32Array:
    """[0] int32."""
    return np.empty(0, np.int32)


def empty_int64() -> Int64Array:
    """[0] int64."""
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """A request takes a row of the worker: the beginning of one epoch.

    Tokens `[0, num_computed_tokens)` are a prefix hit: their KV is already in the first blocks
    of the row's table (which come with the plan's block columns like all others).
    """

    row: int
    epoch: int
    request_id: str
    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    output_token_ids: Int32Array  # [num_outputs] confirmed before this epoch began
    num_computed_tokens: int  # KV already present; always < prompt + outputs
    end: int  # prompt + max_tokens, at most max_model_len: no token at or past this position
    namespace: int  # of the worker's prefix cache when the epoch began
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step of one worker. Carried out in the order: weights, released_epochs, arrivals, rows.

    Upper bounds and block ids only; the worker is the authority on true lengths and positions.
    A row with `reserved > 0` samples: it computes every confirmed token that has no KV yet, verifies
    at most `num_drafts` of its pending drafts and returns at least one token. A row with
    `reserved == 0` is a prefill chunk of exactly `num_scheduled` tokens and returns none.
    """

    session: int
    step_seq: int  # counts from 0 within the session
    acknowledged: int  # every result up to this step_seq was applied; -1: none
    weights: str | None = None  # swap to this checkpoint before anything else of this step
    released_epochs: Int64Array = field(default_factory=empty_int64)  # [num_released]
    arrivals: tuple[Arrival, ...] = ()
    rows: Int32Array = field(default_factory=empty_int32)  # [num_rows] permanent row on the worker
    epochs: Int64Array = field(default_factory=empty_int64)  # [num_rows]
    num_scheduled: Int32Array = field(default_factory=empty_int32)  # [num_rows] n, at most
    num_drafts: Int32Array = field(default_factory=empty_int32)  # [num_rows] K, verify at most
    reserved: Int32Array = field(default_factory=empty_int32)  # [num_rows] 1 + K, or 0 for a chunk
    num_propose: Int32Array = field(default_factory=empty_int32)  # [num_rows] drafts for the next frame, at most
    block_offsets: Int32Array = field(default_factory=lambda: np.zeros(1, np.int32))  # [num_rows + 1]
    block_ids: Int32Array = field(default_factory=empty_int32)  # row i appends block_ids[offsets[i]:offsets[i+1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogprobs:
    """Log-probabilities of one row's returned tokens (of the distribution before temperature)."""

    row_index: int  # into StepResult.rows
    logprobs: Float32Array  # [num_tokens] of the returned tokens
    top_token_ids: Int32Array  # [num_tokens, num_logprobs] best first, ties to the lowest id
    top_logprobs: Float32Array  # [num_tokens, num_logprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """One row that failed alone; its epoch answers every later row with the same message."""

    epoch: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """A worker's answer to one StepPlan. Same rows in the same order as the plan."""

    worker_id: str
    session: int
    step_seq: int
    rows: Int32Array = field(default_factory=empty_int32)  # [num_rows]
    epochs: Int64Array = field(default_factory=empty_int64)  # [num_rows]
    num_tokens: Int32Array = field(default_factory=empty_int32)  # [num_rows] accepted + 1; 0: chunk, ended, failed
    num_verified: Int32Array = field(default_factory=empty_int32)  # [num_rows] drafts really verified, <= num_drafts
    token_ids: Int32Array = field(default_factory=empty_int32)  # [sum(num_tokens)] row after row
    failures: tuple[RowFailure, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    verify_ns: int = 0  # the target's forward and sampling
    draft_ns: int = 0  # proposing the next drafts
    idle_ns: int = 0  # between the end of the step before and the start of this one
