"""What a deployment has cached, as one numbered sequence of changes that any number of subscribers follow.

A block is there while any worker has it. Batches are kept for subscribers that are behind, so many changes and no more;
who comes new, or from too far behind, begins with a snapshot. Knows no clock and no subscriber.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from scheduler.events import BlockRemoved, BlockStored, CacheChange, CacheCleared, TellCacheChanges

MAX_KEPT_CHANGES = 1 << 16
SNAPSHOT_CHUNK = 512  # blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNews:
    """Batches with consecutive numbers. A snapshot replaces everything a subscriber knew."""

    first_seq: int
    batches: tuple[tuple[CacheChange, ...], ...] = ()
    is_snapshot: bool = False
    is_partial: bool = False  # this snapshot may lack blocks that were cached before anybody watched

    @property
    def last_seq(self) -> int:
        """What to ask for changes after next."""
        return self.first_seq + len(self.batches) - 1


class CacheFeed:
    """Begins empty, or as partial as the first watch finds the caches."""

    def __init__(self, first_seq: int, *, is_partial: bool, max_kept_changes: int = MAX_KEPT_CHANGES) -> None:
        """first_seq: above every number of an earlier feed, and far above 0."""
        self.seq = first_seq  # of the newest batch, or of the beginning
        self._is_partial = is_partial
        self._max_kept_changes = max_kept_changes
        self._kept: deque[tuple[CacheChange, ...]] = deque()
        self._num_kept_changes = 0
        self._blocks: dict[bytes, BlockStored] = {}
        self._holders: dict[bytes, set[str]] = {}  # digest -> workers
        self._digests_of: dict[str, dict[bytes, None]] = {}  # worker -> what it holds, in order

    def take(self, told: TellCacheChanges) -> None:
        """One worker's changes; a batch if they change what the deployment has."""
        batch: list[CacheChange] = []
        for change in told.changes:
            match change:
                case BlockStored():
                    self._store(told.worker_id, change, batch)
                case BlockRemoved():
                    self._remove(told.worker_id, change.digest, batch)
                case CacheCleared():
                    self._clear(told.worker_id, batch)
                case _:
                    assert_never(change)
        if batch:
            self._keep(tuple(batch))

    def since(self, seq: int) -> CacheNews | None:
        """What follows a number, perhaps nothing yet; None when it is too far behind, or of another feed."""
        num_behind = self.seq - seq
        if not 0 <= num_behind <= len(self._kept):
            return None
        batches = tuple(self._kept)[len(self._kept) - num_behind :]
        return CacheNews(first_seq=seq + 1, batches=batches)

    def snapshot(self) -> CacheNews:
        """Everything that is there, parents before children, in chunks whose last has the newest number."""
        changes: list[CacheChange] = [CacheCleared(), *self._in_order()]
        chunks = tuple(
            tuple(changes[start : start + SNAPSHOT_CHUNK]) for start in range(0, len(changes), SNAPSHOT_CHUNK)
        )
        first_seq = self.seq - len(chunks) + 1
        return CacheNews(first_seq=first_seq, batches=chunks, is_snapshot=True, is_partial=self._is_partial)

    def _store(self, worker_id: str, block: BlockStored, batch: list[CacheChange]) -> None:
        self._digests_of.setdefault(worker_id, {})[block.digest] = None
        holders = self._holders.setdefault(block.digest, set())
        if not holders:
            self._blocks[block.digest] = block
            batch.append(block)
        holders.add(worker_id)

    def _remove(self, worker_id: str, digest: bytes, batch: list[CacheChange]) -> None:
        self._digests_of[worker_id].pop(digest)
        holders = self._holders[digest]
        holders.remove(worker_id)
        if not holders:
            del self._holders[digest], self._blocks[digest]
            batch.append(BlockRemoved(digest=digest))

    def _clear(self, worker_id: str, batch: list[CacheChange]) -> None:
        for digest in list(self._digests_of.get(worker_id, ())):
            self._remove(worker_id, digest, batch)

    def _keep(self, batch: tuple[CacheChange, ...]) -> None:
        self.seq += 1
        self._kept.append(batch)
        self._num_kept_changes += len(batch)
        while self._num_kept_changes > self._max_kept_changes:
            self._num_kept_changes -= len(self._kept.popleft())

    def _in_order(self) -> Iterator[BlockStored]:
        """Blocks whose whole prefix is there: the others cannot be hit."""
        children: dict[bytes | None, list[BlockStored]] = {}
        for block in self._blocks.values():
            children.setdefault(block.parent, []).append(block)
        waiting = children.get(None, [])[::-1]
        while waiting:
            block = waiting.pop()
            yield block
            waiting.extend(reversed(children.get(block.digest, ())))
