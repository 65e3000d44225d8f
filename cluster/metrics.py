"""What Prometheus is told: the scheduler's counters and what clients experience, under the field's names.

Made anew for every scrape from snapshots; nothing is counted here. Labels have few values, all of
them ours: reasons, status names, positions of drafts, worker ids. Never a tenant, a request or a text.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from cluster.frontend import FrontEnd
from cluster.guard import Guard
from scheduler.stats import Durations

if TYPE_CHECKING:
    from cluster.spans import Spans

PREFIX = "slipstream_"
STATS_TIMEOUT_S = 2.0

# Field of SchedulerStats -> (name, help)
SCHEDULER_GAUGES = {
    "num_running": ("num_requests_running", "Requests that hold KV on a worker."),
    "num_waiting": ("num_requests_waiting", "Requests in the queue."),
    "placeholders": ("kv_placeholder_tokens", "Tokens reserved now by steps in flight, before they exist."),
    "garbage_kv_tokens": ("kv_garbage_tokens", "KV of rejected drafts resident now, until it is overwritten."),
    "async_tokens_to_discard": ("kv_tokens_to_discard", "Reserved tokens of frames in flight that will be dropped."),
}
SCHEDULER_COUNTERS = {
    "num_steps": ("steps", "Steps whose result was applied."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests taken."),
    "num_generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "num_drafts": ("spec_decode_num_drafts", "Frames that verified at least one draft."),
    "num_draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "tokens_reserved": ("kv_placeholder_tokens_reserved", "Tokens ever reserved by steps before they existed."),
    "tokens_rolled_back": ("kv_placeholder_tokens_rolled_back", "Reserved tokens whose drafts were not accepted."),
    "tokens_salvaged": ("stale_tokens_salvaged", "Tokens delivered from frames of preempted requests."),
    "num_stale_results": ("stale_results", "Results of steps that were no longer in flight."),
    "num_resends": ("plans_resent", "Plans sent again because no result came."),
    "num_rejected": ("requests_rejected", "Requests the scheduler did not take."),
    "num_shed": ("requests_shed", "Requests refused because too much waits, or they would miss their deadline."),
    "num_inexact": ("requests_inexact", "Requests resumed on a worker whose numbers differ."),
}
SCHEDULER_COUNTERS_BY_REASON = {
    "num_preemptions": ("num_preemptions", "Requests taken off a worker."),
    "stale_tokens_dropped": ("stale_tokens_dropped", "Tokens that arrived for nothing."),
}
SCHEDULER_HISTOGRAMS = {
    "step_time": ("step_time_seconds", "A worker's step: verifying and drafting."),
    "idle_time": ("step_idle_time_seconds", "A worker's gap between two steps."),
    "queue_time": ("request_queue_time_seconds", "From a request's submission to its first plan."),
}
WORKER_SECONDS = {
    "worker_verify_ns": ("worker_verify_seconds", "Workers' time in the target model and sampling."),
    "worker_draft_ns": ("worker_draft_seconds", "Workers' time in drafting."),
    "worker_idle_ns": ("worker_idle_seconds", "Workers' time between steps."),
}
WORKER_GAUGES = {
    "num_running": ("worker_requests_running", "Requests that hold KV on this worker."),
    "num_steps_in_flight": ("worker_steps_in_flight", "Steps sent to this worker and not answered."),
    "num_blocks": ("worker_kv_blocks", "KV blocks."),
    "num_free_blocks": ("worker_kv_blocks_free", "KV blocks that can be taken, cached ones included."),
    "num_cached_blocks": ("worker_kv_blocks_cached", "KV blocks that the prefix cache can find."),
}


class Metrics:
    """The page of one front end, with or without the scheduler's part."""

    def __init__(self, front_end: FrontEnd, guard: Guard | None = None, spans: "Spans | None" = None) -> None:
        self._front_end, self._guard, self._spans = front_end, guard, spans

    async def page(self, accept: str = "", *, with_scheduler: bool = True) -> tuple[bytes, str]:
        """The page and its content type, as a scraper's Accept header wants it."""
        families = list(self._of_front_end())
        if with_scheduler:
            families += await self._of_scheduler()
        encode, content_type = choose_encoder(accept)
        return encode(_Collected(families)), content_type

    def _of_front_end(self) -> Iterator[Metric]:
        front_end, latency = self._front_end, self._front_end.latency
        yield _gauge("open_requests", "Requests whose stream is open here.", front_end.num_open_requests)
        yield _counter("resubmissions", "Streams submitted again after a loss.", front_end.num_resubmissions)
        yield _counter_by("request_success", "Choices that ended.", "finished_reason", latency.num_finished)
        yield _counter_by("request_failures", "Requests that ended with an error.", "code", latency.num_failed)
        yield _gauge("kv_event_subscribers", "Subscribers to KV events.", front_end.num_cache_subscribers)
        lost = front_end.num_cache_subscribers_lost
        yield _counter("kv_event_subscribers_lost", "Subscribers to KV events that must begin anew.", lost)
        refused = self._guard.num_refused if self._guard is not None else {}
        yield _counter_by("refused_calls", "Calls refused before a service saw them.", "code", refused)
        if self._spans is not None:
            yield _counter("trace_spans_dropped", "Spans of requests that were not exported.", self._spans.num_dropped)
        first, between, whole = (c.snapshot() for c in (latency.first_token, latency.inter_token, latency.whole))
        yield _histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", first)
        yield _histogram("inter_token_latency_seconds", "Between tokens; a run shares its gap evenly.", between)
        yield _histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", whole)

    async def _of_scheduler(self) -> list[Metric]:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await self._front_end.scheduler_stats()
        except (ConnectionError, TimeoutError):
            return [_gauge("scheduler_up", "Whether the scheduler answers.", 0)]
        return [_gauge("scheduler_up", "Whether the scheduler answers.", 1), *_scheduler_families(stats)]


