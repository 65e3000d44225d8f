"""Spans of requests as a receiver of OpenTelemetry's protocol gets them: a real one, over gRPC on loopback."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from cluster.errors import ConfigError
from cluster.otlp import EXPORTER, traces_endpoint
from cluster.spans import SpanQueue, Spans
from protos import kserve_pb2 as kserve_pb
from protos import kserve_pb2_grpc, slipstream_pb2_grpc
from protos import slipstream_pb2 as pb
from tests.fake_link import FakeLink
from tests.served import Served, served
from tests.span_receiver import Receiver, span_receiver

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
METADATA = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


@asynccontextmanager
async def traced() -> AsyncIterator[tuple[Served, Receiver]]:
    """A server whose spans go to a receiver."""
    with span_receiver() as receiver:
        async with served(FakeLink()) as up:
            spans = Spans(receiver.endpoint, front_end="front", model_name="tiny")
            up.front_end.observers = [spans]
            try:
                yield up, receiver
            finally:
                await asyncio.to_thread(spans.stop)


async def received(receiver: Receiver, count: int) -> list[tuple[Any, dict[str, Any]]]:
    """So many spans and their attributes."""
    return await asyncio.to_thread(receiver.take, count)


async def asked_as_ours(up: Served, metadata: Any = None) -> None:
    request = pb.GenerateRequest(
        request_id="ours", tokens=pb.TokenIds(ids=[5, 6, 7]), max_tokens=4, sampling=pb.Sampling(ignore_eos=True)
    )
    stub = slipstream_pb2_grpc.InferenceStub(up.channel)  # type: ignore[no-untyped-call]
    async for _ in stub.Generate(request, metadata=metadata):
        pass


async def asked_as_vllm(up: Served, metadata: Any = None) -> None:
    params = vllm_pb.SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.5)
    tokenized = vllm_pb.TokenizedInput(input_ids=[5, 6, 7])
    request = vllm_pb.GenerateRequest(request_id="vllm", tokenized=tokenized, sampling_params=params, stream=True)
    async for _ in vllm_engine_pb2_grpc.VllmEngineStub(up.channel).Generate(request, metadata=metadata):
        pass


async def asked_as_triton(up: Served, metadata: Any = None) -> None:
    tensor = kserve_pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"hel")
    request = kserve_pb.ModelInferRequest(model_name="tiny", id="triton", inputs=[tensor])
    request.parameters["max_tokens"].int64_param = 4
    request.parameters["ignore_eos"].bool_param = True
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(up.channel)  # type: ignore[no-untyped-call]
    await stub.ModelInfer(request, metadata=metadata)


@pytest.mark.parametrize("ask", [asked_as_ours, asked_as_vllm, asked_as_triton])
async def test_a_request_is_a_span_below_the_clients_with_counts_and_times(ask: Any) -> None:
    async with traced() as (up, receiver):
        await ask(up, METADATA)
        [(span, attributes)] = await received(receiver, 1)
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert attributes["gen_ai.request.id"]  # those of Triton's clients are drawn here
    assert attributes["gen_ai.request.max_tokens"] == 4
    assert attributes["gen_ai.usage.prompt_tokens"] > 0
    assert attributes["gen_ai.usage.completion_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["slipstream.accepted_tokens"] <= attributes["slipstream.draft_tokens"]
    first_s, whole_s = attributes["gen_ai.latency.time_to_first_token"], attributes["gen_ai.latency.e2e"]
    assert 0 < first_s <= whole_s
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(whole_s * 1e9, rel=1e-6)


async def test_without_a_traceparent_or_with_a_bad_one_a_span_is_the_root_and_an_unsampled_one_is_not_sent() -> None:
    async with traced() as (up, receiver):
        await asked_as_ours(up, (("traceparent", f"00-{TRACE}-{PARENT}-00"),))
        await asked_as_ours(up, (("traceparent", "nonsense"),))
        await asked_as_ours(up)
        spans = [span for span, _ in await received(receiver, 2)]
    assert all(span.parent_span_id == b"" and span.trace_id.hex() != TRACE for span in spans)


async def test_a_request_that_failed_is_a_span_with_the_error() -> None:
    async with traced() as (up, receiver):
        outputs = aiter(up.client.generate([5, 6, 7], request_id="failed", max_tokens=200, ignore_eos=True))
        await anext(outputs)
        up.front_end.scheduler_lost("there is no hope")
        with pytest.raises(grpc.RpcError):
            async for _ in outputs:
                pass
        [(span, attributes)] = await received(receiver, 1)
    assert span.status.message == "UNAVAILABLE: there is no hope"
    assert attributes["gen_ai.request.id"] == "failed"


class Stuck(SpanExporter):
    """Waits until it is told to go on, then refuses."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.begun.set()
        self.go_on.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing to end."""


def test_spans_that_cannot_be_exported_are_dropped_and_counted_without_waiting() -> None:
    exporter = Stuck()
    queue, span = SpanQueue(exporter, max_queued=2), object()
    queue.on_end(span)  # type: ignore[arg-type]
    assert exporter.begun.wait(10)
    for _ in range(5):
        queue.on_end(span)  # type: ignore[arg-type]
    assert (queue.num_not_queued, queue.num_not_exported) == (3, 0)
    exporter.go_on.set()
    queue.shutdown()
    assert (queue.num_dropped, queue.num_exported) == (6, 0)


def test_the_flag_comes_before_the_variables_and_grpc_is_the_only_protocol() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1"}
    assert traces_endpoint(None, {}) is None
    assert traces_endpoint(None, environment) == "http://c:1"
    assert traces_endpoint("http://a:1", environment) == "http://a:1"
    with pytest.raises(ConfigError, match="http/protobuf"):
        traces_endpoint("http://a:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})


def test_an_endpoint_without_the_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigError, match=r"slipstream\[otel\]"):
        traces_endpoint("http://a:1", {})
