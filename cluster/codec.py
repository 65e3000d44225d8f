"""slipstream.v1 messages to and from our own values. No other file but the servicers knows protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import json_format, struct_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.choice import Finish, Logprobs, Output
from cluster.text import ChatMessage
from cluster.validate import ClientRequest, ClientSampling
from protos import slipstream_pb2 as pb
from scheduler.request import FinishReason

LARGEST_EXACT_INT = 1 << 53  # what a Struct's double holds exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the first message of a choice tells."""

    request_id: str
    seed: int
    choice_seed: int
    num_prompt_tokens: int
    fingerprint: str = ""  # of the numbers the stream begins with; "": not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One GenerateResponse: an output and, in the first of its choice, the start."""

    output: Output
    start: Start | None = None


def unknown_fields(message: Any) -> tuple[str, ...]:
    """Fields this process has no name for, in the message and those within it: they would be ignored."""
    found = [f"{message.DESCRIPTOR.name} field {unknown.field_number}" for unknown in UnknownFieldSet(message)]
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else [value]:
            found.extend(unknown_fields(inner))
    return tuple(found)


# ---- requests ----


def decode_generate_request(message: Any, timeout_s: float | None) -> ClientRequest:
    """A pb.GenerateRequest as it came, unchecked."""
    return ClientRequest(
        request_id=message.request_id,
        attempt=message.attempt,
        model=message.model,
        prompt=_decode_prompt(message),
        sampling=_decode_sampling(message.sampling),
        max_tokens=_optional(message, "max_tokens"),
        stop=tuple(message.stop),
        include_stop_str=message.include_stop_str,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        n=_optional(message, "n"),
        num_logprobs=_optional(message, "logprobs"),
        max_drafts=_optional(message, "max_drafts"),
        priority=message.priority,
        timeout_s=timeout_s,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        resume_token_ids=tuple(message.resume_token_ids),
        resume_fingerprint=message.resume_fingerprint or None,
        not_implemented=unknown_fields(message),
    )


def encode_generate_request(request: ClientRequest) -> Any:
    """A pb.GenerateRequest. Raises ValueError when a number does not fit its field."""
    message = pb.GenerateRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        model=request.model,
        sampling=_encode_sampling(request.sampling),
        max_tokens=request.max_tokens,
        stop=request.stop,
        include_stop_str=request.include_stop_str,
        skip_special_tokens=request.skip_special_tokens,
        n=request.n,
        logprobs=request.num_logprobs,
        max_drafts=request.max_drafts,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        resume_token_ids=request.resume_token_ids,
        resume_fingerprint=request.resume_fingerprint or "",
    )
    _encode_prompt(request.prompt, message)
    return message


def _decode_prompt(message: Any) -> str | Sequence[ChatMessage] | Sequence[int] | None:
    match message.WhichOneof("prompt"):
        case "text":
            return str(message.text)
        case "chat":
            return [ChatMessage(role=turn.role, content=turn.content) for turn in message.chat.messages]
        case "tokens":
            return list(message.tokens.ids)
        case _:
            return None


def _encode_prompt(prompt: str | Sequence[ChatMessage] | Sequence[int] | None, message: Any) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt is not None and len(prompt) and isinstance(prompt[0], ChatMessage):
        turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in prompt]  # type: ignore[union-attr]
        message.chat.messages.extend(turns)
    elif prompt is not None:
        message.tokens.ids.extend(prompt)


def _decode_sampling(message: Any) -> ClientSampling:
    return ClientSampling(
        temperature=_optional(message, "temperature"),
        top_p=_optional(message, "top_p"),
        top_k=_optional(message, "top_k"),
        min_p=_optional(message, "min_p"),
        repetition_penalty=_optional(message, "repetition_penalty"),
        presence_penalty=_optional(message, "presence_penalty"),
        frequency_penalty=_optional(message, "frequency_penalty"),
        logit_bias=tuple(message.logit_bias.items()),
        seed=_optional(message, "seed"),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=_optional(message, "min_tokens"),
        ignore_eos=message.ignore_eos,
    )


def _encode_sampling(sampling: ClientSampling) -> Any:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
    )


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


