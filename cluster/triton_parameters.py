"""The parameters of Triton's vLLM backend: names and defaults of vLLM's SamplingParams, as values of JSON.

Numbers may come as text, as they do from clients that know a request's parameters only as strings.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from cluster.validate import ClientRequest, ClientSampling

MAX_TOKENS = 16  # unless given; null is all that fits
NO_TOP_K = -1


def parsed(text: str) -> dict[str, object]:
    """The names and values of a JSON object. Raises ValueError."""
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise ValueError("sampling_parameters is not a JSON object")
    return parameters


def client_request(parameters: Mapping[str, object]) -> ClientRequest:
    """A request that lacks its prompt. Raises ValueError for a value of another kind; null is not given.

    Names that are not known stand in its `not_implemented`.
    """
    given = {name: value for name, value in ({"max_tokens": MAX_TOKENS, **parameters}).items() if value is not None}
    return ClientRequest(
        sampling=ClientSampling(**_read(SAMPLING, given)),
        **_read(REQUEST, given),
        not_implemented=tuple(sorted(given.keys() - SAMPLING.keys() - REQUEST.keys())),
    )


def _read(kinds: Mapping[str, Callable[[str, Any], Any]], given: Mapping[str, object]) -> dict[str, Any]:
    return {FIELDS.get(name, name): kind(name, given[name]) for name, kind in kinds.items() if name in given}


def _number(name: str, value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise ValueError(f"{name} must be a number, got {_shown(value)}")


def _whole(name: str, value: object) -> int:
    if isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:
            pass
    raise ValueError(f"{name} must be a whole number, got {_shown(value)}")


def _top_k(name: str, value: object) -> int:
    top_k = _whole(name, value)
    return 0 if top_k == NO_TOP_K else top_k


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be true or false, got {_shown(value)}")


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise ValueError(f"{name} must be a string or a list of strings, got {_shown(value)}")


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(_whole(name, token_id) for token_id in value)
    raise ValueError(f"{name} must be a list of token ids, got {_shown(value)}")


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, dict):
        return tuple((_whole(name, token_id), _number(name, bias)) for token_id, bias in value.items())
    raise ValueError(f"{name} must be an object of token ids and numbers, got {_shown(value)}")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


SAMPLING: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _top_k,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _biases,
    "seed": _whole,
    "stop_token_ids": _token_ids,
    "min_tokens": _whole,
    "ignore_eos": _flag,
}
REQUEST: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _whole,
    "n": _whole,
    "stop": _texts,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
}
FIELDS = {"include_stop_str_in_output": "include_stop_str"}  # where ours has another name
