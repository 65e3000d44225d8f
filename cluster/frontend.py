"""The front end: holds the open streams, submits them, and lets through each token once, in order.

Knows nothing about Ray, gRPC or protobuf. The scheduler is reached through an injected link and
answers by `deliver`; whatever is lost, late, repeated or restarted on that way is repaired here by
submitting the request again, as a higher attempt that resumes from the tokens taken so far.
"""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Protocol

from cluster.call import Call, StreamError, TextRequest, choice_seed
from cluster.choice import Choice, Output, Taken
from cluster.clock_offset import ClockOffset
from cluster.deliveries import InOrder
from cluster.in_turn import InTurn
from cluster.latency import Latency
from cluster.text import Detokenizer, OutputText, Tokenizer
from scheduler.cache_feed import CacheNews
from scheduler.events import EmitTokens, FinishRequest, RejectRequest, Seated
from scheduler.request import FinishReason, Request

Delivered = EmitTokens | FinishRequest | RejectRequest | Seated

MAX_RESUBMISSIONS = 1 << 10  # per client attempt: their numbers are laid out between two of the client's
GAP_TIMEOUT_S = 2.0  # a delivery overtaken for so long is lost
CLOSE_TIMEOUT_S = 1.0  # for readers to take note of the end, and for last words to the scheduler
MAX_DELIVERIES = 4096
COUNTS_TIMEOUT_S = 1.0  # a stream ended by a stop string waits so long for the scheduler's counts


class SchedulerLink(Protocol):
    """The way to the scheduler."""

    async def submit(self, request: Request, timeout_s: float | None) -> None:
        """Returns once the scheduler has the request. Raises SchedulerUnavailable if it may not.

        The link turns the timeout into a deadline on the scheduler's clock.
        """
        ...

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Ends this attempt or an older one; unknown ids are fine."""
        ...

    async def reset_prefix_cache(self, reset_running: bool) -> None:
        """Empties the prefix cache, with `reset_running` the KV of running requests too."""
        ...

    async def preempt(self, request_id: str) -> None:
        """Takes a running request off its worker; unknown ids are fine."""
        ...

    async def stats(self) -> dict[str, object]:
        """The scheduler's counters, as plain values."""
        ...

    async def view(self, after: int, frames: bool) -> dict[str, Any]:
        """What a live page draws of the scheduler, as plain values."""
        ...

    async def recording(self) -> bytes:
        """The scheduler's log. Raises ValueError if it keeps none."""
        ...

    async def cache_changes(self, after: int | None) -> CacheNews | None:
        """What the prefix caches gained and lost after a number; without one a snapshot. None: it is too old."""
        ...

    async def swap_weights(self, directory: str) -> None:
        """Goes on with the weights of another checkpoint. Raises ValueError if a worker cannot load them."""
        ...

    async def story(self, request_id: str) -> str:
        """One request's history."""
        ...


class RequestObserver(Protocol):
    """Told of each request's life in this front end, at once and on its loop: it must not block."""

    def rejected(self, request_id: str, error: StreamError | ValueError) -> None:
        """It was not taken."""
        ...

    def opened(self, call: Call) -> None:
        """It was taken."""
        ...

    def first_token(self, call: Call, choice: Choice, now_s: float) -> None:
        """Of one choice."""
        ...

    def resubmitted(self, call: Call, choice: Choice) -> None:
        """Something was lost: it goes on as another attempt."""
        ...

    def closed(self, call: Call, now_s: float) -> None:
        """It is over, for its reader too."""
        ...


class SchedulerUnavailable(ConnectionError):
    """The scheduler cannot be reached now. Open streams wait until it comes back or is given up."""