# ---- responses ----


def encode_received(received: Received) -> Any:
    """A pb.GenerateResponse."""
    output = received.output
    return pb.GenerateResponse(
        index=output.index,
        output_offset=output.offset,
        token_ids=output.token_ids,
        text_offset=output.text_offset,
        text=output.text,
        logprobs=_encode_logprobs(output.logprobs) if output.logprobs is not None else None,
        start=_encode_start(received.start) if received.start is not None else None,
        finish=_encode_finish(output.finish) if output.finish is not None else None,
    )


def decode_received(message: Any) -> Received:
    """What a client sees of a pb.GenerateResponse."""
    output = Output(
        index=message.index,
        offset=message.output_offset,
        token_ids=tuple(message.token_ids),
        text_offset=message.text_offset,
        text=message.text,
        logprobs=_decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish=_decode_finish(message.finish) if message.HasField("finish") else None,
    )
    return Received(output=output, start=_decode_start(message.start) if message.HasField("start") else None)


def _encode_start(start: Start) -> Any:
    return pb.Start(
        request_id=start.request_id,
        seed=start.seed,
        choice_seed=start.choice_seed,
        prompt_tokens=start.num_prompt_tokens,
        fingerprint=start.fingerprint,
    )


def _decode_start(message: Any) -> Start:
    return Start(
        request_id=message.request_id,
        seed=message.seed,
        choice_seed=message.choice_seed,
        num_prompt_tokens=message.prompt_tokens,
        fingerprint=message.fingerprint,
    )


def _encode_finish(finish: Finish) -> Any:
    return pb.Finish(
        reason=finish.reason.value,
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        prompt_tokens=finish.num_prompt_tokens,
        output_tokens=finish.num_output_tokens,
        cached_tokens=finish.num_cached_tokens,
        draft_tokens=finish.num_draft_tokens,
        accepted_tokens=finish.num_accepted_tokens,
        preemptions=finish.num_preemptions,
        inexact=finish.inexact,
    )


def _decode_finish(message: Any) -> Finish:
    return Finish(
        reason=FinishReason(message.reason),
        stop_token_id=_optional(message, "stop_token_id"),
        stop_string=_optional(message, "stop_string"),
        num_prompt_tokens=message.prompt_tokens,
        num_output_tokens=message.output_tokens,
        num_cached_tokens=message.cached_tokens,
        num_draft_tokens=message.draft_tokens,
        num_accepted_tokens=message.accepted_tokens,
        num_preemptions=message.preemptions,
        inexact=message.inexact,
    )


def _encode_logprobs(logprobs: Logprobs) -> Any:
    return pb.Logprobs(
        logprobs=logprobs.logprobs.tolist(),
        num_top=logprobs.top_token_ids.shape[1],
        top_token_ids=logprobs.top_token_ids.ravel().tolist(),
        top_logprobs=logprobs.top_logprobs.ravel().tolist(),
    )


def _decode_logprobs(message: Any) -> Logprobs:
    shape = (len(message.logprobs), message.num_top)
    return Logprobs(
        logprobs=np.asarray(message.logprobs, np.float32),
        top_token_ids=np.asarray(message.top_token_ids, np.int32).reshape(shape),
        top_logprobs=np.asarray(message.top_logprobs, np.float32).reshape(shape),
    )


# ---- stats ----


def encode_stats(scheduler: dict[str, object], front_end: dict[str, object]) -> Any:
    """A pb.StatsResponse."""
    return pb.StatsResponse(scheduler=_encode_struct(scheduler), front_end=_encode_struct(front_end))


def decode_stats(message: Any) -> dict[str, Any]:
    """`{"scheduler": {...}, "front_end": {...}}`, whole numbers as ints."""
    return {name: _whole(json_format.MessageToDict(getattr(message, name))) for name in ("scheduler", "front_end")}


def _encode_struct(values: dict[str, object]) -> Any:
    struct = struct_pb2.Struct()
    struct.update(_plain(values))
    return struct


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool | str | float) or value is None:
        return value
    return int(value) if abs(int(value)) <= LARGEST_EXACT_INT else str(value)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
