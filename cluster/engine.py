"""The in-process engine: the same core and the same runners as on a cluster, without Ray, asyncio or gRPC.

Steps are planned up to `max_steps_in_flight` ahead and results come back after later steps were planned,
as on a cluster; a `Schedule` can also delay, reorder, repeat or lose them. Time is logical: it moves when
`step` is called. Tests and benchmarks use this more than anything else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from scheduler.core import ChooseDrafts, Scheduler
from scheduler.events import (
    CloseSession,
    Command,
    EmitTokens,
    Event,
    FinishRequest,
    RejectRequest,
    SchedulerConfig,
    StartStep,
    StepFailed,
    StepFinished,
    Submitted,
    TellCacheChanges,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler.request import FinishReason, Request, SamplingParams
from scheduler.step import Int32Array, RowLogprobs
from worker.runner import Runner
from worker.session import SessionQueue, StaleSession, StepError

FRONT_END = "engine"
STEP_NS = 1_000_000  # logical time of one step
MAX_IDLE_ROUNDS = 8

Message = StartStep | StepFinished


class Schedule(Protocol):
    """Decides which messages between scheduler and workers arrive now."""

    def __call__(self, under_way: list[Message]) -> list[Message]:
        """The messages to deliver in this step, in order.

        Removes from `under_way` (oldest first) what will not come again: a message that is delivered and
        kept is repeated later, one that is removed and not delivered is lost.
        """
        ...


def in_order(under_way: list[Message]) -> list[Message]:
    """Every result that is there, then the oldest plan: how an undisturbed cluster behaves."""
    results: list[Message] = [message for message in under_way if isinstance(message, StepFinished)]
    plans = [message for message in under_way if isinstance(message, StartStep)]
    under_way[:] = plans[1:]
    return results + plans[:1]


@dataclass(slots=True, kw_only=True, eq=False)
class Output:
    """What the client of one request has received."""

    request_id: str
    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per token, when asked for
    top_token_ids: list[Int32Array] = field(default_factory=list)  # per token [num_logprobs]
    top_logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    finish: FinishRequest | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs."""
        return None if self.finish is None else self.finish.reason

    def append(self, offset: int, token_ids: Sequence[int], logprobs: RowLogprobs | None) -> None:
        """Take tokens at an absolute output offset: a gap or a repeat is a fault of ours."""
        assert self.finish is None, f"{self.request_id}: tokens after its end"
        assert offset == len(self.token_ids), f"{self.request_id}: tokens at {offset}, have {len(self.token_ids)}"
        self.token_ids.extend(token_ids)
        if logprobs is not None:
            assert len(logprobs.logprobs) == len(token_ids)
            self.logprobs.extend(logprobs.logprobs.tolist())
            self.top_token_ids.extend(logprobs.top_token_ids)
            self.top_logprobs.extend(logprobs.top_logprobs)


