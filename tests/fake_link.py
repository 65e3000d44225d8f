"""A scheduler for tests of the edge: a toy behind the SchedulerLink protocol, stepped by the test or by itself.

Its tokens follow from prompt, outputs and seed alone, so a lost, repeated or misplaced token shows.
Deliveries can be lost or held back, and a life can end.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.frontend import Delivered, FrontEnd, SchedulerUnavailable
from scheduler.cache_feed import CacheFeed, CacheNews
from scheduler.events import EmitTokens, FinishRequest, RejectRequest
from scheduler.request import FinishReason, RejectCode, Request
from scheduler.step import RowLogprobs

VOCAB_SIZE = 315  # of the tiny tokenizer
FIRST_PLAIN_ID = 3  # below are special tokens


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """The one token that follows."""
    state = seed & 0xFFFFFFFF
    for token_id in token_ids[-8:]:
        state = (state * 1_000_003 + token_id + 1) & 0xFFFFFFFF
    state ^= len(token_ids) * 0x9E3779B1
    return FIRST_PLAIN_ID + (state >> 7) % (VOCAB_SIZE - FIRST_PLAIN_ID)


def expected_tokens(prompt: Sequence[int], seed: int, max_tokens: int) -> list[int]:
    """An undisturbed run without stops."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


@dataclass(slots=True, eq=False)
class Live:
    """One live request."""

    request: Request
    token_ids: list[int]  # prompt + outputs
    deadline_s: float | None
    runs: Iterator[int] = field(default_factory=lambda: itertools.cycle((1, 3, 2)))

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)


