"""slipstream.v1.Admin over a real server and channel on loopback."""

from collections.abc import AsyncIterator

import grpc
import pytest

from protos import slipstream_pb2 as pb
from tests.served import Served, served


@pytest.fixture
async def up() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


async def test_stats_of_scheduler_and_front_end(up: Served) -> None:
    await up.client.generate([5, 6], max_tokens=3).aresult()
    stats = await up.client.astats()
    assert stats["scheduler"]["num_running"] == 0
    [worker] = stats["scheduler"]["workers"]
    assert (worker["worker_id"], worker["num_blocks"], worker["session"]) == ("w0", 100, str(1 << 60))
    assert stats["front_end"]["name"] == "front"
    assert stats["front_end"]["num_requests"] == 1


async def test_reset_says_whether_running_requests_are_meant(up: Served) -> None:
    await up.client.areset_prefix_cache()
    await up.client.areset_prefix_cache(reset_running=True)
    assert up.link.resets == [False, True]


async def test_preempt_names_every_choice(up: Served) -> None:
    up.link.stall_at = 1
    generation = up.client.generate([5, 6], request_id="p", max_tokens=200, n=2)
    async for _ in generation:
        await up.client.apreempt("p")
        break
    await up.client.apreempt("elsewhere")
    assert up.link.preempted == ["p#0", "p#1", "elsewhere"]


async def test_preempt_needs_an_id(up: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="request_id is empty") as caught:
        await up.client.apreempt("")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_scheduler_that_is_away_is_unavailable(up: Served) -> None:
    up.link.available = False
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await up.client.astats()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_log_there_is_nothing_to_record(up: Served) -> None:
    parts = up.client.async_admin().Record(pb.RecordRequest())
    with pytest.raises(grpc.aio.AioRpcError, match="no events are recorded") as caught:
        await parts.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_swap_says_why_it_was_refused(up: Served) -> None:
    await up.client.aswap_weights("/models/other")
    assert up.link.swaps == ["/models/other"]
    for directory, reason in (("/models/none", "has no config.json"), ("", "directory is empty")):
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
            await up.client.aswap_weights(directory)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_story_is_the_scheduler_s(up: Served) -> None:
    assert await up.client.astory("r1") == "r1: never heard of it"
