"""The sampling parameters of Triton's vLLM backend, and what is refused among them."""

import json
import math
from typing import Any

import pytest

from cluster.triton_parameters import client_request, parsed
from cluster.validate import ClientRequest, ClientSampling


def test_every_name_means_what_vllm_means_by_it() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop_token_ids": [4, 5],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    request = client_request(
        {**sampling, "logit_bias": {"9": -1}, "max_tokens": 8, "n": 2, "stop": "x"}
        | {"include_stop_str_in_output": True, "skip_special_tokens": False}
    )
    assert request == ClientRequest(
        sampling=ClientSampling(**{**sampling, "stop_token_ids": (4, 5)}, logit_bias=((9, -1.0),)),
        max_tokens=8,
        n=2,
        stop=("x",),
        include_stop_str=True,
        skip_special_tokens=False,
    )


def test_numbers_may_come_as_text() -> None:
    request = client_request({"temperature": "0.1", "max_tokens": "100", "seed": "3", "top_k": "-1"})
    assert (request.sampling.temperature, request.max_tokens, request.sampling.seed) == (0.1, 100, 3)
    assert request.sampling.top_k == 0


def test_sixteen_tokens_unless_asked_and_all_that_fit_for_null() -> None:
    assert client_request({}).max_tokens == 16
    assert client_request({"max_tokens": None, "stop": None}) == ClientRequest()


def test_unknown_names_are_told() -> None:
    assert client_request({"best_of": 2, "top_q": 1, "seed": 1}).not_implemented == ("best_of", "top_q")
    assert client_request({"best_of": None}).not_implemented == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", []),
        ("temperature", 10**400),
        ("max_tokens", 1.5),
        ("max_tokens", "many"),
        ("max_tokens", False),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("stop_token_ids", 3),
        ("stop_token_ids", ["a"]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("ignore_eos", "true"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        client_request({name: value})


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000, '{"seed": ' + "9" * 5000 + "}"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^sampling_parameters is not"):
        parsed(text)


def test_what_python_adds_to_json_is_left_to_the_checks_of_every_protocol() -> None:
    request = client_request(parsed(json.dumps({"temperature": math.nan})))
    assert request.sampling.temperature is not None
    assert math.isnan(request.sampling.temperature)
