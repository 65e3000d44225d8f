"""The block pool and its prefix cache under every order of calls, against a plain model of both."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from scheduler.blocks import BlockPool, extend_digests, root_digest

NUM_BLOCKS = 12
BLOCK_SIZE = 2
MAX_TOKENS = 12

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS)
salts = st.sampled_from(("", "a"))


class Holder:
    """A request as the pool sees it: its tokens, its blocks, how much of them it has published."""

    def __init__(self, salt: str, token_ids: list[int], namespace: int) -> None:
        self.salt = salt
        self.token_ids = token_ids
        self.namespace = namespace
        self.blocks: list[int] = []
        self.num_published = 0


class PoolMachine(RuleBasedStateMachine):
    """`content` is the truth that the cache must agree with: block -> (namespace, salt, tokens 0..end of block)."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.live: list[Holder] = []
        self.content: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        self.published: dict[tuple[str, tuple[int, ...]], int] = {}  # of this namespace: what must be found

    @rule(target=holders, salt=salts, token_ids=token_lists)
    def arrive(self, salt: str, token_ids: list[int]) -> Holder:
        """A request takes its hit and, if there is room, the blocks for the rest."""
        holder = Holder(salt, token_ids, self.pool.namespace)
        digests = self._digests(holder)
        hit = self.pool.match(digests[: (len(token_ids) - 1) // BLOCK_SIZE])
        self._check_hit(holder, hit)
        missing = -(-len(token_ids) // BLOCK_SIZE) - len(hit)
        if missing + self.pool.num_idle(hit) > self.pool.num_free:
            return holder  # it waits, holding nothing
        self.pool.acquire(hit)
        holder.blocks = hit + self._allocate(missing)
        holder.num_published = len(hit)
        self.live.append(holder)
        return holder

    @rule(holder=holders, token=st.integers(0, 1))
    def grow(self, holder: Holder, token: int) -> None:
        """One more token; a block more where one begins."""
        if holder not in self.live or len(holder.token_ids) >= MAX_TOKENS:
            return
        if len(holder.token_ids) == len(holder.blocks) * BLOCK_SIZE:
            if self.pool.num_free == 0:
                return
            holder.blocks += self._allocate(1)
        holder.token_ids = [*holder.token_ids, token]

    @rule(holder=holders)
    def publish(self, holder: Holder) -> None:
        """Offer the next full block, under the namespace in which the request came only."""
        at = holder.num_published
        if holder not in self.live or holder.namespace != self.pool.namespace:
            return
        if (at + 1) * BLOCK_SIZE > len(holder.token_ids):
            return
        block = holder.blocks[at]
        prefix = tuple(holder.token_ids[: (at + 1) * BLOCK_SIZE])
        self.pool.publish([block], [self._digests(holder)[at]])
        self.content[block] = (self.pool.namespace, holder.salt, prefix)
        self.published.setdefault((holder.salt, prefix), block)
        holder.num_published += 1

    @rule(holder=consumes(holders))
    def leave(self, holder: Holder) -> None:
        """Blocks go back, last first."""
        if holder in self.live:
            self.live.remove(holder)
            self.pool.release(holder.blocks)

    @rule()
    def reset(self) -> None:
        """A new namespace, with or without running requests."""
        self.pool.reset()
        self.published = {}

    @invariant()
    def obeys_its_own_laws(self) -> None:
        self.pool.check([holder.blocks for holder in self.live])

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        held = [block for holder in self.live for block in holder.blocks]
        for block in range(NUM_BLOCKS):
            assert self.pool.reference_count(block) == held.count(block)
        assert self.pool.num_used == len(set(held))
        assert self.pool.num_free + self.pool.num_used == NUM_BLOCKS

    @invariant()
    def cache_holds_exactly_what_was_published_and_not_taken_since(self) -> None:
        assert self.pool.num_cached == len(self.published)

    def _allocate(self, count: int) -> list[int]:
        """Taken blocks forget what they cached; those that cache nothing go first, then the longest idle."""
        idle = [block for block in range(NUM_BLOCKS) if self.pool.reference_count(block) == 0]
        cached = set(self.published.values())
        plain = [block for block in idle if block not in cached]
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks) <= set(idle)
        assert set(blocks) <= set(plain) if count <= len(plain) else set(plain) <= set(blocks)
        self.published = {key: block for key, block in self.published.items() if block not in blocks}
        for block in blocks:
            self.content.pop(block, None)
        return blocks

    def _check_hit(self, holder: Holder, hit: list[int]) -> None:
        """A hit is the longest published prefix, and holds that prefix."""
        for index, block in enumerate(hit):
            prefix = tuple(holder.token_ids[: (index + 1) * BLOCK_SIZE])
            assert self.content[block] == (self.pool.namespace, holder.salt, prefix)
        following = tuple(holder.token_ids[: (len(hit) + 1) * BLOCK_SIZE])
        if len(hit) < (len(holder.token_ids) - 1) // BLOCK_SIZE:
            assert (holder.salt, following) not in self.published

    def _digests(self, holder: Holder) -> list[bytes]:
        digests: list[bytes] = []
        token_ids = np.array(holder.token_ids, np.int32)
        extend_digests(digests, root_digest(holder.salt), token_ids, len(token_ids) // BLOCK_SIZE, BLOCK_SIZE)
        return digests


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_digest_chain_grows_the_same_in_any_portions() -> None:
    token_ids = np.arange(40, dtype=np.int32)
    whole: list[bytes] = []
    extend_digests(whole, root_digest("salt"), token_ids, 10, 4)
    grown: list[bytes] = []
    for num_blocks in (1, 1, 3, 2, 7, 10):
        extend_digests(grown, root_digest("salt"), token_ids, num_blocks, 4)
    assert grown == whole
    assert len(set(whole)) == 10


def test_a_prefix_outlives_its_continuation() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for index, block in enumerate(blocks):
        pool.publish([block], [bytes([index])])
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[3], blocks[2]]
    assert pool.match([bytes([index]) for index in range(4)]) == blocks[:2]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
