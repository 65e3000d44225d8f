"""A receiver of OpenTelemetry's protocol, over gRPC on loopback: what it is sent is kept."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

SPAN_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Receiver(otlp_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it."""

    endpoint: str = ""
    _spans: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def Export(self, message: Any, context: Any) -> Any:
        for span in (span for of in message.resource_spans for scope in of.scope_spans for span in scope.spans):
            self._spans.put(span)
        return otlp_pb.ExportTraceServiceResponse()

    def take(self, count: int) -> list[tuple[Any, dict[str, Any]]]:
        """The next spans and their attributes, waiting for them: so many, and no other has come by then."""
        spans = [self._spans.get(timeout=SPAN_TIMEOUT_S) for _ in range(count)]
        assert self._spans.empty()
        return [(span, {one.key: _value(one.value) for one in span.attributes}) for span in spans]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def span_receiver() -> Iterator[Receiver]:
    """Listens while entered."""
    receiver = Receiver()
    collector = grpc.server(ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(receiver, collector)
    receiver.endpoint = f"http://127.0.0.1:{collector.add_insecure_port('127.0.0.1:0')}"
    collector.start()
    try:
        yield receiver
    finally:
        collector.stop(None)
