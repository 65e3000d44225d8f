"""Checks what clients send: each rule once, for every protocol, with an error that names field and limit.

Turns a ClientRequest, in which anything may be missing or wrong, into a TextRequest, in which
nothing is. All errors are ValueErrors whose message is one line.
"""

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.call import TextRequest
from cluster.served_model import ServedModel
from cluster.text import ChatMessage, Tokenizer
from scheduler.request import SamplingParams
from scheduler.step import Int32Array

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_NAME_CHARACTERS = 256
MAX_FINGERPRINT_CHARACTERS = 4096
MAX_ATTEMPT = 1 << 20
INT32 = (-(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSampling:
    """Sampling as a client sent it, unchecked. None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A request as a client sent it, unchecked. None, and an empty name: not given."""

    request_id: str = ""
    attempt: int = 0
    model: str = ""
    prompt: str | Sequence[ChatMessage] | Sequence[int] | None = None
    sampling: ClientSampling = field(default_factory=ClientSampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    n: int | None = None
    num_logprobs: int | None = None
    max_drafts: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    resume_token_ids: Sequence[int] = ()
    resume_fingerprint: str | None = None
    with_text: bool = True
    not_implemented: tuple[str, ...] = ()  # fields that were set and that nothing here honours


async def checked(client: ClientRequest, model: ServedModel, tokenizer: Tokenizer | None) -> TextRequest:
    """The request to submit. Raises ValueError for the first thing that is wrong with it."""
    n = 1 if client.n is None else client.n
    _check_names(client, model)
    _check_whole(client, n, tokenizer)
    sampling = _checked_sampling(client, model)
    prompt_token_ids = await _prompt(client, model, tokenizer)
    resume = _token_ids("resume_token_ids", client.resume_token_ids, model)
    max_tokens = _checked_max_tokens(client.max_tokens, len(prompt_token_ids), model)
    if sampling.min_tokens > max_tokens:
        raise ValueError(f"min_tokens must be at most max_tokens {max_tokens}, got {sampling.min_tokens}")
    if len(resume) > max_tokens:
        raise ValueError(f"resume_token_ids must be at most max_tokens {max_tokens} tokens, got {len(resume)}")
    return TextRequest(
        request_id=client.request_id or uuid.uuid4().hex,
        attempt=client.attempt,
        prompt_token_ids=prompt_token_ids,
        resume_token_ids=resume,
        resume_fingerprint=client.resume_fingerprint or None,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=client.sampling.seed,
        n=n,
        stop=client.stop,
        include_stop_str=client.include_stop_str,
        skip_special_tokens=client.skip_special_tokens,
        with_text=client.with_text,
        max_drafts=client.max_drafts,
        priority=client.priority,
        timeout_s=client.timeout_s,
        cache_salt=client.cache_salt,
        tenant=client.tenant,
    )


def _check_names(client: ClientRequest, model: ServedModel) -> None:
    if client.not_implemented:
        raise ValueError(f"{', '.join(client.not_implemented)}: not implemented by this server")
    if client.model and client.model != model.name:
        raise ValueError(f"model {client.model!r} is not served here; the model is {model.name!r}")
    for name in ("request_id", "cache_salt", "tenant"):
        if len(getattr(client, name)) > MAX_NAME_CHARACTERS:
            raise ValueError(f"{name} must be at most {MAX_NAME_CHARACTERS} characters")
    if len(client.resume_fingerprint or "") > MAX_FINGERPRINT_CHARACTERS:
        raise ValueError(f"resume_fingerprint must be at most {MAX_FINGERPRINT_CHARACTERS} characters")


def _check_whole(client: ClientRequest, n: int, tokenizer: Tokenizer | None) -> None:
    _check_range("n", n, 1, MAX_N)
    _check_range("attempt", client.attempt, 0, MAX_ATTEMPT)
    _check_range("priority", client.priority, *INT32)
    if client.max_drafts is not None and client.max_drafts < 0:
        raise ValueError(f"max_drafts (K) must be at least 0, got {client.max_drafts}")
    if client.num_logprobs is not None:
        _check_range("logprobs", client.num_logprobs, 0, MAX_LOGPROBS)
    if n > 1 and len(client.resume_token_ids):
        raise ValueError(f"resume_token_ids needs n = 1, got n = {n}")
    _check_stop(client.stop, tokenizer)


def _check_stop(stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
    if stop and tokenizer is None:
        raise ValueError("stop: this server has no tokenizer; use stop_token_ids")
    if len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must be at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(text)}")


def _checked_sampling(client: ClientRequest, model: ServedModel) -> SamplingParams:
    sampling = client.sampling
    temperature = _checked("temperature", sampling.temperature, 1.0, at_least=0.0)
    top_p = _checked("top_p", sampling.top_p, 1.0, above=0.0, at_most=1.0)
    min_p = _checked("min_p", sampling.min_p, 0.0, at_least=0.0, at_most=1.0)
    repetition = _checked("repetition_penalty", sampling.repetition_penalty, 1.0, above=0.0)
    presence = _checked("presence_penalty", sampling.presence_penalty, 0.0, at_least=-2.0, at_most=2.0)
    frequency = _checked("frequency_penalty", sampling.frequency_penalty, 0.0, at_least=-2.0, at_most=2.0)
    top_k, min_tokens = sampling.top_k or 0, sampling.min_tokens or 0
    _check_range("top_k", top_k, 0, INT32[1])
    _check_range("min_tokens", min_tokens, 0, INT32[1])
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, (1 << 64) - 1)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS}, got {len(sampling.stop_token_ids)}")
    stop_token_ids = _token_ids("stop_token_ids", sampling.stop_token_ids, model)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=_checked_logit_bias(sampling.logit_bias, model),
        eos_token_ids=() if sampling.ignore_eos else model.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids.tolist())),
        min_tokens=min_tokens,
        num_logprobs=client.num_logprobs,
    )


