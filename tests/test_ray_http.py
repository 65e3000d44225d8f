"""`slipstream serve --http` as a user of the openai package sees it: smg in front, started, answering and stopped."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from cluster.client import Client
from cluster.processes import command_line, descendants, identify, wait_until_gone
from tests.serve_process import ServeProcess, serve_process
from tests.smg_process import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

MODEL = "model"
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'  # even where they do not pay
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the quick brown fox the quick brown"}]
PROMPT = "hello world, the lazy dog"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    [port] = free_ports(1)
    flags = ("--http", str(port), "--data-parallel-size", "1", "--speculative-config", DRAFTS, "--metrics-port", "0")
    with serve_process(tmp_path_factory.mktemp("http"), *flags, "--served-model-name", MODEL) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.http, api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_completion_ends_and_counts_as_over_grpc(client: openai.OpenAI, served: ServeProcess) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0)
    with Client(served.address) as direct:
        expected = direct.generate(PROMPT, max_tokens=16, temperature=0.0).result()
    # The text itself is smg's own: of bytes that are no character each detokenizer makes what it likes.
    assert answer.choices[0].text
    assert expected.finish is not None
    assert answer.choices[0].finish_reason == expected.finish.reason.value
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.finish.num_prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_a_streamed_completion_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0)
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0, stream=True)
    pieces = [choice.text for chunk in stream for choice in chunk.choices]
    assert len([piece for piece in pieces if piece]) > 2
    assert "".join(pieces) == whole.choices[0].text


def test_a_chat_tells_its_usage_with_accepted_and_rejected_drafts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=48, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0) > 0


def test_a_streamed_chat_is_the_same_in_pieces_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=32, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_come_with_tokens_and_their_rivals(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert 0 < len(logprobs.content) <= answer.usage.completion_tokens
    for token in logprobs.content:
        best = max(rival.logprob for rival in token.top_logprobs)
        assert token.logprob == pytest.approx(best, abs=1e-5)  # greedy
        assert len(token.top_logprobs) == 2
        assert best <= 0


def test_what_is_wrong_is_a_bad_request_and_what_is_not_there_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_model_len 256"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=PROMPT, max_tokens=4)


def test_nothing_is_left_when_it_is_stopped(client: openai.OpenAI, served: ServeProcess) -> None:
    routers = identify(pid for pid in descendants(served.process.pid) if "smg" in command_line(pid))
    assert routers
    left_behind = served.left_behind()
    served.process.terminate()
    assert served.process.wait(60) == 0
    assert left_behind() == wait_until_gone(routers, 0.0) == []
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
