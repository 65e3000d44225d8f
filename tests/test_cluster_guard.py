"""Tokens on a real port: who may do what, as which tenant, and calls that never say what they want."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from cluster.client import Client
from cluster.server import ServerConfig
from tests.fake_link import FakeLink
from tests.served import Served, served
from tests.whole_stack import whole_stack

TOKENS = "alpha acme limit=2\nalpha-2 acme\nbeta globex\n"
GENERATE = "/slipstream.v1.Inference/Generate"


@asynccontextmanager
async def guarded(
    tmp_path: Path, *, admin: bool = False, link: FakeLink | None = None, **limits: Any
) -> AsyncIterator[Served]:
    """A server that asks for tokens; its own client has none."""
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "admin").write_text("omega\n")
    config = ServerConfig(
        auth_token_file=tmp_path / "tokens", admin_token_file=tmp_path / "admin" if admin else None, **limits
    )
    async with served(link, config=config) as up:
        yield up


@asynccontextmanager
async def clients(up: Served, *tokens: str | None) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(up.server.address, token=token)) for token in tokens]


async def code_of(call: Any) -> str:
    """The status name an awaitable fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert not {"alpha", "beta", "omega", "nonsense"} & set(str(caught.value.details()).split())
    return str(caught.value.code().name)


async def metadata_of(up: Served, *pairs: tuple[str, str]) -> str:
    return await code_of(up.channel.unary_stream(GENERATE)(b"", metadata=pairs).read())


