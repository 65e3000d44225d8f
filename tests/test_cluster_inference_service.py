"""slipstream.v1.Inference over a real server and channel on loopback."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from cluster.call import choice_seed
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc
from protos.generate import ROOT
from tests.fake_link import FakeLink, expected_tokens
from tests.served import TINY, Served, rest_of, served

PROMPT = [10, 20, 30]


@pytest.fixture
async def up() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


def stub(up: Served) -> Any:
    return slipstream_pb2_grpc.InferenceStub(up.channel)  # type: ignore[no-untyped-call]


def asked(**fields: Any) -> Any:
    if "text" not in fields and "chat" not in fields:
        fields.setdefault("tokens", pb.TokenIds(ids=PROMPT))
    fields.setdefault("sampling", pb.Sampling(seed=7))
    fields.setdefault("max_tokens", 12)
    return pb.GenerateRequest(**fields)


async def read(up: Served, message: Any, **options: Any) -> list[Any]:
    return [response async for response in stub(up).Generate(message, **options)]


async def refused(up: Served, message: Any, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(up, message, **options)
    return caught.value


async def test_ids_and_text_come_with_their_absolute_offsets(up: Served) -> None:
    responses = await read(up, asked())
    token_ids: list[int] = []
    text = ""
    for response in responses:
        assert response.output_offset == len(token_ids)
        assert response.text_offset == len(text)
        token_ids.extend(response.token_ids)
        text += response.text
    assert token_ids == expected_tokens(PROMPT, 7, 12)
    assert text == TINY.decode(token_ids)
    finish = responses[-1].finish
    assert (finish.reason, finish.prompt_tokens, finish.output_tokens) == ("length", 3, 12)
    assert (finish.draft_tokens, finish.accepted_tokens, finish.cached_tokens) == (9, 5, 16)
    assert [response.HasField("start") for response in responses] == [True] + [False] * (len(responses) - 1)


async def test_the_seed_that_was_used_is_returned_and_gives_the_same_stream(up: Served) -> None:
    first = await read(up, asked(sampling=pb.Sampling()))
    seed = first[0].start.seed
    again = await read(up, asked(sampling=pb.Sampling(seed=seed)))
    token_ids = [token_id for response in first for token_id in response.token_ids]
    assert token_ids == [token_id for response in again for token_id in response.token_ids]
    assert token_ids == expected_tokens(PROMPT, seed, 12)


async def test_text_and_chat_prompts_are_tokenized(up: Served) -> None:
    await read(up, asked(text="hello world"))
    assert up.link.submitted[0].prompt_token_ids.tolist() == TINY.encode("hello world").tolist()
    error = await refused(up, asked(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no chat template" in str(error.details())


async def test_all_fields_reach_the_scheduler(up: Served) -> None:
    sampling = pb.Sampling(
        temperature=0.8, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={5: 1.5, 4: -1.0}, seed=3, stop_token_ids=[300], min_tokens=2,
        ignore_eos=True,
    )  # fmt: skip
    await read(
        up, asked(sampling=sampling, max_drafts=2, priority=-3, cache_salt="s", tenant="t", logprobs=1), timeout=60
    )
    [request] = up.link.submitted
    assert (request.max_drafts, request.priority, request.cache_salt, request.tenant) == (2, -3, "s", "t")
    got = request.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.8, 0.9, 40, 0.1)
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.1, 0.5, -0.5)
    assert got.logit_bias == ((4, -1.0), (5, 1.5))
    assert (got.seed, got.stop_token_ids, got.min_tokens, got.eos_token_ids, got.num_logprobs) == (3, (300,), 2, (), 1)


async def test_logprobs_come_with_their_tokens(up: Served) -> None:
    for response in await read(up, asked(logprobs=2)):
        assert list(response.logprobs.logprobs) == pytest.approx([-t / 1000 for t in response.token_ids])
        assert response.logprobs.num_top == 2 or not response.token_ids
        assert len(response.logprobs.top_token_ids) == 2 * len(response.token_ids)


async def test_trap_13_a_stop_string_over_the_wire() -> None:
    script = TINY.encode("hello, world. the lazy dog jumps").tolist()
    async with served(FakeLink(script=script)) as up:
        responses = await read(up, asked(stop=[". t"], max_tokens=20))
        assert "".join(response.text for response in responses) == "hello, world"
        assert responses[-1].finish.stop_string == ". t"
        await up.gone()
        responses = await read(up, asked(stop=[". t"], include_stop_str=True, max_tokens=20))
        assert "".join(response.text for response in responses) == "hello, world. t"


async def test_trap_15_a_stop_id_over_the_wire() -> None:
    async with served(FakeLink(script=[10, 42, 12])) as up:
        responses = await read(up, asked(sampling=pb.Sampling(stop_token_ids=[42])))
        assert [token_id for response in responses for token_id in response.token_ids] == [10, 42]
        finish = responses[-1].finish
        assert (finish.reason, finish.stop_token_id, finish.HasField("stop_token_id")) == ("stop", 42, True)
        assert "".join(response.text for response in responses) == TINY.decode([10])


async def test_n_choices_are_separate_streams(up: Served) -> None:
    responses = await read(up, asked(n=2))
    for index in range(2):
        mine = [response for response in responses if response.index == index]
        seed = choice_seed(7, index, 2)
        assert (mine[0].start.seed, mine[0].start.choice_seed) == (7, seed)
        assert [token_id for response in mine for token_id in response.token_ids] == expected_tokens(PROMPT, seed, 12)
        assert mine[-1].finish.reason == "length"


async def test_a_stream_resumes_after_the_tokens_it_is_given(up: Served) -> None:
    whole = expected_tokens(PROMPT, 7, 12)
    responses = await read(up, asked(resume_token_ids=whole[:5], attempt=1))
    assert responses[0].output_offset == 5
    assert [token_id for response in responses for token_id in response.token_ids] == whole[5:]
    text = TINY.decode(whole)
    assert "".join(response.text for response in responses) == text[responses[0].text_offset :]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": pb.TokenIds()}, "prompt is empty"),
        ({"max_drafts": -1}, "max_drafts"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "temperature"),
        ({"model": "other"}, "model 'other'"),
        ({"max_tokens": 1000}, "max_model_len 256"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_invalid_argument_and_submits_nothing(up: Served, fields: Any, message: str) -> None:
    error = await refused(up, asked(**fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(error.details())
    assert up.link.submitted == []


async def test_a_field_this_server_does_not_know_is_refused(up: Served) -> None:
    newer = pb.GenerateRequest.FromString(asked().SerializeToString() + b"\xf8\x07\x01")
    error = await refused(up, newer)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest field 127: not implemented" in str(error.details())


async def test_a_live_id_is_already_exists(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(request_id="same", max_tokens=200))
    await call.read()
    error = await refused(up, asked(request_id="same"))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await up.gone()
    up.link.stall_at = None
    assert len(await read(up, asked(request_id="same"))) > 0


async def test_a_full_queue_is_resource_exhausted_with_both_retry_hints() -> None:
    async with served(FakeLink(max_live=0)) as up:
        error = await refused(up, asked())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(error.trailing_metadata())
        assert trailers["retry-after-ms"] == "1500"
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1500


async def test_cancelling_the_rpc_cancels_in_the_scheduler(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(max_tokens=250))
    await call.read()
    call.cancel()
    await up.gone()
    assert len(up.link.cancelled) == 1


READER = """
import sys
from cluster.client import Client
for output in Client(sys.argv[1]).generate([10, 20, 30], max_tokens=200):
    print("reading", flush=True)
