"""Each rule about bad input: the error names the field and its limit."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.call import TextRequest
from cluster.text import ChatMessage
from cluster.validate import MAX_LOGPROBS, MAX_N, ClientRequest, ClientSampling, checked
from tests.served import TINY, tiny_model

MODEL = tiny_model()
GOOD = ClientRequest(prompt=[5, 6, 7], max_tokens=10)


async def check(**changes: Any) -> TextRequest:
    sampling = {k: changes.pop(k) for k in list(changes) if k in ClientSampling.__dataclass_fields__}
    return await checked(replace(GOOD, sampling=ClientSampling(**sampling), **changes), MODEL, TINY)


BAD = [
    ("prompt is empty", {"prompt": []}),
    ("prompt is empty", {"prompt": ""}),
    ("prompt is empty", {"prompt": None}),
    (r"prompt token ids: 315 is outside the vocabulary \[0, 315\)", {"prompt": [5, 315]}),
    (r"prompt token ids: -1 is outside the vocabulary \[0, 315\)", {"prompt": [-1]}),
    (r"3 tokens \+ max_tokens 254 is 257, beyond max_model_len 256", {"max_tokens": 254}),
    (r"prompt has 256 tokens; .* max_model_len 256", {"prompt": [5] * 256}),
    (r"prompt has 100000 characters, more than \d+ cannot fit max_model_len 256", {"prompt": "x" * 100_000}),
    ("max_tokens must be at least 1, got 0", {"max_tokens": 0}),
    ("max_tokens must be at least 1, got -3", {"max_tokens": -3}),
    (r"max_drafts \(K\) must be at least 0, got -1", {"max_drafts": -1}),
    (r"temperature must be in \[0, inf\), got -0.1", {"temperature": -0.1}),
    (r"temperature must be in \[0, inf\), got nan", {"temperature": math.nan}),
    (r"temperature must be in \[0, inf\), got inf", {"temperature": math.inf}),
    (r"top_p must be in \(0, 1\], got 0", {"top_p": 0.0}),
    (r"top_p must be in \(0, 1\], got 1.5", {"top_p": 1.5}),
    (r"top_p must be in \(0, 1\], got nan", {"top_p": math.nan}),
    (r"min_p must be in \[0, 1\], got -0.5", {"min_p": -0.5}),
    (r"min_p must be in \[0, 1\], got 2", {"min_p": 2.0}),
    (r"top_k must be in \[0, \d+\], got -1", {"top_k": -1}),
    (r"repetition_penalty must be in \(0, inf\), got 0", {"repetition_penalty": 0.0}),
    (r"presence_penalty must be in \[-2, 2\], got 2.5", {"presence_penalty": 2.5}),
    (r"frequency_penalty must be in \[-2, 2\], got -3", {"frequency_penalty": -3.0}),
    (r"logit_bias must be in \[-100, 100\], got 101", {"logit_bias": ((5, 101.0),)}),
    (r"logit_bias: 999 is outside the vocabulary", {"logit_bias": ((999, 1.0),)}),
    (r"seed must be in \[0, 18446744073709551615\], got -1", {"seed": -1}),
    (r"stop_token_ids: 400 is outside the vocabulary", {"stop_token_ids": (400,)}),
    ("min_tokens must be at most max_tokens 10, got 11", {"min_tokens": 11}),
    (r"min_tokens must be in \[0, \d+\], got -1", {"min_tokens": -1}),
    (rf"n must be in \[1, {MAX_N}\], got 0", {"n": 0}),
    (rf"n must be in \[1, {MAX_N}\], got 129", {"n": 129}),
    (rf"logprobs must be in \[0, {MAX_LOGPROBS}\], got 21", {"num_logprobs": 21}),
    (rf"logprobs must be in \[0, {MAX_LOGPROBS}\], got -1", {"num_logprobs": -1}),
    ("each stop string must have 1 to 1024 characters, got 0", {"stop": ("",)}),
    ("stop must be at most 16 strings, got 17", {"stop": tuple("abcdefghijklmnopq")}),
    ("model 'other' is not served here; the model is 'tiny'", {"model": "other"}),
    ("json_schema, media_refs: not implemented", {"not_implemented": ("json_schema", "media_refs")}),
    ("resume_token_ids needs n = 1", {"n": 2, "resume_token_ids": (5,)}),
    ("resume_token_ids must be at most max_tokens 10 tokens, got 11", {"resume_token_ids": (5,) * 11}),
    ("resume_token_ids: 999 is outside the vocabulary", {"resume_token_ids": (999,)}),
    ("request_id must be at most 256 characters", {"request_id": "x" * 257}),
    ("cache_salt must be at most 256 characters", {"cache_salt": "x" * 257}),
    (r"priority must be in \[-2147483648, 2147483647\]", {"priority": 1 << 31}),
    (r"attempt must be in \[0, 1048576\]", {"attempt": 1 << 21}),
]


@pytest.mark.parametrize(("message", "changes"), BAD, ids=[message for message, _ in BAD])
async def test_bad_input_is_a_clear_error(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        await check(**changes)
    assert "\n" not in str(caught.value)


async def test_without_a_tokenizer_text_is_refused_and_ids_are_fine() -> None:
    for changes in ({"prompt": "hi"}, {"prompt": [ChatMessage(role="user", content="hi")]}, {"stop": ("x",)}):
        with pytest.raises(ValueError, match="no tokenizer"):
            await checked(replace(GOOD, **changes), MODEL, None)
    assert (await checked(GOOD, MODEL, None)).prompt_token_ids.tolist() == [5, 6, 7]


async def test_what_is_not_given_takes_the_field_s_defaults() -> None:
    request = await check(max_tokens=None)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.eos_token_ids == (tiny_model().eos_token_ids)
    assert request.max_tokens == 253
    assert request.seed is None
    assert request.request_id
    assert request.prompt_token_ids.dtype == np.int32


async def test_limits_themselves_are_allowed() -> None:
    request = await check(
        max_tokens=253, temperature=0.0, top_p=1.0, n=MAX_N, num_logprobs=20, seed=(1 << 64) - 1, max_drafts=0
    )
    assert request.n == MAX_N
    assert request.sampling.num_logprobs == 20


async def test_ignore_eos_leaves_no_eos() -> None:
    assert (await check(ignore_eos=True)).sampling.eos_token_ids == ()


async def test_text_and_its_token_ids_mean_the_same_prompt() -> None:
    text = await check(prompt="hello world")
    ids = await check(prompt=TINY.encode("hello world").tolist())
    assert text.prompt_token_ids.tolist() == ids.prompt_token_ids.tolist()


async def test_a_long_text_that_could_fit_is_encoded() -> None:
    big = replace(MODEL, max_model_len=50_000)
    request = await checked(ClientRequest(prompt="the quick brown fox " * 1000), big, TINY)
    assert len(request.prompt_token_ids) > 1000
