"""Counters of the core and the snapshot that status pages and metrics are made of."""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from scheduler.state import WorkerState
from scheduler.step import Int32Array

if TYPE_CHECKING:
    from scheduler.core import Scheduler


# Upper bounds of durations in seconds: three to a decade.
BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How often durations fell into each range: `counts[i]` are at most `bounds_s[i]`, the last beyond all."""

    bounds_s: tuple[float, ...] = BOUNDS_S
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0


class DurationCounter:
    """Counts durations while they happen."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float, times: int = 1) -> None:
        """One duration, so many times."""
        self._counts[bisect_left(BOUNDS_S, duration_s)] += times
        self._sum_s += duration_s * times

    def snapshot(self) -> Durations:
        """What was counted so far."""
        return Durations(counts=tuple(self._counts), sum_s=self._sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker session, now."""

    worker_id: str
    session: int
    num_running: int
    num_steps_in_flight: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    draining: bool
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of the core. Counters count from its start."""

    num_running: int
    num_waiting: int
    num_finished: dict[str, int]  # by FinishReason value
    num_rejected: int
    num_inexact: int
    workers: tuple[WorkerStats, ...]
    num_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    prefix_cache_queries: int  # tokens asked for
    prefix_cache_hits: int  # tokens found
    num_drafts: int  # frames that verified at least one draft
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    tokens_reserved: int  # by placeholders, ever
    tokens_rolled_back: int  # reserved for drafts that were rejected or never existed
    placeholders: int  # reserved now
    async_tokens_to_discard: int  # now
    stale_tokens_dropped: dict[str, int]  # tokens that arrived for nothing, by reason
    tokens_salvaged: int  # delivered from frames of an epoch already left
    num_stale_results: int  # whole results of no step in flight
    num_preemptions: dict[str, int]  # by reason
    num_resends: int
    mean_acceptance_length: float  # 1 + accepted / drafts; 1 without drafts
    worker_verify_ns: int
    worker_draft_ns: int
    worker_idle_ns: int
    garbage_kv_tokens: int  # KV of rejected drafts in the cache now
    step_time: Durations  # of a worker's steps: verify and draft
    idle_time: Durations  # between two steps of a worker
    queue_time: Durations = Durations()  # from submission to the first plan; the shell's, who has a clock
    notices: tuple[str, ...] = ()  # what an operator must know; the shell's too
    num_shed: int = 0  # refused by the shell: too much waits, or they would end past their deadline
    num_tasks: int = 0  # of the shell's event loop, now


@dataclass(slots=True, eq=False)
class Counters:
    """What the core counts while it runs."""

    num_finished: dict[str, int] = field(default_factory=dict)
    num_rejected: int = 0
    num_inexact: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=lambda: [0])
    tokens_reserved: int = 0
    tokens_rolled_back: int = 0
    stale_tokens_dropped: dict[str, int] = field(default_factory=dict)
    tokens_salvaged: int = 0
    num_stale_results: int = 0
    num_preemptions: dict[str, int] = field(default_factory=dict)
    num_resends: int = 0
    worker_verify_ns: int = 0
    worker_draft_ns: int = 0
    worker_idle_ns: int = 0
    step_time: DurationCounter = field(default_factory=DurationCounter)
    idle_time: DurationCounter = field(default_factory=DurationCounter)

    def count_acceptance(self, num_verified: Int32Array, num_accepted: Int32Array) -> bool:
        """Rows of a result: [n] int32 each. A row without drafts counts nowhere; False if there is no other."""
        num_drafts = int(np.count_nonzero(num_verified))
        if num_drafts == 0:
            return False
        self.num_drafts += num_drafts
        self.num_draft_tokens += int(np.add.reduce(num_verified))
        most = int(num_verified[num_verified.argmax()])
        histogram = np.bincount(num_accepted, minlength=most + 1).tolist()
        reached = [*accumulate(reversed(histogram))][-2::-1]  # position i was accepted if A > i
        self.num_accepted_tokens += sum(reached)
        self.accepted_per_pos += [0] * (len(reached) - len(self.accepted_per_pos))
        for position, times in enumerate(reached):
            self.accepted_per_pos[position] += times
        return True


def count_by(counter: dict[str, int], reason: str, amount: int = 1) -> None:
    """Add to one reason of a counter."""
    counter[reason] = counter.get(reason, 0) + amount


def snapshot(scheduler: "Scheduler") -> SchedulerStats:
    """All counters and gauges of a scheduler, now."""
    counters, workers = scheduler.counters, scheduler.workers.values()
    mean = 1 + counters.num_accepted_tokens / counters.num_drafts if counters.num_drafts else 1.0
    return SchedulerStats(
        num_running=sum(worker.rows.num_running for worker in workers),
        num_waiting=len(scheduler.waiting),
        num_finished=dict(counters.num_finished),
        num_rejected=counters.num_rejected,
        num_inexact=counters.num_inexact,
        workers=tuple(worker_snapshot(worker) for worker in workers),
        num_steps=counters.num_steps,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generation_tokens=counters.num_generation_tokens,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(counters.accepted_per_pos),
        tokens_reserved=counters.tokens_reserved,
        tokens_rolled_back=counters.tokens_rolled_back,
        placeholders=sum(int(worker.rows.num_placeholders[worker.rows.order()].sum()) for worker in workers),
        async_tokens_to_discard=sum(scheduler.discards.values()),
        stale_tokens_dropped=dict(counters.stale_tokens_dropped),
        tokens_salvaged=counters.tokens_salvaged,
        num_stale_results=counters.num_stale_results,
        num_preemptions=dict(counters.num_preemptions),
        num_resends=counters.num_resends,
        mean_acceptance_length=mean,
        worker_verify_ns=counters.worker_verify_ns,
        worker_draft_ns=counters.worker_draft_ns,
        worker_idle_ns=counters.worker_idle_ns,
        garbage_kv_tokens=sum(worker.rows.num_garbage_tokens() for worker in workers),
        step_time=counters.step_time.snapshot(),
        idle_time=counters.idle_time.snapshot(),
    )


def worker_snapshot(worker: WorkerState) -> WorkerStats:
    """One worker session, now."""
    return WorkerStats(
        worker_id=worker.worker_id,
        session=worker.session,
        num_running=worker.rows.num_running,
        num_steps_in_flight=len(worker.in_flight),
        num_blocks=worker.pool.num_blocks,
        num_free_blocks=worker.pool.num_free,
        num_cached_blocks=worker.pool.num_cached,
        draining=not worker.accepts,
        fingerprint=worker.fingerprint,
    )
