"""Watched prefix caches: what is told is what is there, in every weather; and the feed that subscribers follow."""

import numpy as np
import pytest

from scheduler.blocks import BlockPool, block_digest
from scheduler.cache_feed import SNAPSHOT_CHUNK, CacheFeed
from scheduler.events import (
    BlockRemoved,
    BlockStored,
    CacheChange,
    CacheCleared,
    CacheReset,
    CacheWatched,
    Event,
    TellCacheChanges,
)
from scheduler.watched import WatchedPool
from tests.simulate.world import World


class WatchedWorld(World):
    """Somebody hears every change; the caches are compared after every event."""

    def __init__(self, seed: int, rewatch_every: int = 0) -> None:
        """rewatch_every: events; 0: watched from the beginning of each life."""
        self.rewatch_every = rewatch_every
        self.heard: dict[str, dict[bytes, BlockStored]] = {}  # by worker
        self.num_heard = 0
        self._watched_life: object = None
        super().__init__(seed)

    def handle(self, event: Event) -> None:
        if self._watched_life is not self.scheduler:
            self._watched_life, self.heard = self.scheduler, {}
            self.handle(CacheWatched(watched=True))
        super().handle(event)
        commands = self.recent[-1][2]
        for command in commands:
            if isinstance(command, TellCacheChanges):
                self._hear(command)
        self._compare()
        if self.rewatch_every and self.num_handled % self.rewatch_every == 0:
            self.heard = {}
            super().handle(CacheWatched(watched=False))
            assert not any(isinstance(worker.pool, WatchedPool) for worker in self.scheduler.workers.values())
            self.handle(CacheWatched(watched=True))

    def _hear(self, told: TellCacheChanges) -> None:
        cached = self.heard.setdefault(told.worker_id, {})
        for change in told.changes:
            self.num_heard += 1
            match change:
                case BlockStored():
                    assert change.digest not in cached
                    if change.parent is not None:
                        assert change.digest == block_digest(change.parent, change.token_bytes)
                    cached[change.digest] = change
                case BlockRemoved():
                    del cached[change.digest]
                case CacheCleared():
                    cached.clear()

    def _compare(self) -> None:
        for worker in self.scheduler.workers.values():
            heard, there = self.heard.get(worker.worker_id, {}).keys(), worker.pool._cached.keys()
            assert heard <= there if self.rewatch_every else heard == there


@pytest.mark.parametrize("seed", range(6))
def test_what_is_told_is_what_is_there(seed: int) -> None:
    world = WatchedWorld(seed)
    world.run()
    assert world.num_heard > 0


@pytest.mark.parametrize("seed", range(6, 10))
def test_a_watch_that_begins_late_tells_nothing_that_is_not_there(seed: int) -> None:
    world = WatchedWorld(seed, rewatch_every=40)
    world.run()
    assert world.num_heard > 0


def test_a_pool_that_nobody_watches_is_a_plain_one() -> None:
    world = World(1)
    world.run()
    assert {type(worker.pool) for worker in world.scheduler.workers.values()} == {BlockPool}
    world.handle(CacheWatched(watched=True))
    world.handle(CacheReset())
    world.handle(CacheWatched(watched=False))
    assert {type(worker.pool) for worker in world.scheduler.workers.values()} == {BlockPool}


# ---- the feed ----


def block(name: str, parent: str | None = None) -> BlockStored:
    tokens = np.frombuffer(name.encode().ljust(16), np.int32).tobytes()
    return BlockStored(digest=name.encode(), parent=None if parent is None else parent.encode(), token_bytes=tokens)


def gone(name: str) -> BlockRemoved:
    return BlockRemoved(digest=name.encode())


def told(worker_id: str, *changes: CacheChange) -> TellCacheChanges:
    return TellCacheChanges(worker_id=worker_id, changes=changes)


def feed_of(*batches: TellCacheChanges, max_kept_changes: int = 100) -> CacheFeed:
    feed = CacheFeed(1000, is_partial=False, max_kept_changes=max_kept_changes)
    for batch in batches:
        feed.take(batch)
    return feed


def test_a_block_is_there_while_any_worker_has_it() -> None:
    a = block("a")
    feed = feed_of(told("w0", a), told("w1", a), told("w0", gone("a")), told("w1", gone("a")))
    news = feed.since(1000)
    assert news is not None
    assert (news.first_seq, news.batches, news.last_seq) == (1001, ((a,), (gone("a"),)), 1002)


def test_a_worker_that_is_lost_takes_along_what_only_it_had() -> None:
    feed = feed_of(told("w0", block("a"), block("b", "a")), told("w1", block("a")), told("w0", CacheCleared()))
    news = feed.since(1001)
    assert news is not None
    assert news.batches == ((gone("b"),),)
    assert feed.snapshot().batches == ((CacheCleared(), block("a")),)


def test_changes_within_reach_are_told_and_older_ones_are_not() -> None:
    feed = feed_of(*(told("w0", block(str(index))) for index in range(10)), max_kept_changes=4)
    newest = feed.since(1010)
    assert newest is not None
    assert newest.batches == ()
    assert newest.last_seq == 1010
    within = feed.since(1006)
    assert within is not None
    assert len(within.batches) == 4
    assert feed.since(1005) is None
    assert feed.since(1011) is None
    assert feed.since(0) is None


def test_a_snapshot_lists_parents_before_children_in_chunks_that_end_at_the_newest_number() -> None:
    names = [str(index) for index in range(SNAPSHOT_CHUNK + 10)]
    chain = [block(name, parent) for name, parent in zip(names, [None, *names], strict=False)]
    feed = feed_of(told("w0", *reversed(chain)), told("w0", block("orphan", "elsewhere")), max_kept_changes=1)
    snapshot = feed.snapshot()
    assert (snapshot.is_snapshot, snapshot.last_seq, len(snapshot.batches)) == (True, feed.seq, 2)
    assert [change for chunk in snapshot.batches for change in chunk] == [CacheCleared(), *chain]
