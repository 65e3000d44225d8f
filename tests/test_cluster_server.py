"""The port: health, reflection, limits, readiness, draining, and a port that is taken."""

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.server import SERVICE_NAMES, Server, ServerConfig
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc
from tests.fake_link import FakeLink, expected_tokens
from tests.served import rest_of, served, tiny_model

SERVING, NOT_SERVING = 1, 2


async def health(channel: Any, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_follows_the_server_s_life() -> None:
    async with served(ready=False) as up:
        for name in ("", *SERVICE_NAMES):
            assert await health(up.channel, name) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await up.client.generate([5], max_tokens=2).aresult()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await up.server.ready()
        for name in ("", "vllm.grpc.engine.VllmEngine", "slipstream.v1.Inference", "slipstream.v1.Admin"):
            assert await health(up.channel, name) == SERVING
        assert (await up.client.generate([5], max_tokens=2).aresult()).token_ids


async def test_health_can_be_watched() -> None:
    async with served(ready=False) as up:
        watch = health_pb2_grpc.HealthStub(up.channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == NOT_SERVING
        await up.server.ready()
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_reflection_lists_every_service() -> None:
    async with served() as up:
        stub = reflection_pb2_grpc.ServerReflectionStub(up.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        [response] = [response async for response in call]
        names = {service.name for service in response.list_services_response.service}
        assert {*SERVICE_NAMES, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_a_value_error_of_one_line() -> None:
    async with served() as up:
        second = Server(up.serving, ServerConfig(port=up.server.port))
        with pytest.raises(
            ValueError, match=rf"cannot listen on 127.0.0.1:{up.server.port}: the port is in use"
        ) as caught:
            await second.start()
        assert "\n" not in str(caught.value)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match="in use"):
            async with served(config=ServerConfig(port=port)):
                pass


async def test_a_prompt_of_16_mb_is_refused_before_it_is_read() -> None:
    async with served() as up:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await up.client.generate("x" * (17 << 20), max_tokens=2).aresult()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError, match="characters") as caught:
            await up.client.generate("x" * (15 << 20), max_tokens=2).aresult()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert up.link.submitted == []


async def test_the_size_limit_is_configurable() -> None:
    async with served(config=ServerConfig(max_receive_bytes=1000)) as up:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await up.client.generate([5] * 2000, max_tokens=2).aresult()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_draining_refuses_new_requests_and_lets_open_ones_end() -> None:
    async with served() as up:
        stub = slipstream_pb2_grpc.InferenceStub(up.channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5]), max_tokens=200, sampling=pb.Sampling(seed=1))
        call = stub.Generate(request)
        first = await call.read()
        stopping = asyncio.create_task(up.server.stop(5.0))
        await asyncio.sleep(0.01)
        assert await health(up.channel, "") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await up.client.generate([5], max_tokens=2).aresult()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        rest = [token_id for response in await rest_of(call) for token_id in response.token_ids]
        assert list(first.token_ids) + rest == expected_tokens([5], 1, 200)
        await stopping


async def test_what_is_open_after_the_grace_is_unavailable() -> None:
    async with served() as up:
        up.link.stall_at = 1
        stub = slipstream_pb2_grpc.InferenceStub(up.channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=[5]), max_tokens=250))
        await call.read()
        await up.server.stop(0.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_a_burst_of_2000_calls_is_served() -> None:
    async with served(FakeLink(max_live=4000)) as up:
        calls = [up.client.generate([5, i % 300], max_tokens=2, seed=i).aresult() for i in range(2000)]
        for i, answer in enumerate(await asyncio.gather(*calls)):
            assert answer.token_ids == expected_tokens([5, i % 300], i, 2)


async def test_a_client_that_stops_reading_is_paused_and_at_last_cancelled_and_holds_up_nobody() -> None:
    model = tiny_model(max_model_len=20_000)
    async with (
        served(FakeLink(), model=model, slowest_reader_s=0.5) as up,
        # Without it the client's own buffers grow with what they hold.
        grpc.aio.insecure_channel(up.server.address, [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        stub = slipstream_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        tokens, sampling = pb.TokenIds(ids=[5]), pb.Sampling(seed=1)
        call = stub.Generate(pb.GenerateRequest(tokens=tokens, max_tokens=10_000, logprobs=20, sampling=sampling))
        await call.read()
        for seed in range(20):  # meanwhile others are served
            answer = await up.client.generate([5, 6], max_tokens=20, seed=seed).aresult()
            assert answer.token_ids == expected_tokens([5, 6], seed, 20)
        await up.gone(timeout_s=20.0)
        assert [request_id for request_id, _ in up.link.cancelled] == [up.link.submitted[0].request_id]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_storm_of_cancels_ends_those_streams_and_no_other() -> None:
    async with served(FakeLink(max_live=1000)) as up:
        stub = slipstream_pb2_grpc.InferenceStub(up.channel)  # type: ignore[no-untyped-call]
        staying = [asyncio.create_task(up.client.generate([5, 6], max_tokens=200, seed=i).aresult()) for i in range(10)]

        async def leave(index: int) -> None:
            tokens, sampling = pb.TokenIds(ids=[5, 7]), pb.Sampling(seed=index)
            call = stub.Generate(pb.GenerateRequest(tokens=tokens, max_tokens=250, sampling=sampling))
            if index % 2:
                await call.read()
            call.cancel()

        await asyncio.gather(*(leave(index) for index in range(300)))
        for seed, answer in enumerate(await asyncio.gather(*staying)):
            assert answer.token_ids == expected_tokens([5, 6], seed, 200)
        await up.gone(timeout_s=20.0)
