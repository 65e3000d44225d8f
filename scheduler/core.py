"""The scheduler: events in, commands out.

`Scheduler.handle` is the only way to change it. No clock, no randomness, no I/O: the same core runs under
the Ray actor, in the in-process engine and in the simulator. A frame in flight is live, deliver or drop;
which one is decided here when something happens to its request, never guessed when its result arrives.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from scheduler.admit import could_hold, fits_now, fits_without, hit_blocks_of, place, seat
from scheduler.blocks import BlockPool
from scheduler.checks import check_scheduler
from scheduler.commit import Committed, commit_live, delivered_tokens, is_live, is_protocol_error
from scheduler.events import (
    CacheCleared,
    CacheReset,
    CacheWatched,
    Cancelled,
    CloseSession,
    Command,
    DrainRequested,
    EmitTokens,
    Event,
    FinishRequest,
    FrontEndLost,
    PreemptRequested,
    RejectRequest,
    SchedulerConfig,
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
from scheduler.fairness import FairShare
from scheduler.plan import PlanBuilder, convert_frames, plan_running
from scheduler.request import FinishReason, RejectCode, Request
from scheduler.rows import RowTable
from scheduler.state import (
    FRAME_KIND_NAMES,
    FormerEpoch,
    FrameKind,
    RequestState,
    Step,
    StoryLine,
    WorkerState,
    queue_key,
)
from scheduler.stats import Counters, SchedulerStats, count_by, snapshot
from scheduler.step import ZERO, Int32Array, RowLogprobs, StepResult
from scheduler.watched import WatchedPool

MAX_ENDED_STORIES = 256
ALWAYS_DRAFTS = 5  # K that is planned in any company; more only while prompts keep half of a step's budget
MAX_ENDED_STREAMS = 4096
MAX_PASSED_BY = 8  # epochs begun meanwhile: the worker with the best prefix is a preference, not a prison
ChooseDrafts = Callable[[str, Int32Array], Int32Array]


class Scheduler:
    """Plans steps for every worker before it knows how the previous ones ended."""

    def __init__(self, config: SchedulerConfig, choose_drafts: ChooseDrafts | None = None) -> None:
        """`choose_drafts(worker_id, rows)` gives K for each row; by default every row gets its maximum."""
        self.config = config
        self.now_ns = 0
        self.workers: dict[str, WorkerState] = {}
        self.requests: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []  # by order_key
        self.num_waiting_tokens = 0  # prompts and outputs at most, of all that wait
        self.discards: dict[tuple[str, int], int] = {}  # attempt -> tokens reserved by its drop frames
        self.counters = Counters()
        self._choose_drafts = choose_drafts
        self._weights: str | None = None
        self._cache_watched = False
        self._next_epoch = 1
        self._next_arrival = 0
        self._shares = FairShare(dict(config.tenant_weights))
        self._front_ends: list[str] = []
        self._deadlines: list[tuple[int, str, int]] = []  # (deadline_ns, request_id, arrival)
        self._ended_stories: OrderedDict[str, deque[StoryLine]] = OrderedDict()
        self._ended_streams: OrderedDict[tuple[str, int], None] = OrderedDict()  # (front end, stream), the latest
        self._commands: list[Command] = []

    # ---- the door ----

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        self._commands = []
        self._take(event)
        while self._plan_round():
            pass
        if self._cache_watched:
            self._tell_cache_changes()
        return self._commands

    def _take(self, event: Event) -> None:
        match event:
            case Submitted():
                self._on_submitted(event.request)
            case Cancelled():
                self._on_cancelled(event)
            case FrontEndLost():
                self._on_front_end_lost(event)
            case WorkerUp():
                self._on_worker_up(event)
            case WorkerDown():
                self._on_worker_down(event)
            case StepFinished():
                self._on_step_finished(event.result)
            case StepFailed():
                self._on_step_failed(event)
            case CacheReset():
                self._on_cache_reset(event)
            case PreemptRequested():
                self._on_preempt_requested(event)
            case SwapRequested():
                self._weights = event.weights
            case DrainRequested():
                self._on_drain_requested(event)
            case CacheWatched():
                self._on_cache_watched(event.watched)
            case Tick():
                self._on_tick(event.now_ns)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Assert every invariant. Meant to run after every event in tests."""
        check_scheduler(self)

    def story(self, request_id: str) -> str:
        """What happened to a request, line by line; also for the last few that ended."""
        state = self.requests.get(request_id)
        lines = [*self._ended_stories.get(request_id, ()), *(state.story if state else ())]
        told = [f"[{now_ns / 1e9:.3f}s] {request_id}#{attempt} {line}" for now_ns, attempt, line in lines]
        return "\n".join(told) or f"{request_id}: never heard of it"

    def stats(self) -> SchedulerStats:
        """A snapshot of counters and gauges."""
        return snapshot(self)

    def async_tokens_to_discard(self, request_id: str) -> int:
        """Tokens reserved by this id's frames in flight whose results will be dropped."""
        return sum(tokens for (name, _), tokens in self.discards.items() if name == request_id)

    # ---- requests come and go ----

    def _on_submitted(self, request: Request) -> None:
        if (request.front_end, request.stream) in self._ended_streams:
            return  # a stray copy: it would live again
        live = self.requests.get(request.request_id)
        if live is not None and not self._replaces(request, live):
            return
        problem = self._problem_with(request)
        if problem is not None:
            self._reject(request, *problem)
            return
        if live is not None:
            self._forget(live, "replaced by a higher attempt")
        start = self._shares.start(request.tenant, request.most_tokens)
        state = RequestState(request, self.config, self._next_arrival, start)
        self._next_arrival += 1
        self.requests[request.request_id] = state
        self._tell(state, f"submitted, attempt {request.attempt}, {state.num_prompt}+{state.num_outputs} tokens")
        resumed = state.first_stop(request.resume_token_ids, 0)
        if resumed is not None:
            self._finish(state, resumed[1], stop_token_id=resumed[2])
            return
        self.counters.num_prompt_tokens += state.num_prompt
        self._queue(state)
        if request.deadline_ns is not None:
            heappush(self._deadlines, (request.deadline_ns, request.request_id, state.arrival))

    def _replaces(self, request: Request, live: RequestState) -> bool:
        """Whether a submission of a live id is a newer attempt. Another stream's is an error: it would wait in vain."""
        if request.attempt > live.request.attempt:
            return True
        if (request.front_end, request.stream) != (live.request.front_end, live.request.stream):
            self._reject(request, RejectCode.ALREADY_EXISTS, f"request_id {request.request_id!r} is alive")
        return False

    def _problem_with(self, request: Request) -> tuple[RejectCode, str] | None:
        end = request.most_tokens
        if len(request.prompt_token_ids) == 0:
            return RejectCode.INVALID_ARGUMENT, "prompt_token_ids is empty"
        if request.max_tokens < 1:
            return RejectCode.INVALID_ARGUMENT, f"max_tokens must be at least 1, got {request.max_tokens}"
        if end > self.config.max_model_len:
            limit = f"max_model_len {self.config.max_model_len}"
            return RejectCode.INVALID_ARGUMENT, f"prompt + max_tokens is {end}, beyond {limit}"
        if -(-end // self.config.block_size) > self.config.largest_pool_blocks:
            limit = f"{self.config.largest_pool_blocks} blocks of {self.config.block_size}"
            return RejectCode.INVALID_ARGUMENT, f"prompt + max_tokens is {end}, beyond the largest KV pool of {limit}"
        # A later attempt is a stream that was already admitted, perhaps by an earlier life: never lost to a crowd.
        if len(self.waiting) >= self.config.max_waiting and request.attempt == 0:
            return RejectCode.RESOURCE_EXHAUSTED, f"the queue is full: max_waiting {self.config.max_waiting}"
        return None

    def _reject(self, request: Request, code: RejectCode, message: str) -> None:
        self.counters.num_rejected += 1
        retry = self.config.retry_after_ms if code is RejectCode.RESOURCE_EXHAUSTED else None
        self._commands.append(
            RejectRequest(
                front_end=request.front_end,
                stream=request.stream,
                request_id=request.request_id,
                attempt=request.attempt,
                code=code,
                message=message,
                retry_after_ms=retry,
            )
        )

    def _on_cancelled(self, event: Cancelled) -> None:
        state = self.requests.get(event.request_id)
        if state is not None and event.attempt >= state.request.attempt:
            self._finish(state, FinishReason.ABORT)

    def _on_front_end_lost(self, event: FrontEndLost) -> None:
        for state in [s for s in self.requests.values() if s.request.front_end == event.front_end]:
            self._forget(state, "front end lost")
        # Another one of that name counts its streams anew.
        for key in [key for key in self._ended_streams if key[0] == event.front_end]:
            del self._ended_streams[key]

    def _finish(
        self, state: RequestState, reason: FinishReason, *, stop_token_id: int | None = None, message: str = ""
    ) -> None:
        self._forget(state, f"finished: {reason.value} {message}".rstrip())
        count_by(self.counters.num_finished, reason.value)
        self.counters.num_inexact += state.inexact
        self._commands.append(
            FinishRequest(
                front_end=state.request.front_end,
                stream=state.request.stream,
                request_id=state.request.request_id,
                attempt=state.request.attempt,
                reason=reason,
                stop_token_id=stop_token_id,
                message=message,
                num_prompt_tokens=state.num_prompt,
                num_output_tokens=state.num_outputs,
                num_cached_tokens=state.num_cached_tokens or 0,
                num_draft_tokens=state.num_draft_tokens,
                num_accepted_tokens=state.num_accepted_tokens,
                num_preemptions=state.num_preemptions,
                inexact=state.inexact,
            )
        )

    def _forget(self, state: RequestState, why: str) -> None:
        """The attempt is gone and emits nothing more; its frames in flight will be dropped."""
        if state.worker is None:
            self._unqueue(state)
        self._take_off(state, FrameKind.DROP, why.split(":")[0])
        del self.requests[state.request.request_id]
        self._tell(state, why)
        story = self._ended_stories.pop(state.request.request_id, state.story)
        if story is not state.story:
            story.extend(state.story)
        self._ended_stories[state.request.request_id] = story
        if len(self._ended_stories) > MAX_ENDED_STORIES:
            self._ended_stories.popitem(last=False)
        self._ended_streams[state.request.front_end, state.request.stream] = None
        if len(self._ended_streams) > MAX_ENDED_STREAMS:
            self._ended_streams.popitem(last=False)

    def num_tokens_ahead(self, request: Request) -> int:
        """Prompts and outputs at most, of what waits and would be seated before this request."""
        key = queue_key(request, self.config, self._shares.next_start(request.tenant), self._next_arrival)
        index = bisect_left(self.waiting, key, key=order_key)
        if index == len(self.waiting):
            return self.num_waiting_tokens
        return sum(state.request.most_tokens for state in self.waiting[:index])

    def _queue(self, state: RequestState) -> None:
        insort(self.waiting, state, key=order_key)
        self.num_waiting_tokens += state.request.most_tokens

    def _unqueue(self, state: RequestState) -> None:
        index = bisect_left(self.waiting, state.order_key, key=order_key)
        if index < len(self.waiting) and self.waiting[index] is state:
            self._unqueue_at(index)

    def _unqueue_at(self, index: int) -> None:
        self.num_waiting_tokens -= self.waiting.pop(index).request.most_tokens

    # ---- leaving a row ----

    def _take_off(self, state: RequestState, kind: int, reason: str) -> None:
        """End an epoch: blocks are freed at once, frames in flight become `kind`.

        Freed at once is safe because a worker carries out everything of a session in step_seq order.
        """
        worker = state.worker
        if worker is not None:
            worker.pool.release(worker.rows.vacate(state.row))
            worker.released.append(state.epoch)
            state.worker = None
        elif state.num_deliver_frames and kind == FrameKind.DROP:
            worker = state.former_worker
            assert worker is not None
            del worker.former[state.epoch]
            state.num_deliver_frames = 0
        else:
            return
        num_frames, num_reserved = convert_frames(worker, state.epoch, kind)
        if num_frames == 0:
            return
        worker.former[state.epoch] = FormerEpoch(state=state, kind=kind, num_frames=num_frames, reason=reason)
        self._tell(
            state, f"{num_frames} frames in flight ({num_reserved} tokens reserved) become {FRAME_KIND_NAMES[kind]}"
        )
        if kind == FrameKind.DELIVER:
            state.num_deliver_frames, state.former_worker = num_frames, worker
        else:
            self._discard(state.key, num_reserved)

    def _discard(self, key: tuple[str, int], num_tokens: int) -> None:
        """Move async_tokens_to_discard of an attempt; a settled account leaves no entry."""
        left = self.discards.get(key, 0) + num_tokens
        if left:
            self.discards[key] = left
        else:
            self.discards.pop(key, None)

    def _preempt(self, state: RequestState, kind: int, reason: str) -> None:
        """Off its row and back into the queue, at its old place."""
        count_by(self.counters.num_preemptions, reason)
        state.num_preemptions += 1
        self._tell(state, f"preempted: {reason}")
        self._take_off(state, kind, reason)
        self._queue(state)

    def _drop_everything(self, worker: WorkerState, reason: str) -> None:
        """All requests of a worker go back to the queue; nothing of theirs in flight there counts any more."""
        for row in worker.rows.order().tolist():
            state = worker.rows.states[row]
            assert state is not None
            self._preempt(state, FrameKind.DROP, reason)
        for former in [former for former in worker.former.values() if former.kind == FrameKind.DELIVER]:
            self._take_off(former.state, FrameKind.DROP, reason)

    def _on_cache_reset(self, event: CacheReset) -> None:
        for worker in self.workers.values():
            if event.reset_running:
                self._drop_everything(worker, "reset")
            worker.pool.reset()

    def _on_preempt_requested(self, event: PreemptRequested) -> None:
        state = self.requests.get(event.request_id)
        if state is None:
            return
        if state.worker is not None:
            self._preempt(state, FrameKind.DROP, "requested")
        else:
            self._take_off(state, FrameKind.DROP, "requested")

    def _on_drain_requested(self, event: DrainRequested) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is not None:
            worker.drain_deadline_ns = event.deadline_ns

    # ---- what somebody else may know of the caches ----

    def _on_cache_watched(self, watched: bool) -> None:
        """From now on, or no more. Told first is what running requests have cached."""
        self._cache_watched = watched
        for worker in self.workers.values():
            if watched and not isinstance(worker.pool, WatchedPool):
                worker.pool = pool = WatchedPool(worker.pool)
                pool.tell_all(worker.rows)
            elif not watched and isinstance(worker.pool, WatchedPool):
                worker.pool = worker.pool.plain()

    def _tell_cache_changes(self) -> None:
        for worker in self.workers.values():
            assert isinstance(worker.pool, WatchedPool)
            changes = worker.pool.take_changes()
            if changes:
                self._commands.append(TellCacheChanges(worker_id=worker.worker_id, changes=changes))

    # ---- workers come and go ----

    def _on_worker_up(self, event: WorkerUp) -> None:
        known = self.workers.get(event.worker_id)
        if known is not None:
            if known.session == event.session:
                return
            self._lose(known, "registered anew")
        pool = BlockPool(event.num_blocks)
        self.workers[event.worker_id] = WorkerState(
            worker_id=event.worker_id,
            session=event.session,
            up=event,
            pool=WatchedPool(pool) if self._cache_watched else pool,
            rows=RowTable(event.max_num_seqs, self.config.max_model_len, self.config.block_size),
        )

    def _on_worker_down(self, event: WorkerDown) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is not None and worker.session == event.session:
            self._lose(worker, event.message or "lost")

    def _on_step_failed(self, event: StepFailed) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is None or worker.session != event.session:
            return
        self._close(worker, f"step {event.step_seq} failed: {event.message}")

    def _close(self, worker: WorkerState, message: str) -> None:
        """Give a session up; the worker is asked to register anew."""
        self._lose(worker, message)
        self._commands.append(CloseSession(worker_id=worker.worker_id, session=worker.session, message=message))

    def _lose(self, worker: WorkerState, message: str) -> None:
        """All frames of the session are settled at once; requests resume anywhere from their confirmed tokens."""
        del self.workers[worker.worker_id]
        if self._cache_watched:
            self._commands.append(TellCacheChanges(worker_id=worker.worker_id, changes=(CacheCleared(),)))
        for step in worker.in_flight.values():
            for index in np.flatnonzero(step.kind == FrameKind.DROP).tolist():
                former = worker.former[int(step.plan.epochs[index])]
                self._discard(former.state.key, -int(step.plan.reserved[index]))
        for former in worker.former.values():
            if former.kind == FrameKind.DELIVER:
                former.state.num_deliver_frames = 0
        worker.in_flight.clear()
        for row in worker.rows.order().tolist():
            state = worker.rows.states[row]
            assert state is not None
            self._tell(state, f"worker {worker.worker_id} session {worker.session}: {message}")
            self._take_off(state, FrameKind.DROP, "worker lost")
            state.num_losses += 1
            if state.num_losses <= self.config.max_attempts:
                self._queue(state)
                continue
            lost = f"lost its worker {state.num_losses} times (max_attempts {self.config.max_attempts})"
            self._finish(state, FinishReason.ERROR, message=f"{lost}; last: {message}")

    # ---- results ----

    def _on_step_finished(self, result: StepResult) -> None:
        worker = self._claim(result)
        if worker is None:
            self.counters.num_stale_results += 1
            return
        worker.early_results[result.step_seq] = result
        while self._is_next(worker):
            seq = worker.acknowledged + 1
            if not answers(worker.early_results[seq], worker.in_flight[seq]):
                self._close(worker, f"the answer to step {seq} does not match its plan")
                return
            worker.acknowledged = seq
            self._apply(worker, worker.in_flight.pop(seq), worker.early_results.pop(seq))

    def _claim(self, result: StepResult) -> WorkerState | None:
        """The worker whose step in flight this answers, or None: stale, repeated, or of another session."""
        worker = self.workers.get(result.worker_id)
        if worker is None or not self._is_current(worker, result):
            return None
        return worker if result.step_seq in worker.in_flight else None

    @staticmethod
    def _is_current(worker: WorkerState, result: StepResult) -> bool:
        return worker.session == result.session

    @staticmethod
    def _is_next(worker: WorkerState) -> bool:
        """Results are applied once, in step_seq order."""
        return worker.acknowledged + 1 in worker.early_results

    def _apply(self, worker: WorkerState, step: Step, result: StepResult) -> None:
        self._count_step(result)
        messages = self._errors(step, result)
        live = is_live(step)
        converted = np.flatnonzero(step.kind != FrameKind.LIVE) if step.num_converted else NO_INDEX
        if messages:
            live = live[np.isin(live, list(messages), invert=True)]
        if len(live):
            committed = commit_live(worker, step, result, live, self.counters, self.config)
            if isinstance(worker.pool, WatchedPool):
                worker.pool.tell_rows(worker.rows, step.rows.tolist())
            self._emit(worker, committed, result)
            if self.config.trace:
                self._tell_frames(worker, step, result, live)
            for ending in committed.endings:
                self._finish(ending.state, ending.reason, stop_token_id=ending.stop_token_id)
        for index, message in messages.items():
            self._fail_row(worker, step, index, message)
        for index in converted.tolist():
            self._settle(worker, step, result, index, messages.get(index))

    def _count_step(self, result: StepResult) -> None:
        self.counters.num_steps += 1
        self.counters.worker_verify_ns += result.verify_ns
        self.counters.worker_draft_ns += result.draft_ns
        self.counters.worker_idle_ns += result.idle_ns
        self.counters.step_time.add((result.verify_ns + result.draft_ns) / 1e9)
        self.counters.idle_time.add(result.idle_ns / 1e9)

    def _errors(self, step: Step, result: StepResult) -> dict[int, str]:
        """Rows that failed on the worker or answered what no plan allows: index -> message."""
        wrong = is_protocol_error(step, result)
        if not result.failures and not np.count_nonzero(wrong):
            return {}
        failed = {failure.epoch: failure.message for failure in result.failures}
        epochs = step.plan.epochs.tolist()
        found = {index: failed[epoch] for index, epoch in enumerate(epochs) if epoch in failed}
        for index in np.flatnonzero(wrong).tolist():
            # A dropped frame may find its request at its end, with nothing left to sample.
            if index not in found and step.kind[index] != FrameKind.DROP:
                counts = f"{result.num_tokens[index]} tokens for {step.plan.reserved[index]} reserved"
                found[index] = f"protocol error: the worker returned {counts}"
        return found

    def _fail_row(self, worker: WorkerState, step: Step, index: int, message: str) -> None:
        """A live row failed alone: its request ends, the others never notice."""
        if step.kind[index] != FrameKind.LIVE:
            return
        row = int(step.plan.rows[index])
        state = worker.rows.states[row]
        assert state is not None
        assert state.epoch == step.plan.epochs[index]
        self._finish(state, FinishReason.ERROR, message=message)

    def _settle(self, worker: WorkerState, step: Step, result: StepResult, index: int, error: str | None) -> None:
        """A frame whose epoch has left its row came back: deliver its tokens, or drop them."""
        epoch = int(step.plan.epochs[index])
        former = worker.former[epoch]
        state = former.state
        former.num_frames -= 1
        if former.num_frames == 0:
            del worker.former[epoch]
        if step.kind[index] == FrameKind.DROP:
            self._discard(state.key, -int(step.plan.reserved[index]))
            count_by(self.counters.stale_tokens_dropped, former.reason, int(result.num_tokens[index]))
            return
        state.num_deliver_frames -= 1
        if error is not None:
            self._finish(state, FinishReason.ERROR, message=error)
            return
        self._deliver(state, result, index)

    def _deliver(self, state: RequestState, result: StepResult, index: int) -> None:
        """Append a frame's tokens to a request that waits; C and PH do not move."""
        token_ids = delivered_tokens(result, index)
        num_verified = result.num_verified[index : index + 1]
        num_accepted = np.maximum(result.num_tokens[index : index + 1] - 1, 0)
        self.counters.count_acceptance(num_verified, num_accepted)
        state.num_draft_tokens += int(num_verified[0])
        state.num_accepted_tokens += int(num_accepted[0])
        if len(token_ids) == 0:
            return
        offset = state.num_outputs
        stop = state.first_stop(token_ids, offset)
        token_ids = token_ids[: stop[0]] if stop else token_ids
        state.token_ids = np.concatenate((state.token_ids, token_ids))
        state.num_tokens = len(state.token_ids)
        self.counters.tokens_salvaged += len(token_ids)
        self.counters.num_generation_tokens += len(token_ids)
        self._tell(state, f"{len(token_ids)} tokens delivered from a frame in flight")
        self._commands.append(
            EmitTokens(
                front_end=state.request.front_end,
                streams=np.array([state.request.stream], np.int64),
                attempts=np.array([state.request.attempt], np.int32),
                offsets=np.array([offset], np.int32),
                num_tokens=np.array([len(token_ids)], np.int32),
                token_ids=token_ids,
                logprobs=cut_logprobs(result, {index: (0, len(token_ids))}),
            )
        )
        if stop is not None:
            self._finish(state, stop[1], stop_token_id=stop[2])

    def _emit(self, worker: WorkerState, committed: Committed, result: StepResult) -> None:
        """One command per front end, as columns."""
        if len(committed.rows) == 0:
            return
        if len(self._front_ends) == 1:
            self._emit_to(0, worker, committed, result)
            return
        front_ends = worker.rows.front_end[committed.rows]
        for front_end in np.unique(front_ends).tolist():
            self._emit_to(front_end, worker, committed.take(front_ends == front_end), result)

    def _emit_to(self, front_end: int, worker: WorkerState, committed: Committed, result: StepResult) -> None:
        logprobs: tuple[RowLogprobs, ...] = ()
        if result.logprobs:
            kept = enumerate(committed.num_tokens.tolist())
            logprobs = cut_logprobs(result, dict(zip(committed.index.tolist(), kept, strict=True)))
        self._commands.append(
            EmitTokens(
                front_end=self._front_ends[front_end],
                streams=worker.rows.stream[committed.rows],
                attempts=worker.rows.attempt[committed.rows],
                offsets=committed.offsets,
                num_tokens=committed.num_tokens,
                token_ids=committed.token_ids,
                logprobs=logprobs,
            )
        )

    # ---- time ----

    def _on_tick(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        while self._deadlines and self._deadlines[0][0] <= self.now_ns:
            _, request_id, arrival = heappop(self._deadlines)
            state = self.requests.get(request_id)
            if state is not None and state.arrival == arrival:  # not another life of the id
                self._finish(state, FinishReason.DEADLINE)
        for worker in self.workers.values():
            if worker.drain_deadline_ns is not None and worker.drain_deadline_ns <= self.now_ns:
                self._drop_everything(worker, "drain")
            self._resend(worker)

    def _resend(self, worker: WorkerState) -> None:
        """Plans are kept until their result; an unanswered one is sent again, which is idempotent."""
        for seq, step in worker.in_flight.items():
            if seq not in worker.early_results and self.now_ns - step.sent_ns >= self.config.resend_after_ns:
                step.sent_ns = self.now_ns
                self.counters.num_resends += 1
                self._commands.append(StartStep(worker_id=worker.worker_id, plan=step.plan))

    # ---- planning ----

    def _plan_round(self) -> bool:
        """Give every worker with room in its pipeline one more step. False when there is nothing to plan."""
        ready = [w for w in self.workers.values() if len(w.in_flight) < self.config.max_steps_in_flight]
        if not ready:
            return False
        if self.waiting and self.config.scheduling_policy == "priority":
            self._preempt_for_priority(ready)
        builders = [self._begin_plan(worker) for worker in ready]
        if self.waiting:
            self._admit({builder.worker.worker_id: builder for builder in builders if not builder.closed})
        planned = False
        for builder in builders:
            if not builder.is_empty:
                plan = builder.seal(self.now_ns)
                self.counters.tokens_reserved += int(np.add.reduce(plan.reserved))
                self._commands.append(StartStep(worker_id=builder.worker.worker_id, plan=plan))
                planned = True
        return planned

    def _begin_plan(self, worker: WorkerState) -> PlanBuilder:
        builder = PlanBuilder(worker, self.config.max_num_batched_tokens)
        if worker.weights != self._weights:
            # Part of this plan, in step_seq order: bumped earlier, old KV would be published as new.
            self._drop_everything(worker, "swap")
            worker.pool.reset()
            worker.weights = builder.weights = self._weights
        if worker.rows.num_running:
            plan_running(builder, self._wanted(worker), self.config.block_size, self._preempt_for_blocks)
        return builder

    def _wanted(self, worker: WorkerState) -> Int32Array:
        """K for each running row: [num_running] int32."""
        rows = worker.rows.order()
        # Half the budget is for prompts, however many rows might draft.
        share = max(self.config.max_num_batched_tokens // (2 * len(rows)) - 1, ALWAYS_DRAFTS)
        most: Int32Array = np.minimum(worker.rows.max_drafts[rows], min(worker.up.max_drafts, share))
        if self._choose_drafts is None:
            return most
        chosen = self._choose_drafts(worker.worker_id, rows.astype(np.int32))
        return np.minimum(chosen, most).astype(np.int32, copy=False)

    def _preempt_for_blocks(self, state: RequestState) -> None:
        """Tokens in flight are right, so they are delivered; the request resumes when they have been."""
        self._preempt(state, FrameKind.DELIVER, "blocks")

    def _preempt_for_priority(self, ready: list[WorkerState]) -> None:
        """Make room for the head of the queue, if running requests of lower priority can give it."""
        head = self.waiting[0]
        holders = [worker for worker in self.workers.values() if could_hold(worker, head, self.config)]
        if head.num_deliver_frames or place(head, holders, self.config) is not None:
            return
        lower = [(worker, self._lower(worker, head)) for worker in ready if worker in holders]
        candidates = [(w, victims) for w, victims in lower if victims and fits_without(head, w, victims, self.config)]
        if not candidates:
            return
        worker, victims = max(candidates, key=lambda candidate: candidate[1][0].order_key)
        for victim in victims:
            if fits_now(head, worker, hit_blocks_of(head, worker, self.config), self.config):
                return
            self._preempt(victim, FrameKind.DELIVER, "priority")

    @staticmethod
    def _lower(worker: WorkerState, head: RequestState) -> list[RequestState]:
        """Running requests of lower priority than `head`, the lowest first."""
        states = [worker.rows.states[row] for row in reversed(worker.rows.order().tolist())]
        return [s for s in states if s is not None and s.request.priority > head.request.priority]

    def _admit(self, builders: dict[str, PlanBuilder]) -> None:
        """Seat waiting requests in order on the workers that are planning now."""
        open_workers = dict(self.workers)
        index = 0
        while index < len(self.waiting) and any(name in open_workers for name in builders):
            state = self.waiting[index]
            if self._drains(state):
                return  # nobody behind a request that waits for its own tokens
            index += not self._try_seat(state, index, builders, open_workers)

    @staticmethod
    def _drains(state: RequestState) -> bool:
        """A request resumes only after its deliver frames have settled."""
        return state.num_deliver_frames > 0

    def _try_seat(
        self, state: RequestState, index: int, builders: dict[str, PlanBuilder], open_workers: dict[str, WorkerState]
    ) -> bool:
        holders = [worker for worker in open_workers.values() if could_hold(worker, state, self.config)]
        if self._was_passed_by(state):
            holders = [worker for worker in holders if worker.worker_id in builders]
        placement = place(state, holders, self.config)
        if placement is None:
            for worker in holders:
                del open_workers[worker.worker_id]
            return False
        worker = placement.worker
        builder = builders.get(worker.worker_id)
        if builder is None or builder.budget <= 0:
            del open_workers[worker.worker_id]
            state.waits_since_epoch = state.waits_since_epoch or self._next_epoch
            return False
        self._unqueue_at(index)
        self._seat(state, placement.hit_blocks, builder)
        return True

    def _was_passed_by(self, state: RequestState) -> bool:
        """Whether many were seated while this one waited for a busy worker, perhaps silent: any other will do now."""
        return bool(state.waits_since_epoch) and self._next_epoch - state.waits_since_epoch > MAX_PASSED_BY

    def _seat(self, state: RequestState, hit: list[int], builder: PlanBuilder) -> None:
        worker = builder.worker
        self.counters.prefix_cache_queries += state.num_tokens
        self.counters.prefix_cache_hits += len(hit) * self.config.block_size
        if state.fingerprint is None or state.num_outputs == 0:
            state.fingerprint = worker.fingerprint
        elif state.fingerprint != worker.fingerprint:
            state.inexact = True
        epoch = self._next_epoch
        self._next_epoch += 1
        state.waits_since_epoch = 0
        self._shares.serve(state.order_key[1])
        seat(state, hit, builder, epoch=epoch, front_end=self._front_end_index(state), config=self.config)
        if isinstance(worker.pool, WatchedPool):
            worker.pool.tell_rows(worker.rows, [state.row])
        where = f"worker {worker.worker_id} session {worker.session} row {state.row}"
        self._tell(state, f"seated: {where} epoch {epoch}, {len(hit)} hit blocks, T={state.num_tokens}")

    def _front_end_index(self, state: RequestState) -> int:
        name = state.request.front_end
        if name not in self._front_ends:
            self._front_ends.append(name)
        return self._front_ends.index(name)

    # ---- telling ----

    def _tell(self, state: RequestState, line: str) -> None:
        state.story.append((self.now_ns, state.request.attempt, line))

    def _tell_frames(self, worker: WorkerState, step: Step, result: StepResult, live: NDArray[np.intp]) -> None:
        for index in live.tolist():
            row = int(step.plan.rows[index])
            state = worker.rows.states[row]
            assert state is not None
            planned = f"n={step.plan.num_scheduled[index]} K={step.plan.num_drafts[index]}"
            counters = f"T={worker.rows.num_tokens[row]} C={worker.rows.num_computed[row]}"
            self._tell(state, f"step {result.step_seq} {planned} -> {result.num_tokens[index]} tokens, {counters}")


NO_INDEX: NDArray[np.intp] = np.empty(0, np.intp)


def order_key(state: RequestState) -> tuple[int, int, int]:
    """Its `queue_key`."""
    return state.order_key


def answers(result: StepResult, step: Step) -> bool:
    """Whether a result has the shape its plan asks for: the same epochs, and as many tokens as it counts."""
    num_rows, num_tokens = len(step.rows), result.num_tokens
    return (
        len(result.epochs) == len(num_tokens) == len(result.num_verified) == num_rows
        and not np.count_nonzero(result.epochs != step.plan.epochs)
        and not np.count_nonzero(num_tokens < ZERO)
        and int(np.add.reduce(num_tokens)) == len(result.token_ids)
    )


def cut_logprobs(result: StepResult, where: dict[int, tuple[int, int]]) -> tuple[RowLogprobs, ...]:
    """Logprobs for the rows kept: plan index -> (index in the command, tokens kept)."""
    found = []
    for row in result.logprobs:
        if row.row_index in where:
            index, kept = where[row.row_index]
            found.append(
                RowLogprobs(
                    row_index=index,
                    logprobs=row.logprobs[:kept],
                    top_token_ids=row.top_token_ids[:kept],
                    top_logprobs=row.top_logprobs[:kept],
                )
            )
    return tuple(found)
