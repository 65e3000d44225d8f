"""Builders for tests of the scheduler core: events, a stage that checks every event, a worker that plays by a script.

Request `rN` streams as number N, and its own tokens are all its own: output i of rN is `scripted(N, i)`, whatever
happened before, so a token sampled for another position, delivered twice or lost is seen at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from scheduler.blocks import BlockPool
from scheduler.core import Scheduler
from scheduler.events import (
    Cancelled,
    Command,
    EmitTokens,
    Event,
    FinishRequest,
    RejectRequest,
    SchedulerConfig,
    StartStep,
    StepFinished,
    Submitted,
    WorkerUp,
)
from scheduler.request import Request, SamplingParams
from scheduler.step import Arrival, Int32Array, RowFailure, RowLogprobs, StepPlan, StepResult

# ---- tokens ----


def number_of(request_id: str) -> int:
    """The number in a request id: 12 for "r12"."""
    return int(request_id.removeprefix("r"))


def prompt_of(request_id: str, num_tokens: int) -> Int32Array:
    """A prompt that shares no block with any other request's."""
    return np.arange(num_tokens, dtype=np.int32) + 100_000 * (number_of(request_id) + 1)


def scripted(request_id: str, start: int, stop: int) -> list[int]:
    """Outputs `start .. stop - 1` of an undisturbed stream."""
    return [1_000_000 * (number_of(request_id) + 1) + index for index in range(start, stop)]


# ---- events ----


def submitted(
    request_id: str = "r0", prompt: int | Sequence[int] = 8, *, max_tokens: int = 16, resume: Sequence[int] = (),
    front_end: str = "front", sampling: SamplingParams | None = None, **fields: Any,
) -> Submitted:  # fmt: skip
    """A request: `prompt` is its tokens or just their number."""
    token_ids = prompt_of(request_id, prompt) if isinstance(prompt, int) else np.array(prompt, np.int32)
    fields.setdefault("stream", number_of(request_id))
    return Submitted(
        request=Request(
            request_id=request_id,
            front_end=front_end,
            prompt_token_ids=token_ids,
            resume_token_ids=np.array(resume, np.int32),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            **fields,
        )
    )


def cancelled(request_id: str = "r0", attempt: int = 0) -> Cancelled:
    """The client of an attempt left."""
    return Cancelled(request_id=request_id, attempt=attempt)


def worker_up(
    worker_id: str = "a", session: int = 1, *, num_blocks: int = 64, max_num_seqs: int = 16, max_drafts: int = 8,
    **fields: Any,
) -> WorkerUp:  # fmt: skip
    """A worker with an empty pool."""
    return WorkerUp(
        worker_id=worker_id,
        session=session,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_drafts=max_drafts,
        **fields,
    )


def result_of(
    plan: StepPlan, tokens: Sequence[Sequence[int]], *, worker_id: str = "a", num_verified: Sequence[int] | None = None,
    failures: tuple[RowFailure, ...] = (), logprobs: tuple[RowLogprobs, ...] = (),
) -> StepResult:  # fmt: skip
    """A hand-written answer: the tokens of each row of the plan, every planned draft verified unless told."""
    return StepResult(
        worker_id=worker_id,
        session=plan.session,
        step_seq=plan.step_seq,
        rows=plan.rows,
        epochs=plan.epochs,
        num_tokens=np.array([len(row) for row in tokens], np.int32),
        num_verified=plan.num_drafts if num_verified is None else np.array(num_verified, np.int32),
        token_ids=np.array([token for row in tokens for token in row], np.int32),
        failures=failures,
        logprobs=logprobs,
    )


# ---- a worker that plays by a script ----


class ToyRow:
    """One epoch: its true tokens, and how many of them have their KV."""

    __slots__ = (
        "end", "num_blocks", "num_computed", "num_pending", "num_prompt", "num_tokens", "proposed", "request_id",
    )  # fmt: skip

    def __init__(self, arrival: Arrival) -> None:
        self.request_id = arrival.request_id
        self.num_prompt = len(arrival.prompt_token_ids)
        self.num_tokens = self.num_prompt + len(arrival.output_token_ids)
        self.num_computed = arrival.num_computed_tokens
        self.end = arrival.end
        self.num_blocks = 0
        self.num_pending = 0  # drafts proposed and not verified yet
        self.proposed = 0  # drafts the last sampling frame was asked for