class _Collected:
    """What the encoders of prometheus_client take for a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _scheduler_families(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for key, (name, text) in SCHEDULER_GAUGES.items():
        yield _gauge(name, text, stats[key])
    for key, (name, text) in SCHEDULER_COUNTERS.items():
        yield _counter(name, text, stats[key])
    for key, (name, text) in WORKER_SECONDS.items():
        yield _counter(name, text, stats[key] / 1e9)
    for key, (name, text) in SCHEDULER_COUNTERS_BY_REASON.items():
        yield _counter_by(name, text, "reason", stats[key])
    for key, (name, text) in SCHEDULER_HISTOGRAMS.items():
        yield _histogram(name, text, Durations(**stats[key]))
    accepted = dict(enumerate(stats["num_accepted_tokens_per_pos"]))
    text = "Draft tokens accepted, by position in the draft."
    yield _counter_by("spec_decode_num_accepted_tokens_per_pos", text, "position", accepted)
    yield from _worker_families(stats["workers"])


def _worker_families(workers: list[Mapping[str, Any]]) -> Iterator[Metric]:
    num_blocks, num_free = (sum(worker[key] for worker in workers) for key in ("num_blocks", "num_free_blocks"))
    usage = 1.0 - num_free / num_blocks if num_blocks else 0.0
    yield _gauge("kv_cache_usage_perc", "KV blocks in use, of all: 1 is full.", usage)
    yield _gauge("workers_up", "Workers in a session.", len(workers))
    for key, (name, text) in WORKER_GAUGES.items():
        family = GaugeMetricFamily(PREFIX + name, text, labels=["worker_id"])
        for worker in workers:
            family.add_metric([worker["worker_id"]], worker[key])
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _counter_by(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _histogram(name: str, text: str, durations: Durations) -> Metric:
    buckets, so_far = [], 0
    for bound, count in zip([*map(str, durations.bounds_s), "+Inf"], durations.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=durations.sum_s)
