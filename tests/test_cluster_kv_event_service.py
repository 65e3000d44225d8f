"""SubscribeKvEvents over a real server and channel: what a router learns of the prefix caches."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as pb

from cluster.kv_event_service import encode_news
from cluster.server import ServerConfig
from scheduler.blocks import BlockPool
from scheduler.cache_feed import CacheFeed, CacheNews
from scheduler.events import BlockRemoved, BlockStored, CacheCleared, TellCacheChanges
from scheduler.watched import WatchedPool
from tests.served import Served, served
from tests.whole_stack import BLOCK_SIZE, Stack, whole_stack

PROMPT = list(range(20, 60))


def subscribe(up: Served | Stack, start: int = 0, metadata: Any = ()) -> Any:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(up.channel)
    return stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=start), metadata=metadata)


class Router:
    """Knows what it was told: by block hash the tokens of the whole prefix that ends with the block."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.prefixes: dict[int, list[int]] = {}
        self.seq = 0

    async def hear(self) -> Any:
        batch = await self.call.read()
        assert self.seq in (0, batch.sequence_number - 1)
        self.seq = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    self._store(event.stored)
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.prefixes[block_hash]
                case "cleared":
                    self.prefixes.clear()
        return batch

    async def hear_until(self, num_blocks: int) -> None:
        async with asyncio.timeout(10):
            while len(self.prefixes) != num_blocks:
                await self.hear()

    def _store(self, stored: Any) -> None:
        prefix = self.prefixes[stored.parent_block_hash] if stored.HasField("parent_block_hash") else []
        for block in stored.blocks:
            assert block.block_size == BLOCK_SIZE == len(block.token_ids)
            prefix = self.prefixes[block.block_hash] = [*prefix, *block.token_ids]


async def test_a_router_learns_the_prefixes_that_are_cached_and_when_they_are_not() -> None:
    async with whole_stack() as up:
        router = Router(subscribe(up))
        first = await router.hear()
        assert (first.snapshot.count, first.snapshot.blocks, first.snapshot.unknown_before) == (1, 0, 0)
        assert first.dp_rank == 0
        answer = await up.client.generate(PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True).aresult()
        written = [*PROMPT, *answer.token_ids][:-1]
        await router.hear_until(len(written) // BLOCK_SIZE)
        assert max(router.prefixes.values(), key=len) == written[: len(written) // BLOCK_SIZE * BLOCK_SIZE]
        late = Router(subscribe(up))
        await late.hear()
        assert late.prefixes == router.prefixes
        await up.client.areset_prefix_cache()
        for one in (router, late):
            await one.hear_until(0)
        router.call.cancel()
        late.call.cancel()


async def test_blocks_that_make_room_are_told_as_removed() -> None:
    async with whole_stack(num_blocks=16) as up:
        router = Router(subscribe(up))
        await router.hear()
        for start in (20, 60, 100, 140, 180, 200):
            prompt = list(range(start, start + 40))
            await up.client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True).aresult()
        scheduler = up.link.scheduler
        assert scheduler is not None
        [worker] = scheduler._core.workers.values()
        await router.hear_until(worker.pool.num_cached)
        assert len(router.prefixes) <= 16
        router.call.cancel()


async def test_a_watch_that_begins_late_says_so_and_learns_what_is_hit() -> None:
    async with whole_stack() as up:
        await up.client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True).aresult()
        router = Router(subscribe(up))
        first = await router.hear()
        assert (first.snapshot.blocks, first.snapshot.unknown_before) == (0, 1)
        again = await up.client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True).aresult()
        assert again.finish is not None
        await router.hear_until(len(PROMPT) // BLOCK_SIZE)
        assert again.finish.num_cached_tokens > 0
        router.call.cancel()


async def test_nothing_is_watched_when_nobody_asks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.actor.CACHE_ASKED_S", 0.1)
    monkeypatch.setattr("scheduler.actor.CACHE_NEWS_TIMEOUT_S", 0.02)
    async with whole_stack() as up:
        await up.client.generate(PROMPT, max_tokens=2).aresult()
        scheduler = up.link.scheduler
        assert scheduler is not None
        [worker] = scheduler._core.workers.values()
        assert type(worker.pool) is BlockPool
        router = Router(subscribe(up))
        await router.hear()
        assert type(worker.pool) is WatchedPool
        assert up.front_end.num_cache_subscribers == 1
        router.call.cancel()
        async with asyncio.timeout(10):
            while type(worker.pool) is not BlockPool:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)
        assert up.front_end.num_cache_subscribers == 0


