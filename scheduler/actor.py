"""The shell around the core: the only file of this room with asyncio and the clock, and a Ray actor when served.

It has no opinions. Messages and the clock become events, each command has one branch, each
asynchronous effect ends in an event again. Transports are injected as ports; the class runs
as a detached Ray actor, and without Ray in tests.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, assert_never

from scheduler.cache_feed import CacheFeed, CacheNews
from scheduler.core import Scheduler
from scheduler.events import (
    CacheReset,
    CacheWatched,
    Cancelled,
    CloseSession,
    Command,
    EmitTokens,
    Event,
    FinishRequest,
    FrontEndLost,
    PreemptRequested,
    RejectRequest,
    SchedulerConfig,
    Seated,
    StartStep,
    StepFailed,
    StepFinished,
    Submitted,
    SwapRequested,
    TellCacheChanges,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler.pace import Pace
from scheduler.record import RecordedScheduler
from scheduler.request import FinishReason, RejectCode, Request
from scheduler.state import RequestState
from scheduler.stats import DurationCounter, SchedulerStats
from scheduler.step import StepPlan, StepResult
from scheduler.trail import Trail
from scheduler.view import view_of

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
MAX_VIEWED_STEPS, MAX_VIEWED_FRAMES = 400, 2048
DRAFT_BLOCKS_TIMEOUT_S = 0.5
CACHE_NEWS_TIMEOUT_S = 1.0
CACHE_ASKED_S = 10.0  # nobody asked for so long: the caches are not watched any more
DEADLINE_HEADROOM = 1.25  # a request is taken if it would end in time even if all took so much longer
SHORT_SESSION_S = 2.0  # a worker whose sessions are no longer is not tried again at once


class WorkerUnreachable(ConnectionError):
    """A worker did not answer. It may or may not have received, or carried out, what it was sent."""


class StepRaised(RuntimeError):
    """A worker answered that a whole step failed; it refuses the rest of that session."""


class WorkerPort(Protocol):
    """The way to one worker. Sessions and plans go through the worker's own queue, all else past it."""

    async def register(self, session: int) -> WorkerUp:
        """Begin a session; the event that says so. Raises WorkerUnreachable."""
        ...

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """The results this plan released, possibly none. Raises WorkerUnreachable or StepRaised."""
        ...

    async def health(self) -> int | None:
        """The session the worker is in, answered even during a step. Raises WorkerUnreachable."""
        ...

    async def restart(self) -> None:
        """End the worker's process, which does not answer; another begins. Raises WorkerUnreachable."""
        ...

    async def prepare(self, weights: str) -> None:
        """Load weights that a plan will swap to. Raises ValueError when it cannot, or WorkerUnreachable."""
        ...

    async def weights(self) -> str | None:
        """What the worker was last swapped to; None: nothing since its start. Raises WorkerUnreachable."""
        ...

    async def draft_blocks(self) -> tuple[int, int] | None:
        """Blocks of its draft model's own pool, and how many are free; None without. Raises WorkerUnreachable."""
        ...


Message = Command | Seated


class FrontEndPort(Protocol):
    """The way to one front end. Messages may overtake each other: `seq` counts them from 0 within `connection`."""

    async def deliver(self, connection: int, seq: int, messages: Sequence[Message]) -> None:
        """Hand over what one event meant for this front end. Raises ConnectionError when it is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How often the shell looks at the clock and at its workers, in seconds."""

    tick_s: float = 0.05
    heartbeat_s: float = 0.5
    worker_down_after_s: float = 3.0  # silent for so long
    worker_hung_after_s: float = 20.0  # silent for so long more: its process is ended


@dataclass(slots=True, eq=False)
class _FrontEnd:
    """One connection of a front end and how many messages went out on it."""

    port: FrontEndPort
    connection: int  # never used before, by an earlier life neither
    num_delivered: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    """One session of one worker, and the reason it ended once there is one."""

    number: int
    ended: asyncio.Future[str]

    def end(self, message: str) -> None:
        if not self.ended.done():
            self.ended.set_result(message)


