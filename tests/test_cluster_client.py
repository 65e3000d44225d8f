"""The client: for and async for, whole answers, and resumption without a wrong, missing or repeated token."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cluster.client import Client
from cluster.server import Server, ServerConfig
from cluster.serving import State
from scheduler.request import FinishReason
from tests.fake_link import expected_tokens
from tests.served import TINY, Served, served

PROMPT = [10, 20, 30]


@pytest.fixture
async def up() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


async def test_async_for_gives_outputs_as_they_come(up: Served) -> None:
    token_ids: list[int] = []
    generation = up.client.generate(PROMPT, max_tokens=12, seed=7)
    async for output in generation:
        assert output.offset == len(token_ids)
        token_ids.extend(output.token_ids)
    assert token_ids == expected_tokens(PROMPT, 7, 12)
    assert generation.seed == 7
    assert generation.starts[0].request_id == generation.request_id


async def test_for_does_the_same_in_a_thread(up: Served) -> None:
    def read() -> list[int]:
        with Client(up.server.address) as client:
            assert client.stats()["front_end"]["num_requests"] == 0
            client.reset_prefix_cache()
            client.preempt("never")
            assert not client.cancel("never")
            outputs = list(client.generate(PROMPT, max_tokens=12, seed=7))
            return [token_id for output in outputs for token_id in output.token_ids]

    assert await asyncio.to_thread(read) == expected_tokens(PROMPT, 7, 12)


async def test_a_whole_answer(up: Served) -> None:
    answer = await up.client.generate(PROMPT, max_tokens=12, seed=7, logprobs=0).aresult()
    assert answer.token_ids == expected_tokens(PROMPT, 7, 12)
    assert answer.text == TINY.decode(answer.token_ids)
    assert answer.logprobs == pytest.approx([-token_id / 1000 for token_id in answer.token_ids])
    assert answer.finish is not None
    assert answer.finish.reason is FinishReason.LENGTH
    assert len(await up.client.generate(PROMPT, max_tokens=3, n=2).aresults()) == 2


async def test_leaving_the_loop_cancels(up: Served) -> None:
    up.link.stall_at = 1
    async for _ in up.client.generate(PROMPT, max_tokens=250):
        break
    await up.gone()

    def leave() -> None:
        with Client(up.server.address) as client:
            for _ in client.generate(PROMPT, max_tokens=250):
                break

    await asyncio.to_thread(leave)
    await up.gone()


async def test_cancel_from_beside(up: Served) -> None:
    up.link.stall_at = 1
    generation = up.client.generate(PROMPT, max_tokens=250)
    finishes = []
    async for output in generation:
        if output.offset == 0:
            assert await up.client.acancel(generation.request_id)
        finishes.append(output.finish)
    assert finishes[-1] is not None
    assert finishes[-1].reason is FinishReason.ABORT


async def test_a_timeout_is_a_deadline(up: Served) -> None:
    up.link.stall_at = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await up.client.generate(PROMPT, max_tokens=250, timeout_s=0.03).aresult()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_chat_takes_messages_as_mappings(up: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no chat template"):
        await up.client.chat([{"role": "user", "content": "hi"}], max_tokens=3).aresult()


def test_resume_is_for_one_choice() -> None:
    with pytest.raises(ValueError, match="resume needs n = 1"):
        Client("127.0.0.1:1").generate(PROMPT, n=2, resume=True)


async def lose_stream(up: Served) -> None:
    """The front end fails what is open, as when its process dies; the server goes on."""
    up.front_end.fail_open("a test")


async def test_a_stream_told_to_resume_goes_on_after_unavailable(up: Served) -> None:
    generation = up.client.generate(PROMPT, max_tokens=60, seed=None, resume=True)
    token_ids: list[int] = []
    text, num_losses = "", 0
    async for output in generation:
        assert output.offset == len(token_ids)
        assert output.text_offset == len(text)
        token_ids.extend(output.token_ids)
        text += output.text
        if len(token_ids) > 15 * (num_losses + 1) and num_losses < 3:
            num_losses += 1
            await lose_stream(up)
    assert num_losses == 3
    assert generation.seed is not None
    assert token_ids == expected_tokens(PROMPT, generation.seed, 60)
    assert text == TINY.decode(token_ids)
    assert max(request.attempt for request in up.link.submitted) > 0


async def test_without_resume_unavailable_is_raised(up: Served) -> None:
    up.link.stall_at = 1

    async def read() -> None:
        async for output in up.client.generate(PROMPT, max_tokens=200):
            if output.offset == 0:
                await lose_stream(up)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_resumes_at_a_server_that_takes_over_the_port() -> None:
    async with served() as first:
        token_ids: list[int] = []
        generation = first.client.generate(PROMPT, max_tokens=40, seed=7, resume=True)
        second: Any = None
        async for output in generation:
            token_ids.extend(output.token_ids)
            if second is None:
                await first.server.stop(0.0)
                first.link.restart()
                first.front_end.scheduler_restarted(first.link.life)
                second = Server(first.serving, ServerConfig(port=first.server.port))
                await second.start()
        assert token_ids == expected_tokens(PROMPT, 7, 40)
        await second.stop(0.0)


async def test_a_stream_resumes_at_another_front_end() -> None:
    async with served() as first, served() as second:
        first.link.stall_at = 5
        async with Client(f"{first.server.address},{second.server.address}") as client:
            generation = client.generate(PROMPT, max_tokens=40, seed=7, resume=True)
            taken: list[int] = []
            async for output in generation:
                taken.extend(output.token_ids)
                if len(taken) >= 5 and first.serving.state is State.SERVING:
                    await first.server.stop(0.0)
    assert taken == expected_tokens(PROMPT, 7, 40)
    resumed = second.link.submitted[0].resume_token_ids.tolist()
    assert len(resumed) >= 5
    assert resumed == taken[: len(resumed)]
    assert generation.num_repeated_tokens == 0


async def test_resumption_gives_up_after_a_while() -> None:
    generation = Client("127.0.0.1:1").generate(PROMPT, resume=True, resume_timeout_s=0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generation.aresult()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
