"""The service inference.GRPCInferenceService: KServe v2 as Triton speaks it, with the tensors of its vLLM backend.

Text in, text out. An input or parameter that nothing here honours is refused by name, never ignored.
"""

import asyncio
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from cluster.call import StreamError
from cluster.codec import unknown_fields
from cluster.serving import Serving
from cluster.status import refuse, timeout_of, traceparent_of
from cluster.triton_parameters import client_request, parsed
from cluster.validate import ClientRequest
from protos import kserve_pb2 as pb
from protos import kserve_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
MODEL_VERSION = "1"  # the only one
INPUTS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL"}
CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}
OUTPUT = "text_output"
FINAL_RESPONSE, ENABLE_EMPTY_FINAL_RESPONSE = "triton_final_response", "triton_enable_empty_final_response"
MAX_IN_FLIGHT = 256  # requests of one stream; it is not read while it has so many
T = TypeVar("T", int, bool)
LENGTH = struct.Struct("<I")  # before each element of a raw tensor of BYTES


class Asked(NamedTuple):
    """One request, unchecked but for its shape."""

    request: ClientRequest
    text: str
    stream: bool
    with_input: bool  # the output begins with the input


class Texts(NamedTuple):
    """What one response brings: a text for each choice, perhaps none."""

    texts: list[str]
    final: bool


class KServeServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """One model, one version."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def ServerLive(self, message: Any, context: Any) -> Any:
        """Always."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, message: Any, context: Any) -> Any:
        """Whether requests are taken and the scheduler answers."""
        return pb.ServerReadyResponse(ready=await self._serving.why_not_ready() is None)

    async def ModelReady(self, message: Any, context: Any) -> Any:
        """Likewise, and never for a model that is not served here."""
        try:
            self._check_model("name", message.name, "version", message.version)
        except ValueError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=await self._serving.why_not_ready() is None)

    async def ServerMetadata(self, message: Any, context: Any) -> Any:
        """What runs here; of Triton's extensions, requests may have parameters."""
        return pb.ServerMetadataResponse(name="slipstream", version=self._serving.version, extensions=["parameters"])

    async def ModelMetadata(self, message: Any, context: Any) -> Any:
        """The tensors of the model."""
        try:
            self._check_model("name", message.name, "version", message.version)
        except ValueError as error:
            await refuse(context, error)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._serving.model.name,
            versions=[MODEL_VERSION],
            platform="slipstream",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
            outputs=[tensor(name=OUTPUT, datatype="BYTES", shape=[-1])],
        )

    async def ModelInfer(self, message: Any, context: Any) -> Any:
        """The whole answer in one response."""
        try:
            asked = self._decode(message, timeout_of(context))
            if asked.stream:
                raise ValueError("stream: ModelInfer has one response; ModelStreamInfer has more")
            async with aclosing(self._texts(asked, traceparent_of(context))) as answer:
                [whole] = [texts async for texts in answer]
        except (ValueError, StreamError) as error:
            await refuse(context, error)
        return encode_response(message, self._serving.model.name, whole.texts)

    async def ModelStreamInfer(self, messages: Any, context: Any) -> None:
        """Each request at once, side by side with those before it. The client leaving cancels them all."""
        room, turn = asyncio.Semaphore(MAX_IN_FLIGHT), asyncio.Lock()

        async def answer(message: Any) -> None:
            try:
                async with aclosing(self._stream_responses(message, context)) as responses:
                    async for response in responses:
                        await turn.acquire()  # gRPC takes one message at a time
                        await self._serving.write(context, response)
                        turn.release()  # not after a write that failed: nobody writes any more
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as requests:
                async for message in messages:
                    await room.acquire()
                    requests.create_task(answer(message))
        except ExceptionGroup as errors:
            slow, others = errors.split(StreamError)
            if slow is None or others is not None:
                raise
            await refuse(context, slow.exceptions[0])

    async def _stream_responses(self, message: Any, context: Any) -> AsyncGenerator[Any, None]:
        """What answers one request of a stream. An error is a message too: it ends the request, not the stream."""
        try:
            asked = self._decode(message, timeout_of(context))
            async with aclosing(self._texts(asked, traceparent_of(context))) as answer:
                async for texts, final in answer:
                    response = encode_response(message, self._serving.model.name, texts)
                    response.parameters[FINAL_RESPONSE].bool_param = final
                    yield pb.ModelStreamInferResponse(infer_response=response)
        except (ValueError, StreamError) as error:
            code = error.code if isinstance(error, StreamError) else "INVALID_ARGUMENT"
            failed = pb.ModelInferResponse(id=message.id, model_name=message.model_name)
            failed.parameters[FINAL_RESPONSE].bool_param = True
            yield pb.ModelStreamInferResponse(error_message=f"{code}: {error}", infer_response=failed)

    async def _texts(self, asked: Asked, traceparent: str | None) -> AsyncGenerator[Texts, None]:
        """The new texts whenever there are some, or all of them at the end."""
        call = await self._serving.open(asked.request, traceparent=traceparent)
        num_open = call.request.n
        texts = [asked.text if asked.with_input else ""] * num_open
        async with aclosing(self._serving.front_end.outputs(call)) as outputs:
            async for output in outputs:
                num_open -= output.finish is not None
                texts[output.index] += output.text
                if num_open == 0 or (asked.stream and output.text):
                    yield Texts(texts, num_open == 0)
                    texts = [""] * len(texts)

    def _decode(self, message: Any, timeout_s: float | None) -> Asked:
        self._check_model("model_name", message.model_name, "model_version", message.model_version)
        return decode_request(message, timeout_s)

    def _check_model(self, name_field: str, name: str, version_field: str, version: str) -> None:
        model = self._serving.model
        if name != model.name:
            raise ValueError(f"{name_field} {name!r} is not served here; the model is {model.name!r}")
        if version not in ("", MODEL_VERSION):
            raise ValueError(f"{version_field} {version!r} is not served here; the version is {MODEL_VERSION!r}")