class FakeLink:
    """The SchedulerLink of a toy scheduler. `script` replaces the outputs of every request."""

    def __init__(self, *, max_live: int = 64, script: Sequence[int] | None = None) -> None:
        self.front_end: FrontEnd | None = None
        self.life = 1
        self.available = True
        self.reachable = asyncio.Event()  # while it is not set, submissions are under way
        self.reachable.set()
        self.submitted: list[Request] = []
        self.cancelled: list[tuple[str, int]] = []
        self.preempted: list[str] = []
        self.resets: list[bool] = []
        self.swaps: list[str] = []
        self.feed = CacheFeed(1000, is_partial=False)
        self.live: dict[str, Live] = {}
        self.stall_at: int | None = None  # outputs after which requests get no more
        self.lose: set[int] = set()  # deliveries that never arrive
        self.held: list[tuple[int, list[Delivered]]] | None = None  # deliveries kept back while not None
        self._script = None if script is None else list(script)
        self._max_live = max_live
        self.next_seq = 0
        self._sent: list[list[Delivered]] = []  # in this life

    # ---- the SchedulerLink protocol ----

    async def swap_weights(self, directory: str) -> None:
        """Knows one checkpoint."""
        if directory != "/models/other":
            raise ValueError(f"{directory}: has no config.json")
        self.swaps.append(directory)

    async def story(self, request_id: str) -> str:
        """Short."""
        return f"{request_id}: never heard of it"

    async def submit(self, request: Request, timeout_s: float | None) -> None:
        await self.reachable.wait()
        if not self.available:
            raise SchedulerUnavailable("the scheduler is away")
        self.submitted.append(request)
        live = self.live.get(request.request_id)
        if live is not None and request.attempt <= live.request.attempt:
            self._reject(request, RejectCode.ALREADY_EXISTS, f"request_id {request.request_id!r} is alive")
        elif live is None and len(self.live) >= self._max_live:
            self._reject(request, RejectCode.RESOURCE_EXHAUSTED, "the queue is full", retry_after_ms=1500)
        else:
            now_s = asyncio.get_running_loop().time()
            token_ids = [*request.prompt_token_ids.tolist(), *request.resume_token_ids.tolist()]
            self.live[request.request_id] = Live(request, token_ids, None if timeout_s is None else now_s + timeout_s)

    async def cancel(self, request_id: str, attempt: int) -> None:
        self.cancelled.append((request_id, attempt))
        live = self.live.get(request_id)
        if live is not None and attempt >= live.request.attempt:
            self.send([self._finish(live, FinishReason.ABORT)])

    async def reset_prefix_cache(self, reset_running: bool) -> None:
        self.resets.append(reset_running)

    async def preempt(self, request_id: str) -> None:
        self.preempted.append(request_id)

    async def view(self, after: int, frames: bool) -> dict[str, Any]:
        if not self.available:
            raise SchedulerUnavailable("the scheduler is away")
        trail = {"number": after, "steps": [], "messages": [], "ended": []}
        return {"life": "1", "now_ns": 0, "block_size": 16, "workers": [], "requests": [], "trail": trail}

    async def cache_changes(self, after: int | None) -> CacheNews | None:
        if not self.available:
            raise SchedulerUnavailable("the scheduler is away")
        if after == self.feed.seq:
            await asyncio.sleep(0.005)
        return self.feed.snapshot() if after is None else self.feed.since(after)

    async def recording(self) -> bytes:
        raise ValueError("no events are recorded")

    async def stats(self) -> dict[str, object]:
        if not self.available:
            raise SchedulerUnavailable("the scheduler is away")
        worker = {"worker_id": "w0", "session": 1 << 60, "num_blocks": 100, "num_free_blocks": 75}
        return {"num_running": len(self.live), "num_waiting": 0, "workers": (worker,), "num_generation_tokens": 7}

    # ---- for tests ----

    def step(self) -> None:
        """Every live request gets its next run of tokens, in one delivery."""
        now_s = asyncio.get_running_loop().time()
        commands: list[Delivered] = []
        for live in list(self.live.values()):
            if live.deadline_s is not None and now_s >= live.deadline_s:
                commands.append(self._finish(live, FinishReason.DEADLINE))
            elif self.stall_at is None or live.num_outputs < self.stall_at:
                commands.extend(self._run(live, next(live.runs)))
        if commands:
            self.send(commands)

    async def run(self) -> None:
        """Steps for ever, as fast as others let it."""
        while True:
            await asyncio.sleep(0.0005)
            self.step()

    def restart(self) -> None:
        """A new life that knows nothing."""
        self.life += 1
        self.next_seq = 0
        self._sent.clear()
        self.lose.clear()
        self.live.clear()
        self.held = None
        self.available = True

    def release_reversed(self) -> None:
        """What was held back arrives, last first."""
        held, self.held = self.held or [], None
        for seq, commands in reversed(held):
            self._arrive(seq, commands)

    def deliver_again(self, seq: int) -> None:
        """A delivery of this life arrives once more, or for the first time though it was lost."""
        if seq < len(self._sent):
            self._arrive(seq, self._sent[seq])

    def _run(self, live: Live, count: int) -> list[Delivered]:
        request, sampling = live.request, live.request.sampling
        offset = live.num_outputs
        run: list[int] = []
        reason, stop_token_id = None, None
        while reason is None and len(run) < count:
            outputs = live.num_outputs
            if outputs >= request.max_tokens:  # resumed with everything
                reason = FinishReason.LENGTH
                break
            token_id = self._script[outputs] if self._script is not None else next_token(live.token_ids, sampling.seed)
            live.token_ids.append(token_id)
            run.append(token_id)
            if outputs >= sampling.min_tokens and token_id in sampling.eos_token_ids:
                reason = FinishReason.STOP
            elif outputs >= sampling.min_tokens and token_id in sampling.stop_token_ids:
                reason, stop_token_id = FinishReason.STOP, token_id
            elif outputs + 1 >= request.max_tokens:
                reason = FinishReason.LENGTH
        commands: list[Delivered] = [emit(request, offset, run)] if run else []
        if reason is not None:
            commands.append(self._finish(live, reason, stop_token_id))
        return commands

    def _finish(self, live: Live, reason: FinishReason, stop_token_id: int | None = None) -> FinishRequest:
        request = live.request
        del self.live[request.request_id]
        return FinishRequest(
            front_end=request.front_end,
            stream=request.stream,
            request_id=request.request_id,
            attempt=request.attempt,
            reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=live.num_outputs,
            num_cached_tokens=16,
            num_draft_tokens=9,
            num_accepted_tokens=5,
        )

    def _reject(self, request: Request, code: RejectCode, message: str, retry_after_ms: int | None = None) -> None:
        rejection = RejectRequest(
            front_end=request.front_end,
            stream=request.stream,
            request_id=request.request_id,
            attempt=request.attempt,
            code=code,
            message=message,
            retry_after_ms=retry_after_ms,
        )
        self.send([rejection])

    def send(self, commands: list[Delivered]) -> None:
        """The next delivery of this life."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self._sent.append(commands)
        if self.held is not None:
            self.held.append((seq, commands))
        elif seq not in self.lose:
            self._arrive(seq, commands)

    def _arrive(self, seq: int, commands: list[Delivered]) -> None:
        assert self.front_end is not None
        self.front_end.deliver(seq, commands, self.life)


def emit(request: Request, offset: int, token_ids: Sequence[int]) -> EmitTokens:
    """One row of tokens; the logprob of a token is minus its id / 1000."""
    logprobs: tuple[RowLogprobs, ...] = ()
    num_top = request.sampling.num_logprobs
    if num_top is not None:
        ids = np.asarray(token_ids, np.int32)
        values = (-ids / 1000).astype(np.float32)
        top_ids = np.repeat(ids[:, None], num_top, axis=1)
        top_values = np.repeat(values[:, None], num_top, axis=1)
        row = RowLogprobs(row_index=0, logprobs=values, top_token_ids=top_ids, top_logprobs=top_values)
        logprobs = (row,)
    return EmitTokens(
        front_end=request.front_end,
        streams=np.array([request.stream], np.int64),
        attempts=np.array([request.attempt], np.int32),
        offsets=np.array([offset], np.int32),
        num_tokens=np.array([len(token_ids)], np.int32),
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=logprobs,
    )