class FrontEnd:
    """The streams of one front end. Everything runs on one event loop."""

    def __init__(
        self,
        link: SchedulerLink,
        *,
        name: str = "front",
        tokenizer: Tokenizer | None = None,
        gap_timeout_s: float = GAP_TIMEOUT_S,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        """draw_seed: unsigned 64 bit, for requests that bring none."""
        self.name = name
        self.observers = observers
        self._link = link
        self._tokenizer = tokenizer
        self._gap_timeout_s = gap_timeout_s
        self._draw_seed = draw_seed
        self._life: int | None = None
        self._lost: str | None = None  # why there is no scheduler any more
        self._ended_lives: set[int] = set()
        self._in_order: InOrder[Sequence[Delivered]] = InOrder()
        self._gap_timer: asyncio.TimerHandle | None = None
        self._calls: dict[str, Call] = {}  # by request id
        self._open: dict[int, tuple[Call, Choice]] = {}  # by stream number of the attempt subscribed to
        self._turns = InTurn()  # by request id of the scheduler
        self._call_closed = asyncio.Event()
        # Never used by an earlier process of this name, whose tokens may still be on their way.
        self._next_stream = secrets.randbits(62)
        self._num_started = 0
        self._num_resubmissions = 0
        self._num_stale_tokens = 0
        self.latency = Latency()
        self.num_cache_subscribers = self.num_cache_subscribers_lost = 0  # lost: they must begin anew
        self._clock = ClockOffset()
        # The latest to arrive: when, and CONNECTION/SEQ.
        self._deliveries: deque[tuple[int, str]] = deque(maxlen=MAX_DELIVERIES)

    # ---- for the services ----

    def open(self, request: TextRequest, *, traceparent: str | None = None) -> Call:
        """Submits a request. Raises StreamError: ALREADY_EXISTS when its id is open here, or UNAVAILABLE.

        traceparent: the client's span, as W3C writes it.
        """
        if self._lost is not None:
            raise StreamError("UNAVAILABLE", self._lost)
        self._make_room(request)
        seed = request.seed if request.seed is not None else self._draw_seed()
        now_s = asyncio.get_running_loop().time()
        deadline_s = None if request.timeout_s is None else now_s + request.timeout_s
        call = Call(request, seed, deadline_s, opened_s=now_s, traceparent=traceparent)
        self._calls[request.request_id] = call
        self._num_started += 1
        for observer in self.observers:
            observer.opened(call)
        for index in range(request.n):
            choice = Choice(self._choice_request(call, index), index=index, text=self._output_text(request))
            call.choices.append(choice)
            if choice.stopped:  # the tokens it resumes from already end it
                choice.end_here(FinishReason.STOP)
                call.ready.set()
            else:
                self._open[choice.request.stream] = call, choice
                self._submit(call, choice)
        return call

    async def outputs(self, call: Call) -> AsyncGenerator[Output, None]:
        """What becomes ready, one message per choice and wake-up, until every choice is closed.

        Raises StreamError. Leaving early cancels the request in the scheduler.
        """
        try:
            while not all(choice.closed for choice in call.choices):
                await call.ready.wait()
                call.ready.clear()
                for choice in call.choices:
                    output = choice.read()
                    if output is not None:
                        yield output
                if call.error is not None:
                    raise call.error
        finally:
            self._close(call)

    async def cancel(self, request_id: str) -> bool:
        """Ends an open request with the reason "abort", here and in the scheduler; False if it is not open."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        cancels = [self._cancel(choice) for choice in self._unfinished(call)]
        for choice in self._unfinished(call):
            self._open.pop(choice.request.stream, None)
            choice.end_here()
        call.ready.set()
        await asyncio.gather(*map(asyncio.shield, cancels))
        return True

    async def preempt(self, request_id: str) -> None:
        """Takes a request off its worker, all its choices; unknown ids are fine."""
        call = self._calls.get(request_id)
        names = [choice.request.request_id for choice in self._unfinished(call)] if call else [request_id]
        await asyncio.gather(*map(self._link.preempt, names))

    async def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Empties the scheduler's prefix cache."""
        await self._link.reset_prefix_cache(reset_running)

    async def recording(self) -> bytes:
        """The scheduler's log. Raises ConnectionError when it cannot be reached, ValueError if it keeps none."""
        return await self._link.recording()

    async def cache_changes(self, after: int | None) -> CacheNews | None:
        """What the prefix caches gained and lost after a number, once there is something, or soon nothing.

        Without a number a snapshot. None: the number is too old. Raises ConnectionError.
        """
        return await self._link.cache_changes(after)

    async def swap_weights(self, directory: str) -> None:
        """Goes on with the weights of another checkpoint. Raises ConnectionError, or ValueError if it cannot."""
        await self._link.swap_weights(directory)

    async def story(self, request_id: str) -> str:
        """The scheduler's history of a request. Raises ConnectionError when it cannot be reached."""
        return await self._link.story(request_id)

    async def scheduler_stats(self) -> dict[str, object]:
        """The scheduler's counters. Raises ConnectionError when it cannot be reached."""
        return await self._link.stats()

    async def view(self, after: int, *, frames: bool = False) -> dict[str, Any]:
        """What a live page draws: scheduler, steps that changed since `after`, and what clients here experience.

        Raises ConnectionError when the scheduler cannot be reached.
        """
        stats = await self._link.stats()
        asked_ns = time.monotonic_ns()
        view = await self._link.view(after, frames)
        answered_ns = time.monotonic_ns()
        self._clock.heard(view["life"], asked_ns, int(view["now_ns"]), answered_ns)
        latency = self.latency
        return view | {
            "scheduler": stats,
            "front_end": self.stats(),
            "clock": asdict(self._clock),
            "deliveries": list(self._deliveries) if frames else [],
            "time_to_first_token": asdict(latency.first_token.snapshot()),
            "inter_token_latency": asdict(latency.inter_token.snapshot()),
        }

    @property
    def num_open_requests(self) -> int:
        """Requests whose stream has not ended."""
        return len(self._calls)

    def num_open_choices(self, tenant: str, *, other_than: str) -> int:
        """Choices of a tenant's open requests, but for one request."""
        calls = (call for name, call in self._calls.items() if name != other_than)
        return sum(call.request.n for call in calls if call.request.tenant == tenant)

    @property
    def num_resubmissions(self) -> int:
        """Attempts submitted after a loss."""
        return self._num_resubmissions

    def stats(self) -> dict[str, object]:
        """This front end's own counters."""
        return {
            "name": self.name,
            "process_id": os.getpid(),
            "num_open_requests": self.num_open_requests,
            "num_requests": self._num_started,
            "num_resubmissions": self._num_resubmissions,
            "num_stale_tokens": self._num_stale_tokens,
            "num_cache_subscribers": self.num_cache_subscribers,
            "num_tasks": len(asyncio.all_tasks()),
        }

    async def drained(self) -> None:
        """Returns when no stream is open."""
        while self._calls:
            self._call_closed.clear()
            await self._call_closed.wait()

    async def close(self) -> None:
        """Fails every open stream and waits a little for readers and for last words to the scheduler."""
        self.scheduler_lost("the front end is shutting down")
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.drained()
                await self._turns.done()

    # ---- for the scheduler's side ----

    def deliver(self, seq: int, commands: Sequence[Delivered], life: int = 0) -> None:
        """Commands for this front end: the `seq`-th delivery of this scheduler life, in any order.

        A connection made anew within one life of the scheduler counts as a life of its own.
        """
        if life in self._ended_lives:
            return
        if self._life is None:
            self._life = life
        elif life != self._life:
            self.scheduler_restarted(life)
        self._deliveries.append((time.monotonic_ns(), f"{life}/{seq}"))
        for delivery in self._in_order.accept(seq, commands):
            self._apply(delivery)
        self._watch_gap()

    def scheduler_restarted(self, life: int) -> None:
        """A new scheduler knows nothing: every open stream is submitted again, once per life."""
        self._lost = None
        if life == self._life or life in self._ended_lives:
            return
        if self._life is not None:
            self._ended_lives.add(self._life)
        self._life = life
        self._in_order = InOrder()
        self._resubmit_all()

    def scheduler_lost(self, message: str) -> None:
        """There is no hope for the scheduler: open streams end with UNAVAILABLE, and new ones are refused."""
        self._lost = message
        self.fail_open(message)

    def fail_open(self, message: str) -> None:
        """Ends every open stream with UNAVAILABLE; clients may resume at once."""
        for call in self._calls.values():
            call.fail(StreamError("UNAVAILABLE", message))

    # ---- commands ----

    def _apply(self, commands: Iterable[Delivered]) -> None:
        for command in commands:
            match command:
                case EmitTokens():
                    self._on_emit_tokens(command)
                case FinishRequest():
                    self._on_finish(command)
                case RejectRequest():
                    self._on_reject(command)
                case Seated():
                    self._on_seated(command)

    def _on_emit_tokens(self, command: EmitTokens) -> None:
        logprobs = {row.row_index: row for row in command.logprobs}
        token_ids = command.token_ids.tolist()
        now_s = asyncio.get_running_loop().time()
        start = 0
        rows = zip(
            command.streams.tolist(),
            command.attempts.tolist(),
            command.offsets.tolist(),
            command.num_tokens.tolist(),
            strict=True,
        )
        for row, (stream, attempt, offset, count) in enumerate(rows):
            run, start = token_ids[start : start + count], start + count
            call, choice = self._subscribed(stream, attempt) or (None, None)
            if call is None or choice is None or choice.stopped:
                self._num_stale_tokens += count
                continue
            num_before = choice.num_tokens
            taken = choice.take(offset, run, logprobs.get(row))
            if choice.num_tokens > num_before:
                for observer in self.observers if choice.last_token_s is None else ():
                    observer.first_token(call, choice, now_s)
                self.latency.took(call, choice, choice.num_tokens - num_before, now_s)
            match taken:
                case Taken.NEW:
                    call.ready.set()
                case Taken.GAP:
                    self._resubmit(call, choice)
                case Taken.STOPPED:
                    self._stop(call, choice)
                case Taken.NOTHING_NEW:
                    self._num_stale_tokens += count

    def _on_finish(self, command: FinishRequest) -> None:
        call, choice = self._subscribed(command.stream, command.attempt) or (None, None)
        if call is None or choice is None:
            return
        if command.num_output_tokens > choice.num_tokens and not choice.stopped:
            self._resubmit(call, choice)  # tokens before this end were lost
            return
        del self._open[command.stream]
        if command.reason is FinishReason.ERROR and not choice.stopped:
            call.fail(StreamError("INTERNAL", command.message or "the request failed"))
        elif command.reason is FinishReason.DEADLINE and not choice.stopped:
            call.fail(StreamError("DEADLINE_EXCEEDED", "the deadline passed"))
        else:
            choice.end(command)
            call.ready.set()

    def _on_reject(self, command: RejectRequest) -> None:
        call, choice = self._subscribed(command.stream, command.attempt) or (None, None)
        if call is None or choice is None:
            return
        del self._open[command.stream]
        call.fail(StreamError(command.code.value, command.message, command.retry_after_ms))

    def _on_seated(self, command: Seated) -> None:
        subscribed = self._subscribed(command.stream, command.attempt)
        if subscribed is not None:
            subscribed[1].seated(command.fingerprint, asyncio.get_running_loop().time())

    def _subscribed(self, stream: int, attempt: int) -> tuple[Call, Choice] | None:
        found = self._open.get(stream)
        return found if found is not None and found[1].request.attempt == attempt else None

    def _stop(self, call: Call, choice: Choice) -> None:
        """A stop string: the scheduler is told, and its answer brings the counts of the last message."""
        self._cancel(choice)
        call.ready.set()
        loop = asyncio.get_running_loop()
        loop.call_later(COUNTS_TIMEOUT_S, self._stop_without_counts, call, choice)

    def _stop_without_counts(self, call: Call, choice: Choice) -> None:
        if choice.finish is None:
            self._open.pop(choice.request.stream, None)
            choice.end_here(FinishReason.STOP)
            call.ready.set()

    # ---- repair ----

    def _watch_gap(self) -> None:
        if not self._in_order.waits:
            if self._gap_timer is not None:
                self._gap_timer.cancel()
            self._gap_timer = None
        elif self._gap_timer is None:
            loop = asyncio.get_running_loop()
            self._gap_timer = loop.call_later(self._gap_timeout_s, self._skip_gap)

    def _skip_gap(self) -> None:
        """A delivery is lost for good, and with it tokens or ends of any stream."""
        self._gap_timer = None
        for delivery in self._in_order.skip_gap():
            self._apply(delivery)
        self._resubmit_all()
        self._watch_gap()

    def _resubmit_all(self) -> None:
        for call, choice in list(self._open.values()):
            if choice.stopped:
                self._stop_without_counts(call, choice)
            else:
                self._resubmit(call, choice)

    def _resubmit(self, call: Call, choice: Choice) -> None:
        del self._open[choice.request.stream]
        if choice.num_resubmissions + 1 >= MAX_RESUBMISSIONS:
            call.fail(StreamError("UNAVAILABLE", f"tokens were lost {MAX_RESUBMISSIONS} times"))
            return
        self._num_resubmissions += 1
        for observer in self.observers:
            observer.resubmitted(call, choice)
        request = choice.next_attempt(self._new_stream())
        self._open[request.stream] = call, choice
        self._submit(call, choice)

    # ---- what is said to the scheduler: calls may overtake each other, so about one request they take turns ----

    def _submit(self, call: Call, choice: Choice) -> None:
        request = choice.request

        async def submit() -> None:
            timeout_s = None
            if call.deadline_s is not None:
                timeout_s = call.deadline_s - asyncio.get_running_loop().time()
                if timeout_s <= 0:
                    call.fail(StreamError("DEADLINE_EXCEEDED", "the deadline passed"))
                    return
            try:
                await self._link.submit(request, timeout_s)
            except SchedulerUnavailable:
                pass  # the stream waits for scheduler_restarted or scheduler_lost
            except Exception as error:
                call.fail(StreamError("UNAVAILABLE", f"the scheduler did not take the request: {error}"))

        self._turns.take(request.request_id, submit)

    def _cancel(self, choice: Choice) -> asyncio.Task[None]:
        request = choice.request

        async def cancel() -> None:
            with suppress(ConnectionError):  # a scheduler that is gone has forgotten the request too
                await self._link.cancel(request.request_id, request.attempt)

        return self._turns.take(request.request_id, cancel)

    # ---- opening and closing ----

    def _make_room(self, request: TextRequest) -> None:
        old = self._calls.get(request.request_id)
        if old is None:
            return
        if request.attempt <= old.request.attempt:
            raise StreamError("ALREADY_EXISTS", f"request_id {request.request_id!r} is alive")
        for choice in self._unfinished(old):
            self._open.pop(choice.request.stream, None)
        old.fail(StreamError("ABORTED", f"attempt {request.attempt} of request_id {request.request_id!r} took over"))

    def _close(self, call: Call) -> None:
        for choice in self._unfinished(call):
            # An attempt that is no longer subscribed to ended by itself or was replaced.
            if self._open.pop(choice.request.stream, None) is not None and not choice.stopped:
                self._cancel(choice)
        if self._calls.get(call.request.request_id) is call:
            del self._calls[call.request.request_id]
        now_s = asyncio.get_running_loop().time()
        self.latency.closed(call, now_s)
        for observer in self.observers:
            observer.closed(call, now_s)
        self._call_closed.set()

    @staticmethod
    def _unfinished(call: Call) -> Iterator[Choice]:
        return (choice for choice in call.choices if choice.finish is None)

    def _choice_request(self, call: Call, index: int) -> Request:
        request = call.request
        alone = request.n == 1
        return Request(
            request_id=request.request_id if alone else f"{request.request_id}#{index}",
            attempt=request.attempt * MAX_RESUBMISSIONS,
            front_end=self.name,
            stream=self._new_stream(),
            prompt_token_ids=request.prompt_token_ids,
            resume_token_ids=request.resume_token_ids,
            fingerprint=request.resume_fingerprint,
            max_tokens=request.max_tokens,
            sampling=replace(request.sampling, seed=choice_seed(call.seed, index, request.n)),
            max_drafts=request.max_drafts,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
        )

    def _output_text(self, request: TextRequest) -> OutputText | None:
        if self._tokenizer is None or not (request.with_text or request.stop):
            return None
        sampling = request.sampling
        detokenizer = Detokenizer(
            self._tokenizer,
            prompt_token_ids=request.prompt_token_ids[-8:].tolist(),
            skip_special_tokens=request.skip_special_tokens,
        )
        return OutputText(
            detokenizer,
            stop=request.stop,
            include_stop_str=request.include_stop_str,
            min_tokens=sampling.min_tokens,
            hidden_token_ids=() if request.include_stop_str else sampling.eos_token_ids + sampling.stop_token_ids,
        )

    def _new_stream(self) -> int:
        self._next_stream += 1
        return self._next_stream