# ---- requests ----


def decode_request(message: Any, timeout_s: float | None) -> Asked:
    """A pb.ModelInferRequest. Raises ValueError, or StreamError where Triton knows something that this server does not.

    As in Triton's vLLM backend the answer begins with the input, unless it is streamed or
    `exclude_input_in_output` says no.
    """
    inputs = _decode_inputs(message)
    _check_outputs(message)
    if "text_input" not in inputs:
        raise ValueError("text_input is missing")
    stream = bool(inputs.get("stream", False))
    with_input = not inputs.get("exclude_input_in_output", stream)
    if stream and with_input:
        raise ValueError("exclude_input_in_output must be true for a stream")
    parameters = _decode_parameters(message.parameters)
    timeout_s, priority = _decode_timeout(parameters, timeout_s), _taken(parameters, "priority", int, 0)
    _taken(parameters, ENABLE_EMPTY_FINAL_RESPONSE, bool, False)  # there are none: the final response has a text
    parameters |= parsed(str(inputs.get("sampling_parameters", "{}")))
    request = client_request(parameters)
    text = str(inputs["text_input"])
    request = replace(
        request,
        prompt=text,
        priority=priority,
        timeout_s=timeout_s,
        not_implemented=(*request.not_implemented, *unknown_fields(message)),
    )
    return Asked(request, text, stream, with_input)


def _decode_inputs(message: Any) -> dict[str, str | bool]:
    for tensor in message.inputs:
        _check_tensor(tensor)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise ValueError(f"raw_input_contents has {len(raw)} elements for {len(message.inputs)} inputs")
    inputs: dict[str, str | bool] = {}
    for index, tensor in enumerate(message.inputs):
        if tensor.name in inputs:
            raise ValueError(f"{tensor.name} is there twice")
        value = _raw_value(tensor, raw[index]) if raw else _typed_value(tensor)
        inputs[tensor.name] = _text(tensor.name, value) if isinstance(value, bytes) else value
    return inputs