class ToyWorker:
    """Carries out plans in order, by the rules of a real worker; insists that each of them can be carried out.

    `num_accepted(request_id, num_outputs, num_drafts)` says how many of a frame's drafts are right.
    """

    def __init__(
        self, up: WorkerUp, block_size: int, outputs: Mapping[str, Sequence[int]],
        num_accepted: Callable[[str, int, int], int], max_proposals: Callable[[str, int], int],
    ) -> None:  # fmt: skip
        self.up = up
        self.block_size = block_size
        self.outputs = outputs
        self.num_accepted = num_accepted
        self.max_proposals = max_proposals
        self.rows: dict[int, ToyRow] = {}  # by epoch
        self.next_step_seq = 0

    def execute(self, plan: StepPlan, told: Mapping[str, Sequence[int]] | None = None) -> StepResult:
        """Releases, arrivals, rows. `told` puts the tokens of sampling rows into its mouth."""
        assert (plan.session, plan.step_seq) == (self.up.session, self.next_step_seq)
        self.next_step_seq += 1
        for epoch in plan.released_epochs.tolist():
            del self.rows[epoch]
        for arrival in plan.arrivals:
            self.rows[arrival.epoch] = ToyRow(arrival)
        assert len(self.rows) <= self.up.max_num_seqs
        epochs = plan.epochs.tolist()
        answers = [self._run(self.rows[epoch], plan, index, told) for index, epoch in enumerate(epochs)]
        tokens, verified = [row for row, _ in answers], [count for _, count in answers]
        return result_of(plan, tokens, worker_id=self.up.worker_id, num_verified=verified)

    def _run(
        self, row: ToyRow, plan: StepPlan, index: int, told: Mapping[str, Sequence[int]] | None
    ) -> tuple[list[int], int]:
        """One frame: its tokens and the number of drafts verified."""
        row.num_blocks += int(plan.block_offsets[index + 1] - plan.block_offsets[index])
        num_scheduled, num_drafts = int(plan.num_scheduled[index]), int(plan.num_drafts[index])
        reserved, num_propose = int(plan.reserved[index]), int(plan.num_propose[index])
        if reserved == 0:
            row.num_computed += num_scheduled
            assert row.num_computed < row.num_tokens, f"{row.request_id}: a chunk reaches the last token"
            return [], 0
        assert reserved == 1 + num_drafts
        assert num_drafts <= row.proposed
        room = row.end - row.num_tokens - 1
        if room < 0:
            return [], 0
        verified = min(row.num_pending, num_drafts, room)
        needed = row.num_tokens + verified
        assert needed - row.num_computed <= num_scheduled, f"{row.request_id}: {num_scheduled} tokens are too few"
        assert needed <= row.num_blocks * self.block_size, f"{row.request_id}: too few blocks"
        num_outputs = row.num_tokens - row.num_prompt
        accepted = min(self.num_accepted(row.request_id, num_outputs, verified), verified)
        if told is not None:
            accepted = max(len(told.get(row.request_id, ())) - 1, 0)
        row.num_computed = row.num_tokens + accepted
        row.num_tokens += accepted + 1
        row.proposed = num_propose
        most = self.max_proposals(row.request_id, row.num_tokens)
        row.num_pending = max(min(num_propose, most, room - accepted - 1), 0)
        return [self.token(row.request_id, num_outputs + step) for step in range(accepted + 1)], verified

    def token(self, request_id: str, index: int) -> int:
        """Output `index` of a request."""
        outputs = self.outputs.get(request_id, ())
        return outputs[index] if index < len(outputs) else scripted(request_id, index, index + 1)[0]


# ---- the stage ----


class Frame(NamedTuple):
    """One request's row of a plan."""

    num_scheduled: int
    num_drafts: int
    reserved: int
    num_propose: int
    block_ids: list[int]


class Counted(NamedTuple):
    """The counters of a running request; C, PH and IF of a waiting one are 0."""

    T: int
    C: int
    PH: int
    IF: int


def all_right(_request_id: str, _num_outputs: int, num_drafts: int) -> int:
    """Every draft is accepted."""
    return num_drafts