class SchedulerActor:
    """One life of the scheduler. Construct it anywhere, call `start` inside a running loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        workers: Mapping[str, WorkerPort],
        liveness: Liveness | None = None,
        record_events: int = 0,
        notices: Sequence[str] = (),
        max_waiting_tokens: int | None = None,
        logs: Callable[[str], None] | None = None,
    ) -> None:
        """`record_events`: how many events the core's log holds; 0 keeps none. `notices`: said in every `stats`.

        `max_waiting_tokens`: of all requests in the queue; beyond it a first attempt is RESOURCE_EXHAUSTED.
        `logs` is called first, with the process's name: it configures what is logged here.
        """
        if logs is not None:
            logs("scheduler")
        self._core = RecordedScheduler(config, max_events=record_events) if record_events else Scheduler(config)
        self._workers = dict(workers)
        self._liveness = liveness or Liveness()
        self._life = time.time_ns()
        self._last_number = self._life  # of a session or a connection
        self._sessions: dict[str, _Session] = {}  # worker id -> its current session
        self._front_ends: dict[str, _FrontEnd] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Of requests without a plan yet: id -> when they were submitted, and by which front end.
        self._queued: dict[str, tuple[int, str]] = {}
        self._queue_time = DurationCounter()
        self._pace = Pace()
        # Of requests that were planned: id -> when at first, by which front end, and for how many tokens.
        self._seats: dict[str, tuple[int, str, int]] = {}
        self._num_shed = 0
        self._trail = Trail()
        self._weights: str | None = None  # what all workers were last swapped to
        self._notices = tuple(notices)
        self._max_waiting_tokens = max_waiting_tokens
        self._silent: set[str] = set()  # workers whose last session ended in silence
        self._absent: dict[str, str] = {}  # worker id -> why it is not there, while it fails to come up
        self._cache_feed: CacheFeed | None = None  # while somebody asks for it
        self._cache_changed = asyncio.Event()  # replaced whenever it is set
        self._cache_asked_s = 0.0
        self._started = False
        self._failure: str | None = None

    # ---- called by the bring-up and by front ends ----

    async def start(self) -> int:
        """Begin to tick and to register workers; this life's number. Again: only the number."""
        if not self._started:
            self._started = True
            for notice in self._notices:
                log.warning(notice)
            self._apply(Tick(now_ns=time.monotonic_ns()))
            self._spawn(self._tick())
            for worker_id in self._workers:
                self._spawn(self._supervise(worker_id))
        return self._life

    async def stop(self) -> None:
        """End every task of this life. Workers and front ends are not told."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def connect(self, front_end: str, port: FrontEndPort) -> int:
        """A front end wants its requests' commands; the connection's number. An older one of that name is lost."""
        await self.start()
        if self._front_ends.pop(front_end, None) is not None:
            self._lose_front_end(front_end)
        connection = self._new_number()
        self._front_ends[front_end] = _FrontEnd(port, connection)
        return connection

    async def connection(self, front_end: str) -> int | None:
        """The connection of a front end; None if it has none any more. Raises ConnectionError once this life failed."""
        self._require_life()
        found = self._front_ends.get(front_end)
        return None if found is None else found.connection

    async def submit(self, request: Request, timeout_s: float | None) -> None:
        """Take a request; its deadline is so far from now. Raises ConnectionError if its front end must connect."""
        self._require_life()
        if request.front_end not in self._front_ends:
            raise ConnectionError(f"front end {request.front_end} is not connected")
        # A later attempt is a stream that was already admitted.
        if request.attempt == 0 and (why := self._why_shed(request, timeout_s)) is not None:
            self._shed(request, *why)
            return
        if timeout_s is not None:
            request = replace(request, deadline_ns=time.monotonic_ns() + round(timeout_s * 1e9))
        now_ns = time.monotonic_ns()
        self._queued[request.request_id] = now_ns, request.front_end
        self._trail.submitted(request.front_end, request.request_id, now_ns)
        self._apply(Submitted(request=request))

    async def cancel(self, request_id: str, attempt: int) -> None:
        """End this attempt or an older one. Unknown ids are fine."""
        self._apply(Cancelled(request_id=request_id, attempt=attempt))

    async def reset_prefix_cache(self, reset_running: bool) -> None:
        """Empty the prefix cache, with `reset_running` the KV of running requests too."""
        self._apply(CacheReset(reset_running=reset_running))

    async def preempt(self, request_id: str) -> None:
        """Take a running request off its worker. Unknown ids are fine."""
        self._apply(PreemptRequested(request_id=request_id))

    async def swap_weights(self, directory: str) -> None:
        """Go on with the weights of another checkpoint. Raises ValueError, and changes nothing, if a worker cannot."""
        self._require_life()
        weights = f"{self._new_number()} {directory}"
        try:
            await asyncio.gather(*(self._prepare(worker_id, weights) for worker_id in self._workers))
        except ValueError:
            log.warning("the weights of %s were not swapped in", directory)
            raise
        self._learn_weights(weights)

    async def stats(self) -> SchedulerStats:
        """A snapshot of the core's counters."""
        return replace(
            self._core.stats(),
            queue_time=self._queue_time.snapshot(),
            notices=self.notices(),
            num_shed=self._num_shed,
            num_tasks=len(asyncio.all_tasks()),
        )

    async def view(self, after: int, frames: bool) -> dict[str, Any]:
        """What a live page draws, in plain values, with the steps that changed since `after`; `frames`: their rows."""
        trail = self._trail.since(after, frames=frames, most=MAX_VIEWED_FRAMES if frames else MAX_VIEWED_STEPS)
        draft_blocks = await asyncio.gather(*map(self._draft_blocks, self._core.workers))
        view = view_of(self._core)
        known = dict(draft_blocks)
        for worker in view["workers"]:
            worker["draft_blocks"] = known.get(worker["worker_id"])
        return view | {"life": str(self._life), "now_ns": time.monotonic_ns(), "trail": trail}

    async def cache_changes(self, after: int | None) -> CacheNews | None:
        """What the prefix caches gained and lost after a number, at once or when there is something, or soon nothing.

        None as a number asks for a snapshot; None comes back when that number is too far behind, or of another life.
        """
        self._require_life()
        feed = self._followed_caches()
        if after is None:
            return feed.snapshot()
        if after == feed.seq:
            try:
                async with asyncio.timeout(CACHE_NEWS_TIMEOUT_S):
                    await self._cache_changed.wait()
            except TimeoutError:
                pass
            self._cache_asked_s = time.monotonic()
        return feed.since(after)

    def _followed_caches(self) -> CacheFeed:
        self._cache_asked_s = time.monotonic()
        if self._cache_feed is None:
            is_partial = any(worker.pool.num_cached for worker in self._core.workers.values())
            self._cache_feed = CacheFeed(time.time_ns() // 1000, is_partial=is_partial)
            self._apply(CacheWatched(watched=True))
        return self._cache_feed

    def _watch_caches_no_longer_than_asked(self) -> None:
        if self._cache_feed is not None and time.monotonic() - self._cache_asked_s > CACHE_ASKED_S:
            self._cache_feed = None
            self._apply(CacheWatched(watched=False))

    def _take_cache_changes(self, command: TellCacheChanges) -> None:
        assert self._cache_feed is not None
        self._cache_feed.take(command)
        self._cache_changed.set()
        self._cache_changed = asyncio.Event()

    async def _draft_blocks(self, worker_id: str) -> tuple[str, dict[str, int] | None]:
        """Of one worker, as a page draws them; None too when it does not answer at once."""
        try:
            async with asyncio.timeout(DRAFT_BLOCKS_TIMEOUT_S):
                blocks = await self._workers[worker_id].draft_blocks()
        except (WorkerUnreachable, TimeoutError):
            return worker_id, None
        return worker_id, None if blocks is None else {"total": blocks[0], "used": blocks[0] - blocks[1]}

    def notices(self) -> tuple[str, ...]:
        """What an operator must know."""
        return (*self._notices, *self._absent.values())

    async def recording(self) -> bytes:
        """The core's log, for `slipstream replay`. Raises ValueError if none is kept."""
        if not isinstance(self._core, RecordedScheduler):
            raise ValueError("no events are recorded: serve with --record-events above 0")
        return self._core.recording()

    async def story(self, request_id: str) -> str:
        """One request's history."""
        return self._core.story(request_id)

    async def front_end_names(self) -> list[str]:
        """The front ends connected now."""
        return list(self._front_ends)

    def _why_shed(self, request: Request, timeout_s: float | None) -> tuple[str, int] | None:
        """Why it had better not be taken, and when to come again, in ms. One that would wait alone is always taken."""
        if not self._core.waiting:
            return None
        ahead, retry_after_ms = self._core.num_waiting_tokens, self._core.config.retry_after_ms
        if self._max_waiting_tokens is not None and ahead + request.most_tokens > self._max_waiting_tokens:
            return f"the queue is full: max_waiting_tokens {self._max_waiting_tokens}", retry_after_ms
        if timeout_s is None:
            return None
        expected_s = self._pace.expected_s(self._core.num_tokens_ahead(request), request.most_tokens)
        if expected_s is None or DEADLINE_HEADROOM * expected_s <= timeout_s:
            return None
        too_late_ms = round(1000 * (DEADLINE_HEADROOM * expected_s - timeout_s))
        why = f"it would end in {expected_s:.2f} s or later, and its deadline is in {timeout_s:.2f} s"
        return why, max(retry_after_ms, too_late_ms)

    def _shed(self, request: Request, message: str, retry_after_ms: int) -> None:
        self._num_shed += 1
        refused = RejectRequest(
            front_end=request.front_end,
            stream=request.stream,
            request_id=request.request_id,
            attempt=request.attempt,
            code=RejectCode.RESOURCE_EXHAUSTED,
            message=message,
            retry_after_ms=retry_after_ms,
        )
        self._deliver(request.front_end, [refused])

    def _require_life(self) -> None:
        if self._failure is not None:
            raise ConnectionError(f"the scheduler stopped: {self._failure}")

    # ---- one door in, one branch per command ----

    def _apply(self, event: Event) -> None:
        if self._failure is not None:
            return
        try:
            commands = self._core.handle(event)
        except Exception as error:
            # A core that raised cannot be trusted with another event; front ends learn it from `health`.
            self._failure = f"{type(error).__name__}: {error}"
            log.exception("the core failed on a %s", type(event).__name__)
            self._save_recording()
            raise
        messages: dict[str, list[Message]] = {}
        for command in commands:
            match command:
                case StartStep():
                    self._time_queue(command.plan)
                    self._trail_plan(command.worker_id, command.plan)
                    for seated in self._seated(command):
                        messages.setdefault(seated.front_end, []).append(seated)
                    self._spawn(self._run_step(command.worker_id, command.plan))
                case EmitTokens():
                    messages.setdefault(command.front_end, []).append(command)
                case FinishRequest() | RejectRequest():
                    self._queued.pop(command.request_id, None)
                    self._time_run(command)
                    self._trail.ended(command, time.monotonic_ns())
                    messages.setdefault(command.front_end, []).append(command)
                case CloseSession():
                    self._end_session(command.worker_id, command.session, command.message)
                case TellCacheChanges():
                    self._take_cache_changes(command)
                case _:
                    assert_never(command)
        for front_end, message in messages.items():
            self._deliver(front_end, message)

    def _time_queue(self, plan: StepPlan) -> None:
        now_ns, num_tokens = time.monotonic_ns(), 0
        for arrival in plan.arrivals:
            queued = self._queued.pop(arrival.request_id, None)
            if queued is not None:  # else it resumes
                self._queue_time.add((now_ns - queued[0]) / 1e9)
                self._seats[arrival.request_id] = now_ns, queued[1], arrival.end
            num_tokens += arrival.end
        self._pace.planned(num_tokens, now_ns, is_queue_left=bool(self._core.waiting))

    def _time_run(self, command: FinishRequest | RejectRequest) -> None:
        """One that a deadline cut short counts for as far as it came; one that its client ended tells nothing."""
        seat = self._seats.pop(command.request_id, None)
        if seat is None or isinstance(command, RejectRequest) or command.reason is FinishReason.ABORT:
            return
        is_whole = command.reason in (FinishReason.STOP, FinishReason.LENGTH)
        num_tokens = seat[2] if is_whole else command.num_prompt_tokens + command.num_output_tokens
        self._pace.ended(num_tokens, (time.monotonic_ns() - seat[0]) / 1e9)

    def _trail_plan(self, worker_id: str, plan: StepPlan) -> None:
        worker = self._core.workers.get(worker_id)
        if worker is not None and worker.session == plan.session:
            self._trail.planned(worker_id, worker.in_flight.get(plan.step_seq), time.monotonic_ns())

    def _seated(self, command: StartStep) -> Iterator[Seated]:
        """For each arrival: whose stream goes on with what numbers."""
        worker = self._core.workers.get(command.worker_id)
        fingerprint = worker.fingerprint if worker is not None else ""
        for arrival in command.plan.arrivals:
            state = self._core.requests.get(arrival.request_id)
            if state is not None and state.epoch == arrival.epoch:
                request = state.request
                self._log_seat(state, command.worker_id)
                yield Seated(
                    front_end=request.front_end, stream=request.stream, attempt=request.attempt, fingerprint=fingerprint
                )

    @staticmethod
    def _log_seat(state: RequestState, worker_id: str) -> None:
        """A request lost its worker and goes on at another one: worth a line. All else is for who looks closely."""
        fields = {"request_id": state.request.request_id, "attempt": state.request.attempt, "worker_id": worker_id}
        if state.num_losses:
            log.info("migrated", extra=fields)
        else:
            log.debug("seated", extra={**fields, "num_preemptions": state.num_preemptions})

    def _save_recording(self) -> None:
        """What led to a failure of the core stays on this machine, to be replayed."""
        if isinstance(self._core, RecordedScheduler):
            path = Path(tempfile.gettempdir()) / f"slipstream-{self._life}.recording"
            self._core.save(path)
            log.error("the events before it are in %s: `slipstream replay` tells them again", path)

    async def _run_step(self, worker_id: str, plan: StepPlan) -> None:
        try:
            results = await self._workers[worker_id].step(plan)
        except StepRaised as error:
            self._apply(
                StepFailed(worker_id=worker_id, session=plan.session, step_seq=plan.step_seq, message=str(error))
            )
            self._end_session(worker_id, plan.session, str(error))
        except WorkerUnreachable as error:
            self._lose(worker_id, plan.session, str(error))
        else:
            for result in results:
                self._trail.answered(result, time.monotonic_ns())
                self._apply(StepFinished(result=result))

    def _deliver(self, front_end: str, messages: list[Message]) -> None:
        receiver = self._front_ends.get(front_end)
        if receiver is None:
            return  # lost a moment ago: the core has been told
        seq = receiver.num_delivered
        receiver.num_delivered += 1
        self._trail.delivered(front_end, receiver.connection, seq, messages, time.monotonic_ns())
        self._spawn(self._send(front_end, receiver, seq, messages))

    async def _send(self, front_end: str, receiver: _FrontEnd, seq: int, messages: list[Message]) -> None:
        try:
            await receiver.port.deliver(receiver.connection, seq, messages)
        except ConnectionError as error:
            if self._front_ends.get(front_end) is receiver:  # not a later connection
                log.warning("front end %s is lost: %s", front_end, error)
                del self._front_ends[front_end]
                self._lose_front_end(front_end)

    def _lose_front_end(self, front_end: str) -> None:
        self._queued = {name: queued for name, queued in self._queued.items() if queued[1] != front_end}
        self._seats = {name: seat for name, seat in self._seats.items() if seat[1] != front_end}
        self._apply(FrontEndLost(front_end=front_end))

    # ---- workers: sessions and heartbeats ----

    async def _supervise(self, worker_id: str) -> None:
        """Register a worker, watch it, and when its session ended register it anew."""
        num_failures = 0  # one after the other
        while True:
            message, lasted_s = await self._live(worker_id)
            num_failures = num_failures + 1 if lasted_s < SHORT_SESSION_S else 0
            backoff_s = min(FIRST_BACKOFF_S * 2 ** (num_failures - 1), LONGEST_BACKOFF_S) if num_failures else 0.0
            log.warning("worker %s, next try in %.1f s: %s", worker_id, backoff_s, message)
            if num_failures > 1:
                self._absent[worker_id] = f"worker {worker_id} failed {num_failures} times in a row: {message}"
            await asyncio.sleep(backoff_s)

    async def _live(self, worker_id: str) -> tuple[str, float]:
        """One session of a worker from its registration to its end: why it ended, and how long it lasted."""
        if worker_id in self._silent:
            await self._end_if_hung(worker_id)
        port, session = self._workers[worker_id], self._new_session(worker_id)
        try:
            worker_up = await port.register(session.number)
            self._learn_weights(await port.weights())
        except WorkerUnreachable as error:
            return f"it does not register: {error}", 0.0
        began_s = time.monotonic()
        self._apply(worker_up)
        message = await self._watch(worker_id, session)
        self._apply(WorkerDown(worker_id=worker_id, session=session.number, message=message))
        self._trail.lost(worker_id, session.number)
        return f"session {session.number} ended: {message}", time.monotonic() - began_s

    async def _watch(self, worker_id: str, session: _Session) -> str:
        """Why the session ended, once it has."""
        began_s = last_heard_s = time.monotonic()
        while not session.ended.done():
            if await self._hear(worker_id, session):
                last_heard_s = time.monotonic()
                if last_heard_s - began_s >= SHORT_SESSION_S:
                    self._absent.pop(worker_id, None)
            silent_s = time.monotonic() - last_heard_s
            if silent_s >= self._liveness.worker_down_after_s:
                session.end(f"worker {worker_id} was silent for {silent_s:.1f} s")
                self._silent.add(worker_id)
            await asyncio.wait({session.ended}, timeout=self._liveness.heartbeat_s)
        return session.ended.result()

    async def _hear(self, worker_id: str, session: _Session) -> bool:
        """Whether the worker answers; ends the session if it answers from another one."""
        try:
            # Not wait_for: on Python 3.11 it loses a cancellation that meets its result, and `stop` would never end.
            async with asyncio.timeout(self._liveness.worker_down_after_s):
                current = await self._workers[worker_id].health()
        except (WorkerUnreachable, TimeoutError):
            return False
        if current != session.number:
            session.end(f"worker {worker_id} was restarted")
        return True

    async def _end_if_hung(self, worker_id: str) -> None:
        """A process that stays silent is ended, so that another begins: once, as that may only be slow to start."""
        self._silent.discard(worker_id)
        port = self._workers[worker_id]
        try:
            async with asyncio.timeout(self._liveness.worker_hung_after_s):
                await port.health()
        except WorkerUnreachable:
            return  # it is known to be gone
        except TimeoutError:
            log.warning("worker %s hangs: its process is ended", worker_id)
            with suppress(WorkerUnreachable):
                await port.restart()

    def _new_session(self, worker_id: str) -> _Session:
        session = _Session(self._new_number(), asyncio.get_running_loop().create_future())
        self._sessions[worker_id] = session
        return session

    def _new_number(self) -> int:
        """Never used before, by an earlier life of the scheduler neither."""
        self._last_number = max(self._last_number + 1, time.time_ns())
        return self._last_number

    def _end_session(self, worker_id: str, number: int, message: str) -> None:
        session = self._sessions.get(worker_id)
        if session is not None and session.number == number:
            session.end(message)

    def _lose(self, worker_id: str, session: int, message: str) -> None:
        self._apply(WorkerDown(worker_id=worker_id, session=session, message=message))
        self._end_session(worker_id, session, message)

    # ---- weights ----

    async def _prepare(self, worker_id: str, weights: str) -> None:
        # A worker that is away loads them when its first plan says so.
        with suppress(WorkerUnreachable):
            await self._workers[worker_id].prepare(weights)

    def _learn_weights(self, weights: str | None) -> None:
        """All workers compute with the latest; workers know of it where this life of the scheduler does not."""
        if weights is not None and (self._weights is None or swap_number(weights) > swap_number(self._weights)):
            self._weights = weights
            self._apply(SwapRequested(weights=weights))

    # ---- time and tasks ----

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._liveness.tick_s)
            self._apply(Tick(now_ns=time.monotonic_ns()))
            self._watch_caches_no_longer_than_asked()

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            log.error("a task of the scheduler failed", exc_info=error)


def swap_number(weights: str) -> int:
    """Which swap this was: weights are `NUMBER DIRECTORY`, so that a directory may be swapped to again."""
    return int(weights.partition(" ")[0])
