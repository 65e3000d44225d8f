"""inference.GRPCInferenceService over a real server and channel on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.server import ServerConfig
from protos import kserve_pb2 as pb
from protos import kserve_pb2_grpc
from tests.fake_link import FakeLink, expected_tokens
from tests.served import TINY, Served, rest_of, served

PROMPT = "hello world"
PROMPT_TOKENS = TINY.encode(PROMPT).tolist()
TEXT: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
RAW_PROMPT = len(PROMPT).to_bytes(4, "little") + PROMPT.encode()


@pytest.fixture
async def up() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


def stub(up: Served) -> Any:
    return kserve_pb2_grpc.GRPCInferenceServiceStub(up.channel)  # type: ignore[no-untyped-call]


def tensor(name: str, value: str | bytes | bool, **changes: Any) -> Any:
    one = pb.ModelInferRequest.InferInputTensor(name=name, shape=[1])
    if isinstance(value, bool):
        one.datatype = "BOOL"
        one.contents.bool_contents.append(value)
    else:
        one.datatype = "BYTES"
        one.contents.bytes_contents.append(value.encode() if isinstance(value, str) else value)
    return pb.ModelInferRequest.InferInputTensor.FromString(
        one.SerializeToString() + pb.ModelInferRequest.InferInputTensor(**changes).SerializeToString()
    )


def asked(
    *, text: str | bytes = PROMPT, stream: bool = False, model: str = "tiny", id: str = "", **sampling: Any
) -> Any:
    sampling = {"max_tokens": 12, "seed": 7} | sampling
    inputs = [tensor("text_input", text), tensor("stream", stream)]
    inputs.append(tensor("sampling_parameters", json.dumps(sampling)))
    return pb.ModelInferRequest(model_name=model, id=id, inputs=inputs)


def text_of(response: Any) -> str:
    [output] = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("text_output", "BYTES", [1])
    [element] = output.contents.bytes_contents
    return str(element.decode())


async def streamed(up: Served, *messages: Any) -> list[Any]:
    """Every response to requests that are sent at once."""
    return [response async for response in stub(up).ModelStreamInfer(iter(messages))]


def is_final(response: Any) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


EXPECTED = TINY.decode(expected_tokens(PROMPT_TOKENS, 7, 12))


async def test_one_request_has_one_answer_that_begins_with_the_input(up: Served) -> None:
    response = await stub(up).ModelInfer(asked(id="42"))
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "42")
    assert text_of(response) == PROMPT + EXPECTED
    assert up.link.submitted[0].prompt_token_ids.tolist() == PROMPT_TOKENS


async def test_the_input_is_left_out_when_asked(up: Served) -> None:
    message = asked()
    message.inputs.append(tensor("exclude_input_in_output", True))
    assert text_of(await stub(up).ModelInfer(message)) == EXPECTED


async def test_raw_tensors_are_answered_in_raw(up: Served) -> None:
    message = asked()
    for one in message.inputs:
        one.ClearField("contents")
    parameters = b'{"max_tokens": 12, "seed": 7}'
    message.raw_input_contents.extend([RAW_PROMPT, b"\0", len(parameters).to_bytes(4, "little") + parameters])
    response = await stub(up).ModelInfer(message)
    assert not response.outputs[0].HasField("contents")
    [raw] = response.raw_output_contents
    assert raw[4:].decode() == PROMPT + EXPECTED
    assert int.from_bytes(raw[:4], "little") == len(raw) - 4


async def test_each_choice_is_an_element(up: Served) -> None:
    response = await stub(up).ModelInfer(asked(n=3))
    [output] = response.outputs
    assert list(output.shape) == [3]
    assert len({bytes(element) for element in output.contents.bytes_contents}) == 3
    chunks = [one.infer_response.outputs[0] for one in await streamed(up, asked(n=3, stream=True))]
    texts = [b"".join(chunk.contents.bytes_contents[index] for chunk in chunks) for index in range(3)]
    assert [PROMPT.encode() + text for text in texts] == list(output.contents.bytes_contents)


async def test_a_stream_brings_new_text_and_flags_its_last_response(up: Served) -> None:
    responses = await streamed(up, asked(stream=True, id="s"))
    assert len(responses) > 2
    assert "".join(text_of(one.infer_response) for one in responses) == EXPECTED
    assert [is_final(one) for one in responses] == [False] * (len(responses) - 1) + [True]
    assert {one.infer_response.id for one in responses} == {"s"}
    assert {one.error_message for one in responses} == {""}


async def test_requests_of_one_stream_run_side_by_side_and_one_that_fails_ends_alone(up: Served) -> None:
    up.link.stall_at = 3
    call = stub(up).ModelStreamInfer()
    await call.write(asked(id="long", stream=True))
    assert (await call.read()).infer_response.id == "long"
    await call.write(asked(id="bad", temperature=-1))
    await call.write(asked(id="short", stream=True, max_tokens=2))
    later: list[Any] = []
    while len([one for one in later if is_final(one)]) < 2:
        later.append(await call.read())
    up.link.stall_at = None
    await call.done_writing()
    rest = await rest_of(call)
    [bad] = [one for one in later if one.infer_response.id == "bad"]
    assert bad.error_message.startswith("INVALID_ARGUMENT: temperature must be in")
    assert not bad.infer_response.outputs
    assert {one.infer_response.id for one in rest} == {"long"}
    assert is_final(rest[-1])
    assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_leaves_cancels_every_request_of_its_stream(up: Served) -> None:
    up.link.stall_at = 4
    call = stub(up).ModelStreamInfer()
    for name in ("a", "b"):
        await call.write(asked(id=name, stream=True))
    assert {(await call.read()).infer_response.id for _ in range(2)} == {"a", "b"}
    call.cancel()
    await up.gone()
    assert len(up.link.cancelled) == 2


async def test_a_client_that_leaves_cancels_its_only_request(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).ModelInfer(asked())
    async with asyncio.timeout(10):
        while not up.link.live:  # noqa: ASYNC110 - the toy has no events
            await asyncio.sleep(0.005)
    call.cancel()
    await up.gone()


async def test_a_stream_has_a_bounded_number_of_requests_in_flight(up: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kserve_service.MAX_IN_FLIGHT", 2)
    up.link.stall_at = 4
    call = stub(up).ModelStreamInfer()
    for name in "abc":
        await call.write(asked(id=name, stream=True))
    assert {(await call.read()).infer_response.id for _ in range(2)} == {"a", "b"}
    assert len(up.link.submitted) == 2
    up.link.stall_at = None
    await call.done_writing()
    assert {one.infer_response.id for one in await rest_of(call) if is_final(one)} == {"a", "b", "c"}


async def test_a_stream_whose_client_does_not_read_is_ended() -> None:
    async with (
        served(slowest_reader_s=0.2) as up,
        # Without it the client's own buffers grow with what they hold.
        grpc.aio.insecure_channel(up.server.address, [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        up.link.stall_at = 150
        call = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()  # type: ignore[no-untyped-call]
        for _ in range(4):
            await call.write(asked(stream=True, max_tokens=200, id="x" * 10_000))
        await call.read()
        await up.gone(timeout_s=20)
        assert len(up.link.cancelled) == 4
        with pytest.raises(grpc.aio.AioRpcError, match=r"the client read nothing for 0.2 s") as caught:
            await rest_of(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_parameters_of_the_request_count_too_and_the_tensor_wins(up: Served) -> None:
    message = asked(max_tokens=3)
    message.parameters["max_tokens"].string_param = "5"
    message.parameters["temperature"].double_param = 0.5
    message.parameters["priority"].uint64_param = 4
    message.parameters["timeout"].int64_param = 30_000_000
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    await stub(up).ModelInfer(message)
    [request] = up.link.submitted
    assert (request.max_tokens, request.sampling.temperature, request.priority) == (3, 0.5, 4)


async def test_a_request_s_own_timeout_ends_it(up: Served) -> None:
    up.link.stall_at = 1
    message = asked()
    message.parameters["timeout"].int64_param = 50_000
    [response] = await streamed(up, message)
    assert response.error_message == "DEADLINE_EXCEEDED: the deadline passed"


def changed(**changes: Any) -> Any:
    message = asked()
    message.MergeFrom(pb.ModelInferRequest(**changes))
    return message


def with_parameter(where: Any, message: Any, name: str, **value: Any) -> Any:
    where.parameters[name].CopyFrom(pb.InferParameter(**value))
    return message


def sharing() -> Any:
    message = asked()
    return with_parameter(message.inputs[0], message, "shared_memory_region", string_param="r")


def sharing_output() -> Any:
    message = changed(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")])
    return with_parameter(message.outputs[0], message, "shared_memory_region", string_param="r")


def of(*inputs: Any, **fields: Any) -> Any:
    return pb.ModelInferRequest(model_name="tiny", inputs=inputs, **fields)


INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
WRONG = {
    "an unknown model": (asked(model="other"), INVALID, "model_name 'other' is not served here; the model is 'tiny'"),
    "an unknown version": (changed(model_version="2"), INVALID, "model_version '2' is not served here"),
    "no text": (of(), INVALID, "text_input is missing"),
    "another input": (changed(inputs=[tensor("image", "x")]), INVALID, "input 'image' is none of text_input, "),
    "an input twice": (changed(inputs=[tensor("stream", True)]), INVALID, "stream is there twice"),
    "another datatype": (of(tensor("text_input", "x", datatype="FP32")), INVALID, "datatype BYTES, got 'FP32'"),
    "another shape": (of(tensor("text_input", "x", shape=[1])), INVALID, r"shape \[1\], got \[1, 1\]"),
    "two elements": (
        of(tensor("text_input", "x", contents=pb.InferTensorContents(bytes_contents=[b"y"]))),
        INVALID,
        "text_input must have one element in bytes_contents",
    ),
    "contents of another type": (
        of(tensor("text_input", "x", contents=pb.InferTensorContents(int_contents=[1]))),
        INVALID,
        "text_input must have one element in bytes_contents",
    ),
    "raw contents beside typed ones": (
        of(tensor("text_input", "x"), raw_input_contents=[RAW_PROMPT]),
        INVALID,
        "text_input has contents beside raw_input_contents",
    ),
    "too few raw contents": (changed(raw_input_contents=[b"x"]), INVALID, "1 elements for 3 inputs"),
    "raw contents cut off": (
        of(pb.ModelInferRequest.InferInputTensor(**TEXT), raw_input_contents=[RAW_PROMPT[:-1]]),
        INVALID,
        "text_input: 14 bytes in raw_input_contents are not one BYTES element",
    ),
    "bytes that are no text": (asked(text=b"\xff"), INVALID, "text_input is not UTF-8"),
    "shared memory": (sharing(), UNIMPLEMENTED, "text_input: shared_memory_region is not implemented"),
    "shared memory for the output": (sharing_output(), UNIMPLEMENTED, "text_output: shared_memory_region is not"),
    "another output": (
        changed(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="logprobs")]),
        INVALID,
        "output 'logprobs' is not text_output",
    ),
    "an unknown parameter": (asked(best_of=2, top_q=1), INVALID, "best_of, top_q: not implemented by this server"),
    "a sequence": (
        with_parameter(one := asked(), one, "sequence_id", int64_param=5),
        INVALID,
        "sequence_id: not implemented by this server",
    ),
    "a timeout that is no number": (
        with_parameter(one := asked(), one, "timeout", string_param="5"),
        INVALID,
        "timeout must be of the type int, got '5'",
    ),
    "a field of a newer protocol": (
        pb.ModelInferRequest.FromString(asked().SerializeToString() + b"\xf8\x07\x01"),
        INVALID,
        "ModelInferRequest field 127: not implemented",
    ),
    "a value out of range": (asked(top_p=1.5), INVALID, "top_p must be in"),
    "a prompt that cannot fit": (asked(max_tokens=1000), INVALID, "max_model_len 256"),
    "a stream of one response": (asked(stream=True), INVALID, "stream: ModelInfer has one response"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_wrong_is_refused_by_name(up: Served, wrong: str) -> None:
    message, code, error = WRONG[wrong]
    with pytest.raises(grpc.aio.AioRpcError, match=error) as caught:
        await stub(up).ModelInfer(message)
    assert caught.value.code() is code
    assert up.link.submitted == []


async def test_a_stream_cannot_include_its_input(up: Served) -> None:
    message = asked(stream=True)
    message.inputs.append(tensor("exclude_input_in_output", False))
    [response] = await streamed(up, message)
    assert response.error_message == "INVALID_ARGUMENT: exclude_input_in_output must be true for a stream"
    assert is_final(response)


async def test_bytes_that_are_no_message_end_a_stream_after_what_is_in_flight(up: Served) -> None:
    raw = up.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    await raw.write(asked(id="good").SerializeToString())
    await raw.write(b"\x0a\xff no protobuf")
    good = pb.ModelStreamInferResponse.FromString(await raw.read())
    assert (good.infer_response.id, good.error_message) == ("good", "")
    with pytest.raises(grpc.aio.AioRpcError, match="bytes are no message of /inference") as caught:
        await raw.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_it_tells_about_itself_and_its_model(up: Served) -> None:
    server = await stub(up).ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == ("slipstream", ["parameters"])
    model = await stub(up).ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
    assert (model.name, list(model.versions), model.platform) == ("tiny", ["1"], "slipstream")
    assert [(one.name, one.datatype, list(one.shape)) for one in model.inputs] == [
        ("text_input", "BYTES", [1]),
        ("stream", "BOOL", [1]),
        ("sampling_parameters", "BYTES", [1]),
        ("exclude_input_in_output", "BOOL", [1]),
    ]
    assert [(one.name, one.datatype, list(one.shape)) for one in model.outputs] == [("text_output", "BYTES", [-1])]
    with pytest.raises(grpc.aio.AioRpcError, match="name 'other' is not served here"):
        await stub(up).ModelMetadata(pb.ModelMetadataRequest(name="other"))


async def test_readiness_follows_the_server_the_scheduler_and_the_model() -> None:
    async with served(ready=False) as up:
        model = pb.ModelReadyRequest(name="tiny", version="1")
        assert (await stub(up).ServerLive(pb.ServerLiveRequest())).live
        assert not (await stub(up).ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub(up).ModelReady(model)).ready
        await up.server.ready()
        assert (await stub(up).ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub(up).ModelReady(model)).ready
        assert not (await stub(up).ModelReady(pb.ModelReadyRequest(name="tiny", version="2"))).ready
        assert not (await stub(up).ModelReady(pb.ModelReadyRequest(name="other"))).ready
        up.link.available = False
        assert not (await stub(up).ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub(up).ModelReady(model)).ready
        check = health_pb2_grpc.HealthStub(up.channel).Check
        assert (await check(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService"))).status == 1


async def test_tokens_tenants_and_patience_hold_for_streams_too(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alpha acme limit=1\nbeta globex\n")
    config = ServerConfig(auth_token_file=tmp_path / "tokens", message_timeout_s=0.5)
    link = FakeLink()
    link.stall_at = 4
    async with served(link, config=config) as up:
        assert (await stub(up).ServerReady(pb.ServerReadyRequest())).ready
        for call in (stub(up).ModelInfer(asked()), stub(up).ModelStreamInfer(iter([asked()])).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer alpha"),)
        stream = stub(up).ModelStreamInfer(metadata=metadata)
        await stream.write(asked(stream=True))
        await stream.read()
        await stream.write(asked(stream=True, id="too many"))
        error = (await stream.read()).error_message
        assert error == "RESOURCE_EXHAUSTED: this tenant's limit is 1 choices at once"
        assert [request.tenant for request in link.submitted] == ["acme"]
        stream.cancel()
        silent = stub(up).ModelStreamInfer(metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError, match=r"no message came within 0.5 s") as caught:
            await silent.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await up.gone()