async def test_calls_without_a_known_token_are_refused_and_health_is_not(tmp_path: Path) -> None:
    async with guarded(tmp_path) as up, clients(up, None, "nonsense", "alpha") as (without, wrong, right):
        for client in (without, wrong):
            assert await code_of(client.generate([5], max_tokens=2).aresult()) == "UNAUTHENTICATED"
            assert await code_of(client.astats()) == "UNAUTHENTICATED"
            assert await code_of(client.acancel("r")) == "UNAUTHENTICATED"
        engine = vllm_engine_pb2_grpc.VllmEngineStub(up.channel)
        assert await code_of(engine.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())) == "UNAUTHENTICATED"
        reflection = reflection_pb2_grpc.ServerReflectionStub(up.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        assert await code_of(reflection.read()) == "UNAUTHENTICATED"
        assert up.link.submitted == []
        check = health_pb2_grpc.HealthStub(up.channel).Check
        assert (await check(health_pb2.HealthCheckRequest(service=""))).status == 1
        assert (await engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
        assert len((await right.generate([5], max_tokens=2).aresult()).token_ids) == 2
        assert up.server.guard.num_refused["UNAUTHENTICATED"] == 8


async def test_a_token_comes_as_one_bearer(tmp_path: Path) -> None:
    async with guarded(tmp_path) as up:
        for value in ("alpha", "Basic alpha", "Bearer", "Bearer ", "Bearer alpha beta", "Bearer " + "a" * 5000):
            assert await metadata_of(up, ("authorization", value)) == "UNAUTHENTICATED", value
        twice = [("authorization", "Bearer alpha"), ("authorization", "Bearer beta")]
        assert await metadata_of(up, *twice) == "UNAUTHENTICATED"
        assert await metadata_of(up, ("authorization", "bearer  alpha")) == "INVALID_ARGUMENT"  # in, and empty


async def test_the_tenant_is_the_token_s_whatever_the_request_says(tmp_path: Path) -> None:
    async with guarded(tmp_path) as up, clients(up, "alpha", "beta") as (acme, globex):
        for client in (acme, globex):
            await client.generate([5], request_id="r", tenant="umbrella", cache_salt="s", max_tokens=2).aresult()
        assert [(r.request_id, r.tenant, r.cache_salt) for r in up.link.submitted] == [
            ("acme/r", "acme", "s"),
            ("globex/r", "globex", "s"),
        ]


async def test_a_tenant_reaches_no_request_of_another(tmp_path: Path) -> None:
    link = FakeLink()
    link.stall_at = 1
    async with guarded(tmp_path, link=link) as up, clients(up, "alpha", "beta") as (acme, globex):
        stream = acme.generate([5], request_id="r", max_tokens=9)
        outputs = aiter(stream)
        await anext(outputs)
        assert stream.starts[0].request_id == "r"
        assert not await globex.acancel("r")
        assert not await globex.acancel("acme/r")
        for call in (globex.apreempt("acme/r"), globex.astats(), globex.areset_prefix_cache()):
            assert await code_of(call) == "PERMISSION_DENIED"  # nobody's, while nobody is an operator
        taken = aiter(globex.generate([7], request_id="r", max_tokens=9))  # neither ALREADY_EXISTS nor a takeover
        await anext(taken)
        assert (link.preempted, sorted(link.live)) == ([], ["acme/r", "globex/r"])
        assert await acme.acancel("r")
        assert await globex.acancel("r")
        assert [output.finish.reason.value async for output in outputs if output.finish] == ["abort"]
        await taken.aclose()


async def test_a_tenant_s_limit_counts_choices_of_all_its_tokens_and_no_other_tenant(tmp_path: Path) -> None:
    link = FakeLink()
    link.stall_at = 1
    async with guarded(tmp_path, link=link) as up, clients(up, "alpha", "alpha-2", "beta") as (one, two, other):
        first = aiter(one.generate([5], request_id="first", max_tokens=9))
        await anext(first)
        assert await code_of(two.generate([5], n=2, max_tokens=2).aresult()) == "RESOURCE_EXHAUSTED"
        second = aiter(two.generate([5], max_tokens=9))
        await anext(second)
        assert await code_of(one.generate([5], max_tokens=2).aresult()) == "RESOURCE_EXHAUSTED"
        third = aiter(other.generate([5], n=3, max_tokens=9))
        await anext(third)
        await second.aclose()
        await until(lambda: up.front_end.num_open_requests == 2)
        second = aiter(one.generate([5], max_tokens=9))
        await anext(second)
        for outputs in (first, second, third):
            await outputs.aclose()


async def test_a_resumed_stream_takes_its_own_place_under_the_limit(tmp_path: Path) -> None:
    link = FakeLink()
    async with guarded(tmp_path, link=link) as up, clients(up, "alpha") as (client,):
        whole = (await client.generate([5], seed=1, max_tokens=8).aresult()).token_ids
        link.stall_at = 3
        filler = aiter(client.generate([6], max_tokens=9))
        await anext(filler)
        outputs = aiter(client.generate([5], seed=1, request_id="r", max_tokens=8, resume=True))
        got = list((await anext(outputs)).token_ids)
        up.front_end.fail_open("lost for a moment")
        link.stall_at = None
        got += [token_id async for output in outputs for token_id in output.token_ids]
        assert got == whole
        await filler.aclose()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def test_with_a_file_of_their_own_operators_calls_need_its_tokens(tmp_path: Path) -> None:
    async with guarded(tmp_path, admin=True) as up, clients(up, None, "beta", "omega") as (nobody, tenant, operator):
        calls: list[Callable[[Client], Awaitable[Any]]] = [
            lambda client: client.astats(),
            lambda client: client.areset_prefix_cache(),
            lambda client: client.apreempt("globex/r"),
        ]
        for call in calls:
            assert await code_of(call(nobody)) == "UNAUTHENTICATED"
            assert await code_of(call(tenant)) == "PERMISSION_DENIED"
            await call(operator)
        assert up.link.preempted == ["globex/r"]
        flush = up.channel.unary_unary("/vllm.grpc.engine.VllmEngine/FlushCache")
        assert await code_of(flush(b"", metadata=tenant.metadata())) == "PERMISSION_DENIED"
        assert await code_of(flush(b"", metadata=operator.metadata())) == "UNIMPLEMENTED"
        assert await code_of(operator.generate([5], max_tokens=2).aresult()) == "UNAUTHENTICATED"


async def test_the_only_tenant_operates_its_server_by_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alpha acme\nalpha-2 acme\n")
    async with (
        served(config=ServerConfig(auth_token_file=tmp_path / "tokens")) as up,
        clients(up, "alpha") as (client,),
    ):
        assert (await client.astats())["front_end"]["name"] == "front"
        await client.apreempt("r")
        assert up.link.preempted == ["acme/r"]


async def test_rotated_tokens_are_picked_up_and_open_streams_go_on(tmp_path: Path) -> None:
    link = FakeLink()
    link.stall_at = 1
    async with guarded(tmp_path, link=link) as up, clients(up, "beta", "gamma") as (old, new):
        assert await code_of(new.generate([5], max_tokens=2).aresult()) == "UNAUTHENTICATED"
        outputs = aiter(old.generate([5], max_tokens=4))
        await anext(outputs)
        (tmp_path / "tokens").write_text("gamma globex\n")
        link.stall_at = None
        assert sum([len(output.token_ids) async for output in outputs]) == 3
        assert await code_of(old.generate([5], max_tokens=2).aresult()) == "UNAUTHENTICATED"
        assert len((await new.generate([5], max_tokens=2).aresult()).token_ids) == 2
        old.token = "gamma"
        assert len((await old.generate([5], max_tokens=2).aresult()).token_ids) == 2


async def test_an_oversized_message_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path, max_receive_bytes=4096) as up, clients(up, "beta") as (client,):
        assert await code_of(client.generate("x" * 5000, max_tokens=2).aresult()) == "RESOURCE_EXHAUSTED"
        for method in (GENERATE, "/slipstream.v1.Inference/Cancel", "/vllm.grpc.engine.VllmEngine/Generate"):
            call = up.channel.unary_stream(method)(b"\x0a\xff no protobuf", metadata=client.metadata())
            with pytest.raises(grpc.aio.AioRpcError, match=f"bytes are no message of {method}") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        empty = up.channel.stream_stream(GENERATE)(metadata=client.metadata())
        await empty.done_writing()
        assert await code_of(empty.read()) == "INVALID_ARGUMENT"
        assert len((await client.generate([5], max_tokens=2).aresult()).token_ids) == 2


async def test_a_flood_of_streams_that_never_speak_is_ended_and_others_are_served(tmp_path: Path) -> None:
    async with guarded(tmp_path, message_timeout_s=0.5) as up, clients(up, "beta") as (client,):
        async with grpc.aio.insecure_channel(
            up.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as flood:
            silent = [flood.stream_stream(GENERATE)(metadata=client.metadata()) for _ in range(300)]
            started = [asyncio.ensure_future(call.read()) for call in silent]
            assert len((await client.generate([5], max_tokens=2, timeout_s=10.0).aresult()).token_ids) == 2
            ends = await asyncio.gather(*started, return_exceptions=True)
        assert {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)} == {
            grpc.StatusCode.DEADLINE_EXCEEDED
        }
        assert up.server.guard.num_refused["DEADLINE_EXCEEDED"] == 300
        assert up.front_end.num_open_requests == 0


async def test_streams_without_a_token_are_refused_before_they_speak(tmp_path: Path) -> None:
    async with guarded(tmp_path, message_timeout_s=60.0) as up:
        silent = [up.channel.stream_stream(GENERATE)() for _ in range(50)]
        codes = await asyncio.gather(*(asyncio.wait_for(code_of(call.read()), 10) for call in silent))
        assert set(codes) == {"UNAUTHENTICATED"}


async def test_calls_at_once_are_bounded(tmp_path: Path) -> None:
    link = FakeLink()
    link.stall_at = 1
    async with guarded(tmp_path, link=link, max_calls=4) as up, clients(up, "beta") as (client,):
        streams = [aiter(client.generate([5], max_tokens=9)) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        assert await code_of(client.generate([5], max_tokens=2).aresult()) == "RESOURCE_EXHAUSTED"
        for stream in streams:
            await stream.aclose()
        await up.gone()


async def test_half_open_connections_are_bounded_and_closed_and_others_are_served(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"handshake_timeout_s": 1.0, "max_connections": 40}
    async with guarded(tmp_path, **limits) as up, clients(up, "beta") as (client,):
        assert len((await client.generate([5], max_tokens=2, timeout_s=10.0).aresult()).token_ids) == 2
        loop = asyncio.get_running_loop()
        half_open = [socket.socket() for _ in range(100)]
        try:
            for index, sock in enumerate(half_open):
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", up.server.port))
                if index % 2:
                    await loop.sock_sendall(sock, b"PRI * HTTP/2.0\r\n")
            assert len((await client.generate([5], max_tokens=2, timeout_s=10.0).aresult()).token_ids) == 2
            async with asyncio.timeout(15):
                await asyncio.gather(*(_closed(loop, sock) for sock in half_open))
        finally:
            for sock in half_open:
                sock.close()
        async with clients(up, "beta") as (newcomer,):
            assert len((await newcomer.generate([5], max_tokens=2, timeout_s=10.0).aresult()).token_ids) == 2


async def _closed(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Returns when the other side has closed it; it may send its settings before."""
    try:
        while await loop.sock_recv(sock, 4096):
            pass
    except ConnectionError:
        pass


async def test_without_token_files_nothing_is_asked() -> None:
    async with served() as up:
        await up.client.generate([5], request_id="r", tenant="t", max_tokens=2).aresult()
        [request] = up.link.submitted
        assert (request.request_id, request.tenant) == ("r", "t")
        assert (await up.client.astats())["front_end"]["name"] == "front"


async def test_a_tenant_s_prefix_is_cached_for_itself_and_for_no_other_tenant(tmp_path: Path) -> None:
    """Whatever the others claim in their requests; the tokens are the same for everyone."""
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "admin").write_text("omega\n")
    prompt = list(range(20, 60))
    config = ServerConfig(auth_token_file=tmp_path / "tokens", admin_token_file=tmp_path / "admin")
    async with whole_stack(listen=config) as up:
        claims: list[dict[str, Any]] = [{}, {"tenant": "acme"}, {"tenant": "acme", "cache_salt": "acme"}]
        answers = []
        for token in ("alpha", "beta", "alpha-2"):
            up.client.token = token
            for claim in claims:
                answers.append(
                    await up.client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, **claim).aresult()
                )
        up.client.token = "omega"
        cached = [answer.finish.num_cached_tokens for answer in answers if answer.finish]
    assert [cached[:3], cached[3:6], cached[6:]] == [[0, 32, 0], [0, 32, 0], [32, 32, 32]]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