def tell(feed: CacheFeed, name: str) -> None:
    tokens = np.arange(16, dtype=np.int32).tobytes()
    block = BlockStored(digest=name.encode().ljust(32), parent=None, token_bytes=tokens)
    feed.take(TellCacheChanges(worker_id="w0", changes=(block,)))


async def test_a_subscriber_goes_on_after_its_last_number_or_is_told_to_begin_anew() -> None:
    async with served() as up:
        for name in "abc":
            tell(up.link.feed, name)
        call = subscribe(up, up.link.feed.seq - 1)
        batch = await call.read()
        assert (batch.sequence_number, len(batch.events), batch.HasField("snapshot")) == (up.link.feed.seq, 1, False)
        call.cancel()
        for unknown in (5, up.link.feed.seq + 1):
            with pytest.raises(grpc.aio.AioRpcError, match="subscribe from 0 for a snapshot") as caught:
                await subscribe(up, unknown).read()
            assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert up.front_end.num_cache_subscribers_lost == 0


async def test_a_subscriber_that_falls_behind_is_told_and_counted() -> None:
    async with served() as up:
        up.link.feed = CacheFeed(1000, is_partial=False, max_kept_changes=4)
        call = subscribe(up)
        await call.read()
        for index in range(10):
            tell(up.link.feed, str(index))
        with pytest.raises(grpc.aio.AioRpcError, match="changes after 1000 are not kept any more") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert up.front_end.num_cache_subscribers_lost == 1


async def test_without_a_scheduler_and_before_the_server_is_ready_it_is_unavailable() -> None:
    async with served(ready=False) as up:
        for why in ("the server is starting", "the scheduler is away"):
            with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
                await subscribe(up).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await up.server.ready()
            up.link.available = False


async def test_the_stream_ends_when_the_server_stops() -> None:
    async with served() as up:
        call = subscribe(up)
        await call.read()
        await up.server.stop(1.0)
        assert await call.read() is grpc.aio.EOF


async def test_only_operators_learn_the_tokens_of_everybody_s_prompts(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alpha acme\nbeta globex\n")
    (tmp_path / "admin").write_text("omega\n")
    config = ServerConfig(auth_token_file=tmp_path / "tokens", admin_token_file=tmp_path / "admin")
    async with served(config=config) as up:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await subscribe(up, metadata=(("authorization", "Bearer alpha"),)).read()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        call = subscribe(up, metadata=(("authorization", "Bearer omega"),))
        assert (await call.read()).HasField("snapshot")
        call.cancel()


def test_changes_become_events_with_runs_of_blocks_together() -> None:
    tokens = np.arange(4, dtype=np.int32).tobytes()
    a = BlockStored(digest=b"a" * 32, parent=None, token_bytes=tokens, cache_salt="s")
    b = BlockStored(digest=b"\xff" * 32, parent=a.digest, token_bytes=tokens, cache_salt="s")
    c = BlockStored(digest=b"c" * 32, parent=a.digest, token_bytes=tokens)
    removed = [BlockRemoved(digest=block.digest) for block in (c, b)]
    [batch] = encode_news(CacheNews(first_seq=7, batches=((a, b, c, *removed, CacheCleared()),)), 4)
    assert [event.WhichOneof("data") for event in batch.events] == ["stored", "stored", "removed", "cleared"]
    assert [event.event_id for event in batch.events] == [1, 2, 3, 4]
    first, second = batch.events[0].stored, batch.events[1].stored
    assert [block.block_hash for block in first.blocks] == [int.from_bytes(b"a" * 8, "big"), -1]
    assert (list(first.blocks[0].token_ids), first.blocks[0].block_size, first.cache_salt) == ([0, 1, 2, 3], 4, "s")
    assert not first.HasField("parent_block_hash")
    assert second.parent_block_hash == first.blocks[0].block_hash
    assert list(batch.events[2].removed.block_hashes) == [int.from_bytes(b"c" * 8, "big"), -1]
