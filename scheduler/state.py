"""The mutable entities of the core: one live request, one worker session, one step in flight.

Knows the states, not the rules that move between them.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from scheduler.blocks import BlockPool, root_digest
from scheduler.events import SchedulerConfig, WorkerUp
from scheduler.request import FinishReason, Request
from scheduler.step import IndexArray, Int32Array, StepPlan, StepResult

if TYPE_CHECKING:
    from scheduler.rows import RowTable

MAX_STORY_LINES = 400
StoryLine = tuple[int, int, str]  # (now_ns, attempt, what happened)


class FrameKind:
    """What becomes of a frame's result: committed, only delivered, or dropped. Values of an int8 column."""

    LIVE: Final = 0
    DELIVER: Final = 1
    DROP: Final = 2


FRAME_KIND_NAMES = ("live", "deliver", "drop")


def queue_key(request: Request, config: SchedulerConfig, start: int, arrival: int) -> tuple[int, int, int]:
    """Place in the queue: (priority, start of its fair share, arrival)."""
    by_priority = config.scheduling_policy == "priority"
    return request.priority if by_priority else 0, start, arrival


class RequestState:
    """One attempt of a request from submission to its end. Running: its tokens are in the worker's row."""

    __slots__ = (
        "arrival", "digests", "end", "epoch", "fingerprint", "former_worker", "inexact", "max_drafts",
        "num_accepted_tokens", "num_cached_tokens", "num_deliver_frames", "num_draft_tokens", "num_losses",
        "num_preemptions", "num_prompt", "num_tokens", "order_key", "request", "root", "row", "stop_ids", "story",
        "token_ids", "waits_since_epoch", "worker",
    )  # fmt: skip

    def __init__(self, request: Request, config: SchedulerConfig, arrival: int, start: int) -> None:
        """`start`: where it starts on the clock of its tenant's fair share."""
        self.request = request
        self.arrival = arrival
        self.order_key = queue_key(request, config, start, arrival)
        self.token_ids: Int32Array = request.prompt_token_ids  # replaced, never written to
        if len(request.resume_token_ids):
            self.token_ids = np.concatenate((self.token_ids, request.resume_token_ids))
        self.num_tokens = len(self.token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        self.end = min(self.num_prompt + request.max_tokens, config.max_model_len)
        asked = config.max_drafts if request.max_drafts is None else request.max_drafts
        self.max_drafts = min(asked, config.max_drafts)
        self.stop_ids = request.sampling.eos_token_ids + request.sampling.stop_token_ids
        self.root = root_digest(request.cache_salt, request.tenant)
        self.digests: list[bytes] = []
        self.worker: WorkerState | None = None
        self.row = -1  # the row of its epoch, also after it has left it
        self.epoch = 0
        self.former_worker: WorkerState | None = None  # where its deliver frames fly
        self.num_deliver_frames = 0  # of an epoch left behind; planned again only at 0
        self.waits_since_epoch = 0  # the next epoch when it began to wait for a busy worker; 0: it does not
        self.num_losses = 0  # epochs that ended with their worker
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.fingerprint = request.fingerprint  # of the numbers its stream began with
        self.inexact = False
        self.story: deque[StoryLine] = deque(maxlen=MAX_STORY_LINES)

    @property
    def key(self) -> tuple[str, int]:
        """The attempt's name: (request_id, attempt)."""
        return (self.request.request_id, self.request.attempt)

    @property
    def num_outputs(self) -> int:
        """Outputs confirmed while not running."""
        return self.num_tokens - self.num_prompt

    def first_stop(self, token_ids: Int32Array, num_outputs: int) -> tuple[int, FinishReason, int | None] | None:
        """Where new outputs end the request: (tokens kept, reason, stop id), or None if they don't.

        `num_outputs` came before `token_ids`. Stops count once `min_tokens` outputs are reached.
        """
        sampling = self.request.sampling
        for index, token in enumerate(token_ids.tolist()):
            if token in self.stop_ids and num_outputs + index + 1 >= sampling.min_tokens:
                return index + 1, FinishReason.STOP, token if token in sampling.stop_token_ids else None
            if self.num_prompt + num_outputs + index + 1 >= self.end:
                return index + 1, FinishReason.LENGTH, None
        return None


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One plan in flight. Columns `[num_rows]` as planned; `kind` changes while it flies."""

    plan: StepPlan
    sent_ns: int
    kind: NDArray[np.int8]
    rows: IndexArray  # plan.rows
    num_converted: int = 0  # rows that are no longer live

    def index_of(self, epoch: int) -> int | None:
        """Index of an epoch's frame in this step."""
        found = (self.plan.epochs == epoch).nonzero()[0]
        return int(found[0]) if len(found) else None


@dataclass(slots=True, kw_only=True, eq=False)
class FormerEpoch:
    """An epoch that has left its row with frames still in flight."""

    state: RequestState
    kind: int  # a FrameKind
    num_frames: int
    reason: str  # what took it off its row


@dataclass(slots=True, eq=False)
class WorkerState:
    """One session of one worker."""

    worker_id: str
    session: int
    up: WorkerUp
    pool: BlockPool
    rows: "RowTable"
    weights: str | None = None  # what it computes with, once its plans so far are carried out
    next_step_seq: int = 0
    acknowledged: int = -1  # results are applied in step_seq order up to here
    in_flight: dict[int, Step] = field(default_factory=dict)
    early_results: dict[int, StepResult] = field(default_factory=dict)  # waiting for an earlier one
    released: list[int] = field(default_factory=list)  # epochs the worker has not been told about
    former: dict[int, FormerEpoch] = field(default_factory=dict)
    drain_deadline_ns: int | None = None

    @property
    def fingerprint(self) -> str:
        """Equal ones give bitwise equal logits: the one it registered with, and what its weights were swapped to."""
        return self.up.fingerprint if self.weights is None else f"{self.up.fingerprint} swapped=({self.weights})"

    @property
    def accepts(self) -> bool:
        """Whether requests may be placed here."""
        return self.drain_deadline_ns is None
