"""Everything that can happen to the scheduler, and everything it can ask for.

Events are past tense, commands imperative; all are frozen. `Scheduler.handle(event)` turns one
into a list of the other and is the only way to change the scheduler.
"""

from dataclasses import dataclass

from scheduler.request import FinishReason, RejectCode, Request
from scheduler.step import Int32Array, Int64Array, RowLogprobs, StepPlan, StepResult

# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A front end asks for a request (its first attempt or a resubmission)."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The client of this attempt left. Unknown or older attempts are ignored."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndLost:
    """A front end died: its requests have no reader any more."""

    front_end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUp:
    """A worker registered a new session, with an empty KV pool."""

    worker_id: str
    session: int  # never used before
    num_blocks: int
    max_num_seqs: int  # permanent rows
    max_drafts: int  # what its drafter can propose; 0: none
    fingerprint: str = ""  # equal fingerprints give bitwise equal logits
    drop_last_hit_block: bool = False  # its drafter's KV at the end of a hit depends on the token after


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDown:
    """A worker was lost. Ignored for any but its current session."""

    worker_id: str
    session: int
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A worker answered a step. Stale unless that step is in flight in this session."""

    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A whole step failed; the worker refuses the rest of that session and registers anew."""

    worker_id: str
    session: int
    step_seq: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """An operator emptied the prefix cache, with `reset_running` also the KV of running requests."""

    reset_running: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptRequested:
    """An operator (or a test) forced one running request off its worker."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRequested:
    """New weights for every worker; what is in flight is dropped, streams go on with them."""

    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A worker takes no new request; at the deadline its running ones migrate."""

    worker_id: str
    deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWatched:
    """Somebody follows what the prefix caches hold, or nobody does any more."""

    watched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time now, on a monotonic clock. Deadlines and repeats of unanswered plans hang on it."""

    now_ns: int


Event = (
    Submitted
    | Cancelled
    | FrontEndLost
    | WorkerUp
    | WorkerDown
    | StepFinished
    | StepFailed
    | CacheReset
    | PreemptRequested
    | SwapRequested
    | DrainRequested
    | CacheWatched
    | Tick
)

# ---- commands ----


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """Send this plan to this worker. The same plan may be sent again: that is idempotent."""

    worker_id: str
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmitTokens:
    """Confirmed tokens of many requests, for one front end: columns, one row per request."""

    front_end: str
    streams: Int64Array  # [num_rows] Request.stream
    attempts: Int32Array  # [num_rows]
    offsets: Int32Array  # [num_rows] absolute output offset of the row's first token
    num_tokens: Int32Array  # [num_rows]
    token_ids: Int32Array  # [sum(num_tokens)] row after row
    logprobs: tuple[RowLogprobs, ...] = ()  # row_index into these rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """The end of one attempt, after all its tokens; nothing of it follows."""

    front_end: str
    stream: int
    request_id: str
    attempt: int
    reason: FinishReason
    stop_token_id: int | None = None  # the stop id that matched; None for EOS and other reasons
    message: str = ""  # what went wrong, for ERROR
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prefix hit of the first epoch
    num_draft_tokens: int = 0  # verified for this request
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    inexact: bool = False  # resumed on a worker whose numbers differ


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectRequest:
    """A submission was not taken; nothing of it was kept."""

    front_end: str
    stream: int
    request_id: str
    attempt: int
    code: RejectCode
    message: str
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Nothing of this session is wanted any more; the worker should register anew."""

    worker_id: str
    session: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A prefix could hit this block from now on."""

    digest: bytes
    parent: bytes | None  # of the block before it; None: it is a first one
    token_bytes: bytes  # its tokens, int32
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """No prefix hits this block any more."""

    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared:
    """Likewise, for every block."""


CacheChange = BlockStored | BlockRemoved | CacheCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class TellCacheChanges:
    """What one worker's prefix cache gained and lost, in order. Only while it is watched."""

    worker_id: str
    changes: tuple[CacheChange, ...]


Command = StartStep | EmitTokens | FinishRequest | RejectRequest | CloseSession | TellCacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """What a front end is told besides: from here on this attempt's tokens are of these numbers."""

    front_end: str
    stream: int
    attempt: int
    fingerprint: str  # of the worker


# ---- configuration of the core ----


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the core. Durations in nanoseconds."""

    block_size: int = 16
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_steps_in_flight: int = 2
    max_drafts: int = 4  # K
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # or "priority"
    max_waiting: int = 4096  # requests
    largest_pool_blocks: int = 1 << 30  # of the configured workers; a request beyond it can never run
    max_attempts: int = 3  # epochs of one request that may end with its worker lost
    resend_after_ns: int = 1_000_000_000  # an unanswered plan is sent again
    retry_after_ms: int = 1000  # hint to clients when the queue is full
    trace: bool = False  # tell every frame in story(), not only what happens to a request
    tenant_weights: tuple[tuple[str, int], ...] = ()  # shares of those that wait; 1 for every other tenant