"""


async def test_a_client_that_dies_is_cancelled_in_the_scheduler(up: Served) -> None:
    up.link.stall_at = 1
    command = (sys.executable, "-c", READER, up.server.address)
    reader = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert await reader.stdout.readline() == b"reading\n"
    assert up.link.live
    reader.kill()
    await reader.communicate()
    await up.gone()
    assert len(up.link.cancelled) == 1


async def test_a_deadline_ends_the_request_in_the_scheduler(up: Served) -> None:
    up.link.stall_at = 1
    error = await refused(up, asked(max_tokens=250), timeout=0.03)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await up.gone()


async def test_a_deadline_is_carried_to_the_scheduler(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(max_tokens=250), timeout=30)
    await call.read()
    [live] = up.link.live.values()
    assert live.deadline_s is not None
    assert 20 < live.deadline_s - asyncio.get_running_loop().time() < 31
    call.cancel()
    await up.gone()


async def test_cancel_by_id_ends_the_stream_with_abort(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(request_id="c", max_tokens=250))
    await call.read()
    assert (await stub(up).Cancel(pb.CancelRequest(request_id="c"))).found
    assert up.link.live == {}
    last = (await rest_of(call))[-1]
    assert last.finish.reason == "abort"
    assert not (await stub(up).Cancel(pb.CancelRequest(request_id="c"))).found
    assert not (await stub(up).Cancel(pb.CancelRequest(request_id="never"))).found


async def test_a_lost_scheduler_is_unavailable(up: Served) -> None:
    up.link.stall_at = 1
    call = stub(up).Generate(asked(max_tokens=250))
    await call.read()
    up.front_end.scheduler_lost("it is gone")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_many_streams_at_once_are_each_right() -> None:
    async with served(FakeLink(max_live=1000)) as up:

        async def one(seed: int) -> None:
            responses = await read(up, asked(sampling=pb.Sampling(seed=seed)))
            token_ids = [token_id for response in responses for token_id in response.token_ids]
            assert token_ids == expected_tokens(PROMPT, seed, 12)

        await asyncio.gather(*map(one, range(200)))
