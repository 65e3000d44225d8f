"""One worker's KV blocks: reference counts, the LRU free list and the prefix cache.

Laws: every block is either free (no reference, in the free list, perhaps still cached) or used;
free + used == total at all times. A cached block holds only confirmed tokens whose step has completed;
who may publish is the caller's rule. Blocks of another namespace are never found. Knows nothing about
requests, tokens in flight or devices.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from scheduler.step import Int32Array


def root_digest(salt: str) -> bytes:
    """The parent of a first block. Requests of different salts share nothing.

    sha256, since a cache shared by tenants must not have constructible collisions.
    """
    return sha256(b"slipstream:" + salt.encode()).digest()


def child_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """A block's name: its own tokens (int32 bytes) and everything before them."""
    return sha256(parent + token_bytes).digest()


def extend_digests(digests: list[bytes], root: bytes, token_ids: Int32Array, num_blocks: int, block_size: int) -> None:
    """Grow a chain of block digests in place to `num_blocks`: digest(parent, int32 token bytes)."""
    if len(digests) >= num_blocks:
        return
    parent = digests[-1] if digests else root
    width = 4 * block_size
    first = len(digests) * block_size
    token_bytes = token_ids[first : num_blocks * block_size].tobytes()
    for start in range(0, len(token_bytes), width):
        parent = child_digest(parent, token_bytes[start : start + width])
        digests.append(parent)


class BlockPool:
    """Fixed-size blocks `0 .. num_blocks - 1` of one worker in one session."""

    __slots__ = ("_cached", "_digest_of", "_free", "_namespace_of", "_refs", "namespace", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.namespace = 0
        self._refs = [0] * num_blocks
        # Oldest first: the next block to take, and to forget, is at the front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, int] = {}  # of this namespace only
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._namespace_of = [0] * num_blocks  # of that digest

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, idle cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks referenced by at least one request."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix could hit now."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take the `count` longest idle blocks; what they cached is forgotten."""
        assert count <= len(self._free), "allocate() without asking num_free first"
        popitem, refs, digest_of = self._free.popitem, self._refs, self._digest_of
        taken = [popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            refs[block] = 1
            digest = digest_of[block]
            if digest is not None:
                if self._namespace_of[block] == self.namespace:
                    del self._cached[digest]
                digest_of[block] = None
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
                del self._free[block]
            self._refs[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Let a used block be found under its digest. The first block published under one stays."""
        assert self._refs[block] > 0, "a free block has nothing to publish"
        if self._is_cached(block) or self._cached.setdefault(digest, block) != block:
            return
        self._digest_of[block] = digest
        self._namespace_of[block] = self.namespace

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each, last first, so that a prefix outlives its continuation."""
        free, refs, digest_of = self._free, self._refs, self._digest_of
        for block in reversed(blocks):
            left = refs[block] = refs[block] - 1
            assert left >= 0, f"block {block} released twice"
            if left == 0:
                free[block] = None
                if digest_of[block] is None or self._namespace_of[block] != self.namespace:
                    free.move_to_end(block, last=False)  # nothing to remember: first to go

    def reset(self) -> None:
        """A new namespace: nothing published before is ever found again. O(1), legal at any time."""
        self.namespace += 1
        self._cached = {}

    def reference_count(self, block: int) -> int:
        """How many requests hold this block."""
        return self._refs[block]

    def check(self) -> None:
        """Assert the laws of this file."""
        assert min(self._refs) >= 0
        idle = {block for block, refs in enumerate(self._refs) if refs == 0}
        assert idle == self._free.keys(), "free + used != total"
        for digest, block in self._cached.items():
            assert self._digest_of[block] == digest, f"block {block} is cached as another"
            assert self._is_cached(block)

    def _is_cached(self, block: int) -> bool:
        return self._digest_of[block] is not None and self._namespace_of[block] == self.namespace
