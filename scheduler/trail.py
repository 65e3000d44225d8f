"""What the shell remembers of its latest steps and messages, for a page, a terminal and a trace.

Remembering costs an append; all else is worked out when someone asks. Times are nanoseconds on the
scheduler's clock. A worker's own clock is never asked for: its steps follow each other without a gap (idle,
verify, draft), so one offset places a whole session, and every step bounds it from both sides: none began
before it was sent, none ended after its answer came.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler.events import EmitTokens, FinishRequest, RejectRequest
from scheduler.state import FRAME_KIND_NAMES, FrameKind, Step
from scheduler.step import StepResult

MAX_STEPS = 2048
MAX_MESSAGES = 4096
MAX_ENDED = 64
MAX_NAMES = 8192
COUNTED = ("num_prompt_tokens", "num_output_tokens", "num_draft_tokens", "num_accepted_tokens", "num_preemptions")
NUM_BOUNDS = 64  # of a session's offset: the latest, so that clocks may drift


@dataclass(slots=True, eq=False)
class StepTrail:
    """One step from its plan to its answer."""

    worker_id: str
    step: Step
    sent_ns: int
    changed: int  # the number of its latest change
    result: StepResult | None = None
    received_ns: int | None = None
    lost: bool = False  # with its session
    started_ns: int | None = None  # on the worker, brought to the scheduler's clock


@dataclass(slots=True, eq=False)
class WorkerClock:
    """Where a session's chain of steps lies on the scheduler's clock."""

    next_seq: int = 0
    ended_ns: int = 0  # of its latest step, counted from the beginning of the chain
    bounds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=NUM_BOUNDS))

    def place(self, trail: StepTrail, result: StepResult, received_ns: int) -> int:
        """When this step, the next of the chain, began."""
        if result.step_seq != self.next_seq:
            self.ended_ns = 0
            self.bounds.clear()
        self.next_seq = result.step_seq + 1
        started_ns = self.ended_ns + (result.idle_ns if self.bounds else 0)
        self.ended_ns = started_ns + result.verify_ns + result.draft_ns
        self.bounds.append((trail.sent_ns - started_ns, received_ns - self.ended_ns))
        lowest, highest = max(low for low, _ in self.bounds), min(high for _, high in self.bounds)
        if lowest > highest:  # they drifted apart: the latest step knows best
            lowest, highest = self.bounds[-1]
        return started_ns + (lowest + highest) // 2


@dataclass(frozen=True, slots=True)
class Sent:
    """What passed between the scheduler and a front end."""

    number: int
    kind: str  # "submit": from the front end; "deliver": to it
    at_ns: int
    front_end: str
    name: str  # the request, or CONNECTION/SEQ of a delivery
    num_tokens: int = 0


class Trail:
    """The latest of everything, each change numbered, so that one who asks again gets what is new."""

    def __init__(self) -> None:
        self._number = 0
        self._steps: deque[StepTrail] = deque(maxlen=MAX_STEPS)
        self._open: dict[tuple[str, int, int], StepTrail] = {}  # by (worker, session, step_seq)
        self._unplaced: list[StepTrail] = []
        self._clocks: dict[str, tuple[int, WorkerClock]] = {}  # worker -> (session, clock)
        self._messages: deque[Sent] = deque(maxlen=MAX_MESSAGES)
        self._ended: deque[dict[str, Any]] = deque(maxlen=MAX_ENDED)
        self._names: OrderedDict[int, str] = OrderedDict()  # epoch -> request

    # ---- while it happens ----

    def planned(self, worker_id: str, step: Step | None, now_ns: int) -> None:
        """A plan goes out; None if it was answered already, or its session lost."""
        if step is None:
            return
        key = worker_id, step.plan.session, step.plan.step_seq
        if key in self._open:
            return  # sent again
        for arrival in step.plan.arrivals:
            self._names[arrival.epoch] = arrival.request_id
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        trail = StepTrail(worker_id, step, now_ns, self._next())
        self._steps.append(trail)
        self._open[key] = trail

    def answered(self, result: StepResult, now_ns: int) -> None:
        """A result came; one that nobody waits for is ignored."""
        trail = self._open.pop((result.worker_id, result.session, result.step_seq), None)
        if trail is not None:
            trail.result, trail.received_ns, trail.changed = result, now_ns, self._next()
            self._unplaced.append(trail)
            if len(self._unplaced) > MAX_STEPS:  # nobody asks
                del self._unplaced[: MAX_STEPS // 2]

    def lost(self, worker_id: str, session: int) -> None:
        """Nothing of this session will come any more."""
        for key in [key for key in self._open if key[:2] == (worker_id, session)]:
            trail = self._open.pop(key)
            trail.lost, trail.changed = True, self._next()

    def submitted(self, front_end: str, request_id: str, now_ns: int) -> None:
        """A request came."""
        self._messages.append(Sent(self._next(), "submit", now_ns, front_end, request_id))

    def delivered(self, front_end: str, connection: int, seq: int, messages: object, now_ns: int) -> None:
        """Commands go to a front end."""
        assert isinstance(messages, list)
        num_tokens = sum(len(message.token_ids) for message in messages if isinstance(message, EmitTokens))
        self._messages.append(Sent(self._next(), "deliver", now_ns, front_end, f"{connection}/{seq}", num_tokens))

    def ended(self, command: FinishRequest | RejectRequest, now_ns: int) -> None:
        """A request is over."""
        ended: dict[str, Any] = {"request_id": command.request_id, "ended_ns": now_ns}
        if isinstance(command, RejectRequest):
            self._ended.append(ended | {"state": command.code.value} | dict.fromkeys(COUNTED, 0))
        else:
            self._ended.append(
                ended | {"state": command.reason.value} | {name: getattr(command, name) for name in COUNTED}
            )

    # ---- when asked ----

    def since(self, number: int, *, frames: bool, most: int) -> dict[str, Any]:
        """What changed after `number`, at most so many steps; `frames`: each row of them too. Plain values."""
        self._place()
        steps = [trail for trail in self._steps if trail.changed > number][-most:]
        messages = [sent for sent in self._messages if sent.number > number] if frames else []
        return {
            "number": self._number,
            "steps": [self._plain(trail, frames=frames) for trail in steps],
            "messages": [[sent.kind, sent.at_ns, sent.front_end, sent.name, sent.num_tokens] for sent in messages],
            "ended": [*reversed(self._ended)],
        }

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _place(self) -> None:
        unplaced, self._unplaced = self._unplaced, []
        for trail in sorted(unplaced, key=lambda trail: (trail.worker_id, trail.step.plan.session, _seq(trail))):
            session, clock = self._clocks.get(trail.worker_id, (0, WorkerClock()))
            if session != trail.step.plan.session:
                clock = WorkerClock()
            self._clocks[trail.worker_id] = trail.step.plan.session, clock
            assert trail.result is not None
            assert trail.received_ns is not None
            trail.started_ns = clock.place(trail, trail.result, trail.received_ns)

    def _plain(self, trail: StepTrail, *, frames: bool) -> dict[str, Any]:
        plan, result, kind = trail.step.plan, trail.result, trail.step.kind
        values: dict[str, Any] = {
            "worker_id": trail.worker_id,
            "session": str(plan.session),  # beyond what a page's numbers hold
            "seq": plan.step_seq,
            "sent_ns": trail.sent_ns,
            "received_ns": trail.received_ns,
            "started_ns": trail.started_ns,
            "lost": trail.lost,
            "num_rows": len(plan.rows),
            "num_scheduled": int(plan.num_scheduled.sum()),
            "num_drafts": int(plan.num_drafts.sum()),
            "reserved": int(plan.reserved.sum()),
            "num_deliver": int(np.count_nonzero(kind == FrameKind.DELIVER)),
            "num_drop": int(np.count_nonzero(kind == FrameKind.DROP)),
        }
        if result is not None:
            values |= {
                "verify_ns": result.verify_ns,
                "draft_ns": result.draft_ns,
                "idle_ns": result.idle_ns,
                "num_tokens": int(result.num_tokens.sum()),
                "num_verified": int(result.num_verified.sum()),
                "num_accepted": int(np.maximum(result.num_tokens - 1, 0).sum()),
            }
        if frames:
            values["frames"] = list(self._frames(trail))
        return values

    def _frames(self, trail: StepTrail) -> Iterator[dict[str, Any]]:
        plan, result = trail.step.plan, trail.result
        columns: Mapping[str, list[int]] = {
            "row": plan.rows.tolist(),
            "epoch": plan.epochs.tolist(),
            "num_scheduled": plan.num_scheduled.tolist(),
            "num_drafts": plan.num_drafts.tolist(),
        }
        if result is not None and len(result.rows) == len(plan.rows):
            columns = {
                **columns,
                "num_tokens": result.num_tokens.tolist(),
                "num_verified": result.num_verified.tolist(),
            }
        kinds = trail.step.kind.tolist()
        for values, kind in zip(zip(*columns.values(), strict=True), kinds, strict=True):
            frame: dict[str, Any] = dict(zip(columns, values, strict=True))
            name = self._names.get(frame["epoch"], "")
            yield {"request_id": name, **frame, "kind": FRAME_KIND_NAMES[kind]}


def _seq(trail: StepTrail) -> int:
    return trail.step.plan.step_seq