def _checked_logit_bias(logit_bias: Iterable[tuple[int, float]], model: ServedModel) -> tuple[tuple[int, float], ...]:
    ordered = tuple(sorted(logit_bias))
    if len(ordered) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must be at most {MAX_LOGIT_BIAS} tokens, got {len(ordered)}")
    _token_ids("logit_bias", [token_id for token_id, _ in ordered], model)
    for _, bias in ordered:
        _checked("logit_bias", bias, 0.0, at_least=-100.0, at_most=100.0)
    return ordered


async def _prompt(client: ClientRequest, model: ServedModel, tokenizer: Tokenizer | None) -> Int32Array:
    prompt = client.prompt
    if prompt is None or len(prompt) == 0:
        raise ValueError("prompt is empty: send text, chat messages or token ids")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("text: this server has no tokenizer; send token ids")
        _check_characters(prompt, model, tokenizer)
        token_ids = await tokenizer.encode_aside(prompt)
    elif isinstance(prompt[0], ChatMessage):
        if tokenizer is None:
            raise ValueError("chat: this server has no tokenizer; send token ids")
        messages = [message for message in prompt if isinstance(message, ChatMessage)]
        _check_characters("".join(message.content for message in messages), model, tokenizer)
        token_ids = await tokenizer.encode_chat_aside(messages)
    else:
        _check_length(len(prompt), model)
        return _token_ids("prompt token ids", [int(token_id) for token_id in prompt], model)  # type: ignore[arg-type]
    if len(token_ids) == 0:
        raise ValueError("prompt is empty: its text has no tokens")
    return _token_ids("prompt token ids", token_ids, model)


def _check_characters(text: str, model: ServedModel, tokenizer: Tokenizer) -> None:
    """Refuses a text that can be no fit without spending the time to encode it."""
    limit = model.max_model_len * tokenizer.max_token_characters
    if len(text) > limit:
        raise ValueError(
            f"prompt has {len(text)} characters, more than {limit} cannot fit max_model_len {model.max_model_len}"
        )


def _check_length(num_tokens: int, model: ServedModel) -> None:
    if num_tokens >= model.max_model_len:
        limit = f"prompt and output together must fit max_model_len {model.max_model_len}"
        raise ValueError(f"prompt has {num_tokens} tokens; {limit}")


def _checked_max_tokens(max_tokens: int | None, num_prompt_tokens: int, model: ServedModel) -> int:
    _check_length(num_prompt_tokens, model)
    if max_tokens is None:
        return model.max_model_len - num_prompt_tokens
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if num_prompt_tokens + max_tokens > model.max_model_len:
        raise ValueError(
            f"prompt of {num_prompt_tokens} tokens + max_tokens {max_tokens} is {num_prompt_tokens + max_tokens},"
            f" beyond max_model_len {model.max_model_len}"
        )
    return max_tokens


def _token_ids(name: str, token_ids: Sequence[int] | Int32Array, model: ServedModel) -> Int32Array:
    array = np.asarray(token_ids, np.int64)
    outside = array[(array < 0) | (array >= model.vocab_size)]
    if len(outside):
        raise ValueError(f"{name}: {outside[0]} is outside the vocabulary [0, {model.vocab_size})")
    return array.astype(np.int32)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def _checked(
    name: str,
    value: float | None,
    default: float,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> float:
    """The value or its default. Raises ValueError when it is not finite or out of range."""
    if value is None:
        return default
    if math.isfinite(value) and at_least <= value <= at_most and value > above:
        return value
    low = f"({above:g}" if above > -math.inf else f"[{at_least:g}"
    high = f"{at_most:g}]" if at_most < math.inf else "inf)"
    raise ValueError(f"{name} must be in {low}, {high}, got {value}")
