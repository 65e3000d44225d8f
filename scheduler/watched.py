"""A block pool that tells what its prefix cache gains and loses.

It takes a plain pool's place while somebody watches, and shares its state: nothing here is paid for otherwise. A pool
knows digests only, so what a block holds is read from the row that published or hit it. Blocks that were cached before
the watch began and have no running reader are told when a prefix hits them.
"""

from collections.abc import Iterable, Sequence

from scheduler.blocks import BlockPool
from scheduler.events import BlockRemoved, BlockStored, CacheChange, CacheCleared
from scheduler.rows import RowTable
from scheduler.state import RequestState


class WatchedPool(BlockPool):
    """Every change of the cache is in `take_changes` once, a block's beginning after `tell` has seen its row."""

    __slots__ = ("_changes", "_offered", "_told")

    def __init__(self, pool: BlockPool) -> None:
        """The same pool, watched. The one given must not be used any more."""
        _move(pool, self)
        self._changes: list[CacheChange] = []
        self._offered: set[bytes] = set()  # digests whose blocks a row may have to tell
        self._told: dict[int, bytes] = {}  # block -> the digest it was told under

    def plain(self) -> BlockPool:
        """The same pool, not watched. This one must not be used any more."""
        pool = BlockPool.__new__(BlockPool)
        _move(self, pool)
        return pool

    def publish(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """As of any pool; `tell` follows."""
        super().publish(blocks, digests)
        self._offered.update(digests)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Likewise: a hit of what nobody has told yet is news."""
        blocks = list(blocks)
        super().acquire(blocks)
        self._offered.update(self._digest_of[block] for block in blocks if block not in self._told)

    def allocate(self, count: int) -> list[int]:
        """What the blocks cached is told as removed."""
        taken = super().allocate(count)
        for block in taken:
            digest = self._told.pop(block, None)
            if digest is not None:
                self._changes.append(BlockRemoved(digest=digest))
        return taken

    def reset(self) -> None:
        """Told as such."""
        super().reset()
        self._offered.clear()
        self._told.clear()
        self._changes.append(CacheCleared())

    def tell_rows(self, table: RowTable, rows: Iterable[int]) -> None:
        """Tell the blocks that these rows have published or hit since the last call, parents before children."""
        for row in rows:
            state = table.states[row]
            if state is not None:
                self._tell_row(table, row, state)
        self._offered.clear()

    def tell_all(self, table: RowTable) -> None:
        """Tell every cached block of the rows that run."""
        self._offered.update(self._digest_of.values())
        self.tell_rows(table, range(table.max_rows))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the laws of any pool, and that what was told is there."""
        super().check(tables)
        assert self._told.items() <= self._digest_of.items(), "a block was told and is not cached"
        assert not self._offered, "a published block was not told"

    def take_changes(self) -> tuple[CacheChange, ...]:
        """Those since the last call."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def _tell_row(self, table: RowTable, row: int, state: RequestState) -> None:
        # What a row offers at once are its last published blocks.
        start = end = int(table.num_published[row])
        while start and state.digests[start - 1] in self._offered:
            start -= 1
        for place in range(start, end):
            digest = state.digests[place]
            block = self._cached.get(digest)
            if block is not None and block not in self._told:
                self._told[block] = digest
                tokens = table.token_ids[row, place * table.block_size : (place + 1) * table.block_size]
                parent = state.digests[place - 1] if place else None
                salt = state.request.cache_salt
                stored = BlockStored(digest=digest, parent=parent, token_bytes=tokens.tobytes(), cache_salt=salt)
                self._changes.append(stored)


def _move(pool: BlockPool, into: BlockPool) -> None:
    for name in BlockPool.__slots__:
        setattr(into, name, getattr(pool, name))