class Stage:
    """A scheduler that is checked after every event, its toy workers, and what its clients got."""

    def __init__(
        self,
        *,
        outputs: Mapping[str, Sequence[int]] | None = None,
        num_accepted: Callable[[str, int, int], int] = all_right,
        max_proposals: Callable[[str, int], int] = lambda _request_id, _num_tokens: 1 << 20,
        choose_drafts: Callable[[str, Int32Array], Int32Array] | None = None,
        **config: Any,
    ) -> None:
        """`config`: fields of SchedulerConfig. `outputs`: tokens of some requests, in place of `scripted` ones."""
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(self.config, choose_drafts)
        self.workers: dict[str, ToyWorker] = {}
        self.unanswered: dict[str, list[StepPlan]] = {}  # by worker, of its current session, oldest first
        self.plans: list[StepPlan] = []  # of all workers, as first sent
        self.arrivals: list[Arrival] = []
        self.outputs: dict[str, list[int]] = {}  # of the newest attempt, resumed tokens included
        self.finished: dict[str, FinishRequest] = {}
        self.rejected: list[RejectRequest] = []
        self._request_id_of: dict[tuple[str, int], str] = {}  # (front end, stream) -> request id
        self._request_id_by_epoch: dict[int, str] = {}
        self._sent: set[tuple[str, int, int]] = set()  # (worker, session, step_seq)
        self._outputs, self._num_accepted, self._max_proposals = outputs or {}, num_accepted, max_proposals

    def handle(self, *events: Event) -> list[Command]:
        """Let the scheduler take events, check it after each, and keep what it says."""
        commands: list[Command] = []
        for event in events:
            self._before(event)
            said = self.scheduler.handle(event)
            for command in said:
                self._take(command)
            self.scheduler.check()
            commands += said
        return commands

    def up(self, worker_id: str = "a", session: int = 1, **fields: Any) -> list[Command]:
        """A worker registers; a toy worker will carry out its plans."""
        return self.handle(worker_up(worker_id, session, **fields))

    def answer(self, worker_id: str = "a") -> list[Command]:
        """The toy worker carries out its oldest plan, and the result arrives."""
        return self.handle(StepFinished(result=self.execute(worker_id)))

    def execute(self, worker_id: str = "a") -> StepResult:
        """The toy worker carries out its oldest plan; the result is still on its way."""
        return self.workers[worker_id].execute(self.unanswered[worker_id].pop(0))

    def reply(
        self,
        tokens: Mapping[str, Sequence[int]],
        *,
        worker_id: str = "a",
        num_verified: Mapping[str, int] | None = None,
        failed: Mapping[str, str] | None = None,
        logprobs: tuple[RowLogprobs, ...] = (),
    ) -> list[Command]:
        """A hand-written result of the oldest plan arrives: tokens by request, none for those left out."""
        plan = self.unanswered[worker_id].pop(0)
        self.workers[worker_id].execute(plan, tokens)
        names = [self._request_id_by_epoch[epoch] for epoch in plan.epochs.tolist()]
        assert set(tokens) <= set(names), f"{set(tokens)} of {names}"
        planned = dict(zip(names, plan.num_drafts.tolist(), strict=True))
        verified = [(num_verified or {}).get(name, planned[name]) for name in names]
        failures = tuple(
            RowFailure(epoch=epoch, message=failed[name])
            for name, epoch in zip(names, plan.epochs.tolist(), strict=True)
            if failed and name in failed
        )
        rows = [tokens.get(name, ()) for name in names]
        return self.handle(
            StepFinished(
                result=result_of(
                    plan, rows, worker_id=worker_id, num_verified=verified, failures=failures, logprobs=logprobs
                )
            )
        )

    def run(self, max_answers: int = 10_000) -> None:
        """Answer every plan of every worker, in turns, until nothing is in flight."""
        for _ in range(max_answers):
            waiting = [worker_id for worker_id, plans in self.unanswered.items() if plans]
            if not waiting:
                return
            for worker_id in waiting:
                self.answer(worker_id)
        raise AssertionError("the scheduler never comes to rest")

    def frames(self, plan: StepPlan) -> dict[str, Frame]:
        """The rows of a plan by request."""
        offsets, block_ids = plan.block_offsets.tolist(), plan.block_ids.tolist()
        return {
            self._request_id_by_epoch[epoch]: Frame(
                num_scheduled=int(plan.num_scheduled[index]),
                num_drafts=int(plan.num_drafts[index]),
                reserved=int(plan.reserved[index]),
                num_propose=int(plan.num_propose[index]),
                block_ids=block_ids[offsets[index] : offsets[index + 1]],
            )
            for index, epoch in enumerate(plan.epochs.tolist())
        }

    def in_flight(self, worker_id: str = "a") -> list[dict[str, Frame]]:
        """The frames of every unanswered plan, oldest first."""
        return [self.frames(plan) for plan in self.unanswered[worker_id]]

    def frames_of(self, request_id: str) -> list[Frame]:
        """Every frame ever planned of a request, in order."""
        return [frames[request_id] for frames in map(self.frames, self.plans) if request_id in frames]

    def arrivals_of(self, request_id: str) -> list[Arrival]:
        """The beginnings of its epochs."""
        return [arrival for arrival in self.arrivals if arrival.request_id == request_id]

    def counted(self, request_id: str = "r0") -> Counted:
        """Its counters now."""
        state = self.scheduler.requests[request_id]
        if state.worker is None:
            return Counted(state.num_tokens, 0, 0, 0)
        table = state.worker.rows
        columns = (table.num_tokens, table.num_computed, table.num_placeholders, table.num_in_flight)
        return Counted(*(int(column[state.row]) for column in columns))

    def is_running(self, request_id: str) -> bool:
        """Whether it holds a row of a worker."""
        return self.scheduler.requests[request_id].worker is not None

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a running request."""
        state = self.scheduler.requests[request_id]
        assert state.worker is not None
        table = state.worker.rows
        blocks: list[int] = table.block_table[state.row, : table.num_blocks[state.row]].tolist()
        return blocks

    def pool(self, worker_id: str = "a") -> BlockPool:
        """A worker's blocks."""
        return self.scheduler.workers[worker_id].pool

    def assert_settled(self) -> None:
        """Everything has ended: nobody waits or runs, every block is free, no token is left to discard."""
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.placeholders, stats.async_tokens_to_discard) == (0, 0, 0, 0)
        for worker in stats.workers:
            assert worker.num_free_blocks == worker.num_blocks
            assert worker.num_steps_in_flight == 0

    def _before(self, event: Event) -> None:
        match event:
            case Submitted(request=request):
                self._request_id_of[request.front_end, request.stream] = request.request_id
                live = self.scheduler.requests.get(request.request_id)
                if live is None or request.attempt > live.request.attempt:
                    self.outputs[request.request_id] = request.resume_token_ids.tolist()
                    self.finished.pop(request.request_id, None)
            case WorkerUp():
                self.workers[event.worker_id] = ToyWorker(
                    event, self.config.block_size, self._outputs, self._num_accepted, self._max_proposals
                )
                self.unanswered[event.worker_id] = []

    def _take(self, command: Command) -> None:
        match command:
            case StartStep(worker_id=worker_id, plan=plan):
                if (worker_id, plan.session, plan.step_seq) not in self._sent:
                    self._sent.add((worker_id, plan.session, plan.step_seq))
                    self.plans.append(plan)
                    self.unanswered[worker_id].append(plan)
                    self.arrivals += plan.arrivals
                    self._request_id_by_epoch |= {arrival.epoch: arrival.request_id for arrival in plan.arrivals}
            case EmitTokens():
                self._stream(command)
            case FinishRequest():
                assert command.request_id not in self.finished, "nothing follows the end of a request"
                self.finished[command.request_id] = command
            case RejectRequest():
                self.rejected.append(command)

    def _stream(self, command: EmitTokens) -> None:
        """Tokens come once, in order, without a gap, and never after the end."""
        start = 0
        columns = (command.streams, command.offsets, command.num_tokens)
        for stream, offset, count in zip(*(column.tolist() for column in columns), strict=True):
            request_id = self._request_id_of[command.front_end, stream]
            assert request_id not in self.finished, f"{request_id} emits after its end"
            assert offset == len(self.outputs[request_id]), f"{request_id}: offset {offset}"
            self.outputs[request_id] += command.token_ids[start : start + count].tolist()
            start += count
        assert start == len(command.token_ids)
