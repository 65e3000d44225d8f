"""SubscribeKvEvents of vllm.grpc.engine.VllmEngine: what the prefix caches hold, for routers that send a prompt there.

A deployment is one rank: its scheduler chooses the worker, so a block is there while any worker has it. Subscribers
begin with a snapshot, or after the last number they had; one that cannot be told what it missed is told that.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from smg_grpc_proto.generated import common_pb2 as pb

from cluster.call import StreamError
from cluster.serving import RETRY_AFTER_MS, Serving, State
from scheduler.cache_feed import CacheNews
from scheduler.events import BlockRemoved, BlockStored, CacheChange, CacheCleared

ANEW = "subscribe from 0 for a snapshot"


async def follow(serving: Serving, start: int, context: Any) -> None:
    """Streams until the server stops. Raises StreamError, or ConnectionError when the scheduler cannot be reached.

    start: the last sequence number the subscriber had; 0: none.
    """
    if serving.state is not State.SERVING:
        raise StreamError("UNAVAILABLE", f"the server is {serving.state.value}", RETRY_AFTER_MS)
    await context.send_initial_metadata(())  # subscribed, though there may be nothing to tell
    front_end, after = serving.front_end, start or None
    front_end.num_cache_subscribers += 1
    try:
        while serving.state is State.SERVING:
            news = await front_end.cache_changes(after)
            if news is None and after == start:
                raise StreamError("OUT_OF_RANGE", f"changes after {start} are not kept; {ANEW}")
            if news is None:
                front_end.num_cache_subscribers_lost += 1
                raise StreamError("DATA_LOSS", f"changes after {after} are not kept any more; {ANEW}")
            for batch in encode_news(news, serving.model.block_size):
                await serving.write(context, batch)
            after = news.last_seq
    finally:
        front_end.num_cache_subscribers -= 1


def encode_news(news: CacheNews, block_size: int) -> Iterator[Any]:
    """A pb.KvEventBatch for each batch."""
    num_blocks = sum(isinstance(change, BlockStored) for batch in news.batches for change in batch)
    for index, changes in enumerate(news.batches):
        batch = pb.KvEventBatch(sequence_number=news.first_seq + index, timestamp=time.time(), dp_rank=0)
        if news.is_snapshot:
            batch.snapshot.index, batch.snapshot.count = index, len(news.batches)
            batch.snapshot.blocks, batch.snapshot.unknown_before = num_blocks, int(news.is_partial)
        for run in _runs(changes):
            _add_event(batch, run, block_size, 0 if news.is_snapshot else len(batch.events) + 1)
        yield batch


def _runs(changes: Sequence[CacheChange]) -> Iterator[list[CacheChange]]:
    """The same changes in order: blocks each of which continues the one before it together."""
    run: list[CacheChange] = []
    for change in changes:
        if run and not _continues(run[-1], change):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _continues(before: CacheChange, change: CacheChange) -> bool:
    if isinstance(before, BlockStored) and isinstance(change, BlockStored):
        return change.parent == before.digest
    return isinstance(before, BlockRemoved) and isinstance(change, BlockRemoved)


def _add_event(batch: Any, run: Sequence[CacheChange], block_size: int, event_id: int) -> None:
    event = batch.events.add(event_id=event_id)
    first = run[0]
    if isinstance(first, CacheCleared):
        event.cleared.SetInParent()
        return
    if isinstance(first, BlockStored):
        event.stored.tier = pb.KV_CACHE_TIER_DEVICE
        if first.parent is not None:
            event.stored.parent_block_hash = _hash(first.parent)
        if first.cache_salt:
            event.stored.cache_salt = first.cache_salt
    for change in run:
        if isinstance(change, BlockStored):
            token_ids = np.frombuffer(change.token_bytes, np.int32).tolist()
            event.stored.blocks.add(block_hash=_hash(change.digest), token_ids=token_ids, block_size=block_size)
        elif isinstance(change, BlockRemoved):
            event.removed.block_hashes.append(_hash(change.digest))


def _hash(digest: bytes) -> int:
    """A name of 64 bits: routers take it for identity only."""
    return int.from_bytes(digest[:8], "big", signed=True)