class Engine:
    """Drives one scheduler and its runners. Single-threaded."""

    def __init__(
        self,
        runners: Sequence[Runner],
        config: SchedulerConfig,
        *,
        schedule: Schedule = in_order,
        choose_drafts: ChooseDrafts | None = None,
        fingerprint: str = "",
    ) -> None:
        """The largest pool of the runners is the one that requests are measured against."""
        largest = max(runner.model.kv_cache.num_blocks for runner in runners)
        self.scheduler = Scheduler(replace(config, largest_pool_blocks=largest), choose_drafts)
        self.outputs: dict[str, Output] = {}  # of every request ever submitted
        self.now_ns = 0
        self._schedule = schedule
        self._fingerprint = fingerprint
        self._runners = {runner.worker_id: runner for runner in runners}
        self._queues = {runner.worker_id: SessionQueue(runner) for runner in runners}
        self._last_session = 0
        self._sessions: dict[str, int] = {}
        self._under_way: list[Message] = []
        self._streams: list[Output] = []  # by Request.stream
        self._num_live = 0
        for worker_id in self._runners:
            self._register(worker_id)

    # ---- requests ----

    def submit(
        self,
        prompt_token_ids: Sequence[int] | Int32Array,
        sampling: SamplingParams,
        max_tokens: int,
        request_id: str | None = None,
        *,
        max_drafts: int | None = None,
        priority: int = 0,
        deadline_ns: int | None = None,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id. Raises ValueError when the scheduler refuses it."""
        stream = len(self._streams)
        request = Request(
            request_id=f"request-{stream}" if request_id is None else request_id,
            front_end=FRONT_END,
            stream=stream,
            prompt_token_ids=np.asarray(prompt_token_ids, np.int32),
            max_tokens=max_tokens,
            sampling=sampling,
            max_drafts=max_drafts,
            priority=priority,
            deadline_ns=deadline_ns,
            cache_salt=cache_salt,
        )
        output = Output(request_id=request.request_id, prompt_token_ids=request.prompt_token_ids)
        self._streams.append(output)
        self._num_live += 1
        self.outputs[request.request_id] = output
        self.handle(Submitted(request=request))
        return request.request_id

    def handle(self, event: Event) -> None:
        """Any other event: resets, forced preemptions, cancels, swaps."""
        self._execute(self.scheduler.handle(event))

    def lose_worker(self, worker_id: str) -> None:
        """The worker dies and a new one registers under its name; what was under way is stale."""
        session = self._sessions[worker_id]
        self.handle(WorkerDown(worker_id=worker_id, session=session, message="lost"))
        self._register(worker_id)

    # ---- time ----

    def step(self) -> None:
        """Let time pass, deliver what arrives and execute what was planned."""
        self._advance(STEP_NS)
        for message in self._schedule(self._under_way):
            match message:
                case StartStep():
                    self._offer(message)
                case StepFinished():
                    self.handle(message)

    def run(self) -> dict[str, Output]:
        """Step until every request has ended and every step is settled.

        Raises RuntimeError if nothing moves any more.
        """
        idle_rounds = 0
        while self._num_live or self._under_way or self._num_steps_in_flight():
            idle_rounds = 0 if self._under_way else idle_rounds + 1
            if idle_rounds > MAX_IDLE_ROUNDS:
                raise RuntimeError(f"nothing moves any more:\n{self._stories()}")
            if idle_rounds:
                # Something was lost: let the scheduler's patience run out.
                self._advance(self.scheduler.config.resend_after_ns)
            self.step()
        return self.outputs

    def _advance(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns
        self.handle(Tick(now_ns=self.now_ns))

    def _num_steps_in_flight(self) -> int:
        return sum(worker.num_steps_in_flight for worker in self.scheduler.stats().workers)

    def _stories(self) -> str:
        live = [output.request_id for output in self._streams if output.finish is None]
        return "\n\n".join(self.scheduler.story(request_id) for request_id in live)

    # ---- workers ----

    def _register(self, worker_id: str) -> None:
        self._last_session += 1
        self._sessions[worker_id] = self._last_session
        self._queues[worker_id].begin(self._last_session)
        runner = self._runners[worker_id]
        self.handle(
            WorkerUp(
                worker_id=worker_id,
                session=self._last_session,
                num_blocks=runner.model.kv_cache.num_blocks,
                max_num_seqs=runner.max_num_seqs,
                max_drafts=runner.max_drafts,
                fingerprint=self._fingerprint,
                drop_last_hit_block=runner.drop_last_hit_block,
            )
        )

    def _offer(self, start: StartStep) -> None:
        try:
            results = self._queues[start.worker_id].offer(start.plan)
        except StaleSession:
            return  # sent before its worker was lost
        except StepError as error:
            failed = StepFailed(
                worker_id=start.worker_id, session=error.session, step_seq=error.step_seq, message=str(error)
            )
            self.handle(failed)  # which closes the session: the worker registers anew
            return
        self._under_way.extend(StepFinished(result=result) for result in results)

    # ---- commands ----

    def _execute(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case StartStep():
                    self._under_way.append(command)
                case EmitTokens():
                    self._emit(command)
                case FinishRequest():
                    self._streams[command.stream].finish = command
                    self._num_live -= 1
                case RejectRequest():
                    self._num_live -= 1
                    del self.outputs[command.request_id]
                    raise ValueError(command.message)
                case CloseSession():
                    if self._sessions[command.worker_id] == command.session:
                        self._register(command.worker_id)
                case TellCacheChanges():
                    pass  # nobody here watches
                case _:
                    assert_never(command)

    def _emit(self, command: EmitTokens) -> None:
        logprobs = {row.row_index: row for row in command.logprobs}
        token_ids = command.token_ids.tolist()
        start = 0
        columns = (command.streams, command.offsets, command.num_tokens)
        for index, (stream, offset, num_tokens) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            self._streams[stream].append(offset, token_ids[start : start + num_tokens], logprobs.get(index))
            start += num_tokens
