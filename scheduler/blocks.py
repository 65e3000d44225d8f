"""One worker's KV blocks: reference counts, the LRU free list and the prefix cache.

Laws: every block is either free (no reference, in the free list, perhaps still cached) or used;
free + used == total at all times. A cached block holds only confirmed tokens whose step has completed;
who may publish is the caller's rule. Blocks of another namespace are never found. Knows nothing about
requests, tokens in flight or devices.
"""

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from functools import lru_cache
from hashlib import sha256

from scheduler.step import Int32Array


@lru_cache(maxsize=1024)
def root_digest(salt: str, tenant: str = "") -> bytes:
    """The parent of a first block. Requests of different salts or tenants share nothing.

    sha256, since a cache shared by tenants must not have constructible collisions.
    """
    name = tenant.encode()
    return sha256(b"slipstream:%d:%s:%s" % (len(name), name, salt.encode())).digest()


def block_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """The digest of one full block, from that of the block before it and its own int32 tokens."""
    return sha256(parent + token_bytes).digest()


def extend_digests(digests: list[bytes], root: bytes, token_ids: Int32Array, num_blocks: int, block_size: int) -> None:
    """Grow the chain of a sequence's block digests in place, from its own tokens, to `num_blocks`."""
    if len(digests) < num_blocks:
        unknown, width = token_ids[len(digests) * block_size : num_blocks * block_size].tobytes(), 4 * block_size
        parent = digests[-1] if digests else root
        for start in range(0, len(unknown), width):
            parent = block_digest(parent, unknown[start : start + width])
            digests.append(parent)


class BlockPool:
    """Fixed-size blocks `0 .. num_blocks - 1` of one worker in one session."""

    __slots__ = ("_cached", "_digest_of", "_idle", "_plain", "_refs", "namespace", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.namespace = 0
        self._refs = [0] * num_blocks
        # Free blocks in two parts: those with nothing to remember, the next to take at the end; then those that were
        # cached when they were released, the next to take, and to forget, at the front.
        self._plain = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Of this namespace only, and each the inverse of the other.
        self._cached: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, idle cached ones included."""
        return len(self._plain) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one request."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix could hit now."""
        return len(self._cached)

    @property
    def cached_blocks(self) -> KeysView[int]:
        """These blocks, free or used."""
        return self._digest_of.keys()

    def allocate(self, count: int) -> list[int]:
        """Take the `count` longest idle blocks; what they cached is forgotten."""
        assert count <= self.num_free, "allocate() without asking num_free first"
        plain, refs = self._plain, self._refs
        rest = max(len(plain) - count, 0)
        taken = plain[rest:]
        del plain[rest:]
        taken.reverse()
        if len(taken) < count:
            taken += self._forget_idle(count - len(taken))
        for block in taken:
            refs[block] = 1
        return taken

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a digest chain. Takes nothing."""
        blocks = []
        for digest in digests:
            block = self._cached.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free: taking them costs a free block each."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to matched blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def publish(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Let used blocks be found under their digests. The first block published under one stays."""
        cached, digest_of, refs = self._cached, self._digest_of, self._refs
        for block, digest in zip(blocks, digests, strict=True):
            assert refs[block] > 0, "a free block has nothing to publish"
            if block not in digest_of and cached.setdefault(digest, block) == block:
                digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each, last first, so that a prefix outlives its continuation."""
        refs, digest_of, idle, plain = self._refs, self._digest_of, self._idle, self._plain
        for block in reversed(blocks):
            left = refs[block] = refs[block] - 1
            assert left >= 0, f"block {block} released twice"
            if left == 0:
                if block in digest_of:
                    idle[block] = None
                else:
                    plain.append(block)

    def reset(self) -> None:
        """A new namespace: nothing published before is ever found again. O(1), legal at any time."""
        self.namespace += 1
        self._cached, self._digest_of = {}, {}

    def reference_count(self, block: int) -> int:
        """How many requests hold this block."""
        return self._refs[block]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the laws of this file. `tables`: the blocks of every holder, which have all references there are."""
        refs = [0] * self.num_blocks
        for blocks in tables:
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "a block leaks"
        free = [*self._plain, *self._idle]
        assert len(free) == refs.count(0), "free + used != total"
        assert len(set(free)) == len(free), "a block is free twice"
        assert not any(map(refs.__getitem__, free)), "a used block is free"
        assert self._digest_of.keys().isdisjoint(self._plain), "a plain block remembers"
        # Blocks are cached and forgotten in both at once, so that they even agree in their order.
        assert [*self._digest_of] == [*self._cached.values()], "a block is cached as another"
        assert [*self._digest_of.values()] == [*self._cached], "a block is cached under another digest"

    def _forget_idle(self, count: int) -> list[int]:
        """The longest idle blocks, and what they cached is not found any more."""
        popitem, digest_of, cached = self._idle.popitem, self._digest_of, self._cached
        blocks = [popitem(False)[0] for _ in range(count)]
        for block in blocks:
            digest = digest_of.pop(block, None)
            if digest is not None:
                del cached[digest]
        return blocks
