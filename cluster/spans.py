"""One OpenTelemetry span for each request of a front end, with the names that vLLM gives its own.

Spans are exported over OTLP by a thread of their own, from a bounded queue: what does not fit, or cannot be
exported, is dropped and counted. Needs the extra `otel`.
"""

import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.call import Call, StreamError
from cluster.choice import Choice

NAME = "llm_request"
MAX_QUEUED = 4096
MAX_BATCH = 512
BATCH_EVERY_S = 1.0
STOP_TIMEOUT_S = 2.0


class SpanQueue(SpanProcessor):
    """Takes ended spans from the event loop without waiting, and exports them from its own thread."""

    def __init__(self, exporter: SpanExporter, *, max_queued: int = MAX_QUEUED) -> None:
        self._exporter = exporter
        self._queue: queue.Queue[ReadableSpan | None] = queue.Queue(max_queued)
        self.num_exported = 0
        self.num_not_queued = 0  # the queue was full
        self.num_not_exported = 0  # the receiver did not take them
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that nobody will see."""
        return self.num_not_queued + self.num_not_exported

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: a span is worth its place once it has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        """Never blocks."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self.num_not_queued += 1

    def shutdown(self) -> None:
        """Waits a little for what is queued."""
        try:
            self._queue.put(None, timeout=STOP_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(STOP_TIMEOUT_S)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Not asked for: spans leave within BATCH_EVERY_S."""
        return False

    def _run(self) -> None:
        is_last = False
        while not is_last:
            batch, is_last = self._next_batch()
            if not batch:
                continue
            if self._exporter.export(batch) is SpanExportResult.SUCCESS:
                self.num_exported += len(batch)
            else:
                self.num_not_exported += len(batch)
        self._exporter.shutdown()

    def _next_batch(self) -> tuple[list[ReadableSpan], bool]:
        """Spans that came within a while, and whether no more will."""
        batch: list[ReadableSpan] = []
        deadline_s = time.monotonic() + BATCH_EVERY_S
        while len(batch) < MAX_BATCH:
            try:
                span = self._queue.get(timeout=max(deadline_s - time.monotonic(), 0.001))
            except queue.Empty:
                break
            if span is None:
                return batch, True
            batch.append(span)
        return batch, False


class Spans:
    """A cluster.frontend.RequestObserver."""

    def __init__(self, endpoint: str, *, front_end: str, model_name: str) -> None:
        """endpoint: http://HOST:PORT of an OTLP receiver over gRPC; https:// for TLS."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        self.queue = SpanQueue(OTLPSpanExporter(endpoint=endpoint))
        name = os.environ.get("OTEL_SERVICE_NAME", "slipstream")
        resource = Resource.create({SERVICE_NAME: name, "service.instance.id": front_end})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self.queue)
        self._tracer = provider.get_tracer("slipstream")
        self._model_name = model_name

    def rejected(self, request_id: str, error: StreamError | ValueError) -> None:
        """Nothing: it never became a request."""

    def opened(self, call: Call) -> None:
        """Nothing: a span is made when all is known of it."""

    def first_token(self, call: Call, choice: Choice, now_s: float) -> None:
        """Nothing: the choice keeps the time."""

    def resubmitted(self, call: Call, choice: Choice) -> None:
        """Nothing: the choice counts them."""

    def closed(self, call: Call, now_s: float) -> None:
        """The span, a child of the client's if that sent one."""
        end_ns = time.time_ns()
        start_ns = end_ns - round((now_s - call.opened_s) * 1e9)
        span = self._tracer.start_span(
            NAME,
            context=_parent(call),
            kind=SpanKind.SERVER,
            start_time=start_ns,
            attributes=self._attributes(call, now_s),
        )
        if call.error is not None:
            span.set_status(Status(StatusCode.ERROR, f"{call.error.code}: {call.error.message}"))
        span.end(end_ns)

    @property
    def num_dropped(self) -> int:
        """Spans that nobody will see."""
        return self.queue.num_dropped

    def stop(self) -> None:
        """Exports what is left, if that is quick."""
        self.queue.shutdown()

    def _attributes(self, call: Call, now_s: float) -> "Mapping[str, str | int | float | Sequence[str]]":
        request, finishes = call.request, [choice.finish for choice in call.choices]
        attributes: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.request.n": request.n,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(choice.num_tokens for choice in call.choices),
            "gen_ai.latency.e2e": now_s - call.opened_s,
            "gen_ai.response.finish_reasons": [f.reason.value if f is not None else "abort" for f in finishes],
            "slipstream.draft_tokens": sum(f.num_draft_tokens for f in finishes if f is not None),
            "slipstream.accepted_tokens": sum(f.num_accepted_tokens for f in finishes if f is not None),
            "slipstream.cached_tokens": sum(f.num_cached_tokens for f in finishes if f is not None),
            "slipstream.preemptions": sum(f.num_preemptions for f in finishes if f is not None),
            "slipstream.resubmissions": sum(choice.num_resubmissions for choice in call.choices),
        }
        first = [choice.first_token_s for choice in call.choices if choice.first_token_s is not None]
        seated = [choice.seated_s for choice in call.choices if choice.seated_s is not None]
        if first:
            attributes["gen_ai.latency.time_to_first_token"] = min(first) - call.opened_s
        if seated:
            attributes["gen_ai.latency.time_in_queue"] = min(seated) - call.opened_s
        return attributes


def _parent(call: Call) -> Context:
    """Of what the client sent; what is no traceparent is none."""
    carrier = {} if call.traceparent is None else {"traceparent": call.traceparent}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())