def _check_tensor(tensor: Any) -> None:
    if tensor.name not in INPUTS:
        raise ValueError(f"input {tensor.name!r} is none of {', '.join(INPUTS)}")
    for parameter in tensor.parameters:
        raise StreamError("UNIMPLEMENTED", f"{tensor.name}: {parameter} is not implemented by this server")
    if tensor.datatype != INPUTS[tensor.name]:
        raise ValueError(f"{tensor.name} must have the datatype {INPUTS[tensor.name]}, got {tensor.datatype!r}")
    if list(tensor.shape) != [1]:
        raise ValueError(f"{tensor.name} must have the shape [1], got {list(tensor.shape)}")


def _raw_value(tensor: Any, raw: bytes) -> bytes | bool:
    if tensor.HasField("contents"):
        raise ValueError(f"{tensor.name} has contents beside raw_input_contents")
    if tensor.datatype == "BOOL" and raw in (b"\0", b"\1"):
        return raw == b"\1"
    if tensor.datatype == "BYTES" and raw[: LENGTH.size] == LENGTH.pack(max(len(raw) - LENGTH.size, 0)):
        return raw[LENGTH.size :]
    raise ValueError(f"{tensor.name}: {len(raw)} bytes in raw_input_contents are not one {tensor.datatype} element")


def _typed_value(tensor: Any) -> bytes | bool:
    wanted = CONTENTS[tensor.datatype]
    found = {field.name: values for field, values in tensor.contents.ListFields()}
    if found.keys() != {wanted} or len(found[wanted]) != 1:
        raise ValueError(f"{tensor.name} must have one element in {wanted} or raw_input_contents")
    value: bytes | bool = found[wanted][0]
    return value


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8") from error


def _check_outputs(message: Any) -> None:
    for output in message.outputs:
        if output.name != OUTPUT:
            raise ValueError(f"output {output.name!r} is not {OUTPUT}")
        for parameter in output.parameters:
            raise StreamError("UNIMPLEMENTED", f"{OUTPUT}: {parameter} is not implemented by this server")


def _decode_parameters(parameters: Mapping[str, Any]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        values[name] = None if kind is None else getattr(parameter, kind)
    return values


def _decode_timeout(parameters: dict[str, object], timeout_s: float | None) -> float | None:
    """Takes the request's own timeout in microseconds; the call's deadline holds too."""
    timeout_us = _taken(parameters, "timeout", int, 0)
    if timeout_us < 0:
        raise ValueError(f"timeout must be at least 0 us, got {timeout_us}")
    given = [one for one in (timeout_s, timeout_us / 1e6 or None) if one is not None]
    return min(given, default=None)


def _taken(parameters: dict[str, object], name: str, kind: type[T], default: T) -> T:
    """Removes one of the protocol's own parameters from a request's."""
    value = parameters.pop(name, default)
    if type(value) is not kind:
        raise ValueError(f"{name} must be of the type {kind.__name__}, got {value!r}")
    return value


# ---- responses ----


def encode_response(message: Any, model_name: str, texts: Sequence[str]) -> Any:
    """A pb.ModelInferResponse to `message`, raw if that is: one element of `text_output` for each choice."""
    output = pb.ModelInferResponse.InferOutputTensor(name=OUTPUT, datatype="BYTES", shape=[len(texts)])
    response = pb.ModelInferResponse(model_name=model_name, model_version=MODEL_VERSION, id=message.id)
    elements = [text.encode() for text in texts]
    if message.raw_input_contents:
        response.raw_output_contents.append(b"".join(LENGTH.pack(len(element)) + element for element in elements))
    else:
        output.contents.bytes_contents.extend(elements)
    response.outputs.append(output)
    return response
