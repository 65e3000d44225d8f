"""OpenAI clients reach `slipstream serve` through the smg router, which knows it only by its gRPC protocol.

Server and router are processes of their own: two copies of one proto cannot live in one process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from cluster.client import Client
from cluster.model_source import resolve_model
from cluster.progress import Display
from tests.smg_process import smg_router

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

MODEL = "smollm2"
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'  # even where they do not pay
FLAGS = ("--data-parallel-size", "1", "--max-model-len", "2048", "--threads", "1", "--speculative-config", DRAFTS)
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours."}]
COPY: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Repeat three times: the quick brown fox jumps over the lazy dog."}
]


@contextmanager
def process(*command: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command until the block ends; asked to stop, then awaited."""
    environment = {**os.environ, "XDG_STATE_HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as started:
        try:
            yield started
        finally:
            started.terminate()
            if started.stdout is not None:
                started.stdout.close()
            started.wait(60)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deployment of the real model."""
    command = (sys.executable, "-m", "cluster.cli", "serve", "--model", MODEL, "--port", "0")
    home = tmp_path_factory.mktemp("serve")
    with process(*command, *FLAGS, home=home) as serve:
        assert serve.stdout is not None
        ready = next((line for line in serve.stdout if line.startswith(b"ready ")), b"")
        assert ready, "serve ended without being ready"
        yield ready.decode().split()[1]


@pytest.fixture(scope="module")
def router(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """An OpenAI client of the router in front of it."""
    with Display() as display:
        directory = resolve_model(MODEL, display)
    with smg_router([address], directory, tmp_path_factory.mktemp("smg"), model=MODEL) as router:
        yield router.client


def speculated(usage: CompletionUsage | None) -> tuple[int, int]:
    """Accepted and rejected drafts."""
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    return details.accepted_prediction_tokens or 0, details.rejected_prediction_tokens or 0


def test_a_chat_completion_with_its_speculation_counts(router: openai.OpenAI) -> None:
    copy = router.chat.completions.create(model=MODEL, messages=COPY, max_tokens=32, temperature=0)
    assert "quick brown fox" in (copy.choices[0].message.content or "")
    accepted, _ = speculated(copy.usage)
    assert accepted > 0
    answer = router.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=32, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 32
    accepted, rejected = speculated(answer.usage)
    assert accepted + rejected > 0


def test_a_streamed_chat_completion_is_the_same_answer(router: openai.OpenAI) -> None:
    whole = router.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    stream = router.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, reasons, usage = [], [], None
    for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        usage = chunk.usage or usage
    assert len([piece for piece in pieces if piece]) > 5
    assert "".join(pieces) == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert speculated(usage) == speculated(whole.usage)


def test_a_sampled_answer_repeats_with_its_seed(router: openai.OpenAI) -> None:
    answers = [
        router.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0.8, seed=5, n=2)
        for _ in range(2)
    ]
    first, second = ([choice.message.content for choice in answer.choices] for answer in answers)
    assert first == second
    assert len(set(first)) == 2


def test_a_stop_string_ends_the_answer(router: openai.OpenAI) -> None:
    answer = router.chat.completions.create(model=MODEL, messages=COPY, max_tokens=32, temperature=0, stop=["jumps"])
    assert (answer.choices[0].message.content or "").rstrip().endswith("fox")
    assert answer.choices[0].finish_reason == "stop"


def test_what_is_not_implemented_is_a_bad_request_naming_it(router: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="json_schema: not implemented"):
        router.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=8, response_format={"type": "json_object"}
        )
    with pytest.raises(openai.BadRequestError, match="max_model_len 2048"):
        router.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=100_000)


def test_a_client_that_leaves_is_cancelled_in_the_core(router: openai.OpenAI, address: str) -> None:
    stream = router.chat.completions.create(model=MODEL, messages=COPY, max_tokens=1900, temperature=1.0, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    with Client(address) as client:
        while (stats := client.stats()["scheduler"])["num_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert stats["placeholders"] == 0
