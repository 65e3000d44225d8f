"""The block pool: references, the free list, the prefix cache; and what prefixes are worth to requests."""

import hashlib

import numpy as np
import pytest

from scheduler.blocks import BlockPool, extend_digests, root_digest
from scheduler.events import CacheReset, PreemptRequested
from tests.builders import Stage, prompt_of, scripted, submitted


def digests_of(token_ids: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    """The chain over the full blocks of these tokens."""
    digests: list[bytes] = []
    count = len(token_ids) // block_size
    extend_digests(digests, root_digest(salt), np.array(token_ids, np.int32), count, block_size)
    return digests


# ---- digests ----


def test_digest_of_a_block_names_everything_before_it() -> None:
    """Equal blocks after unequal ones are not equal."""
    same, other = digests_of([1, 2, 3, 4, 5, 6, 7, 8]), digests_of([1, 2, 3, 9, 5, 6, 7, 8])
    assert same[0] != other[0]
    assert same[1] != other[1]
    assert digests_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == same[0]


def test_digests_grow_in_place_to_the_same_chain() -> None:
    """Whether block by block or all at once."""
    tokens = np.arange(23, dtype=np.int32)
    digests: list[bytes] = []
    for count in (0, 1, 1, 3, 5):
        extend_digests(digests, root_digest(""), tokens, count, 4)
        assert len(digests) == count
    assert digests == digests_of(tokens.tolist())


def test_digest_is_sha256_over_parent_and_int32_bytes_and_the_salt_is_in_the_root() -> None:
    """No constructible collision may connect two tenants."""
    tokens = np.array([1, 2, 3, 4], np.int32)
    [digest] = digests_of([1, 2, 3, 4], salt="east")
    assert digest == hashlib.sha256(root_digest("east") + tokens.tobytes()).digest()
    assert len(digest) == 32
    assert len({root_digest(salt) for salt in ("", "east", "west")}) == 3


# ---- the pool ----


def test_pool_takes_the_longest_idle_blocks_first() -> None:
    """What they cached is forgotten with that."""
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    digests = digests_of([1, 2, 3, 4, 5, 6, 7, 8])
    for block, digest in zip([0, 1], digests, strict=True):
        pool.publish([block], [digest])
    pool.release([0, 1])
    pool.check([])
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.allocate(2) == [2, 3]
    assert pool.match(digests) == [0, 1]
    assert pool.allocate(1) == [1]  # the last of a chain goes first: the prefix outlives its continuation
    assert pool.match(digests) == [0]
    assert pool.allocate(1) == [0]
    assert pool.match(digests) == []
    pool.check([[2, 3], [1], [0]])


def test_block_with_nothing_to_remember_goes_before_cached_ones() -> None:
    """Also when it was released last."""
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.publish([first], [digests_of([1, 2, 3, 4])[0]])
    pool.release([first])
    pool.release([second, third])
    assert set(pool.allocate(2)) == {second, third}
    assert pool.num_cached == 1


def test_shared_block_is_free_when_its_last_holder_left() -> None:
    """References count holders."""
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    digests = digests_of([1, 2, 3, 4])
    pool.publish([block], [digests[0]])
    pool.acquire(pool.match(digests))
    assert (pool.reference_count(block), pool.num_used) == (2, 1)
    pool.release([block])
    assert pool.num_used == 1
    pool.release([block])
    assert pool.num_used == 0
    assert pool.num_idle(pool.match(digests)) == 1
    pool.acquire(pool.match(digests))
    assert (pool.num_idle([block]), pool.num_free) == (0, 1)
    pool.check([[block]])


def test_block_released_twice_is_our_mistake() -> None:
    """Told at once, not when somebody reads another's KV."""
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_first_block_published_under_a_digest_stays() -> None:
    """A second one with the same tokens is not cached and goes first."""
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    digests = digests_of([1, 2, 3, 4])
    pool.publish([first], [digests[0]])
    pool.publish([second], [digests[0]])
    assert pool.match(digests) == [first]
    pool.release([first, second])
    assert pool.allocate(2) == [second, 2]
    assert pool.match(digests) == [first]
    pool.check([[second, 2]])


def test_cached_block_keeps_its_digest_until_a_reset() -> None:
    """It holds one text; under a new namespace it may be published again."""
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    first, second = digests_of([1, 2, 3, 4])[0], digests_of([5, 6, 7, 8])[0]
    pool.publish([block], [first])
    pool.publish([block], [second])
    assert (pool.match([first]), pool.match([second])) == ([block], [])
    pool.reset()
    pool.publish([block], [second])
    assert (pool.match([first]), pool.match([second])) == ([], [block])
    pool.check([[block]])


def test_reset_forgets_everything_and_lets_requests_keep_their_blocks() -> None:
    """A block of the old namespace is never found again, also when it is published or taken later."""
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    digests = digests_of([1, 2, 3, 4, 5, 6, 7, 8])
    pool.publish([first], [digests[0]])
    pool.reset()
    pool.check([[first, second]])
    assert (pool.namespace, pool.num_cached, pool.match(digests)) == (1, 0, [])
    pool.publish([second], [digests[0]])
    assert pool.match(digests) == [second]
    pool.release([first, second])
    assert set(pool.allocate(2)) == {first, 2}  # the old entry must not take the new one along
    assert pool.match(digests) == [second]
    pool.check([[first, 2]])


def test_pool_needs_a_block() -> None:
    """What a user can configure raises ValueError."""
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


# ---- what requests get from it ----


def test_nothing_in_flight_is_a_hit() -> None:
    """Two identical prompts of 100 in one step: 100 and 100 computed, and 4 for a later one."""
    stage = Stage(max_drafts=0)
    prompt = prompt_of("r0", 100).tolist()
    stage.handle(submitted("r0", prompt, max_tokens=3), submitted("r1", prompt, max_tokens=3))
    stage.up()
    assert {name: frame.num_scheduled for name, frame in stage.in_flight()[0].items()} == {"r0": 100, "r1": 100}
    stage.answer()
    stage.handle(submitted("r2", prompt, max_tokens=3))
    stage.run()
    assert stage.frames_of("r2")[0].num_scheduled == 4
    assert stage.finished["r2"].num_cached_tokens == 96
    assert stage.outputs == {f"r{index}": scripted(f"r{index}", 0, 3) for index in range(3)}
    stage.assert_settled()


@pytest.mark.parametrize(("max_drafts", "num_steps"), [(0, 1), (0, 2), (4, 2)])
def test_each_turn_of_a_conversation_computes_only_what_is_new(max_drafts: int, num_steps: int) -> None:
    """Five turns, 100 prompt + 200 output, the next prompt all before: 300 % 16 = 12 tokens computed."""
    stage = Stage(max_drafts=max_drafts, max_steps_in_flight=num_steps)
    stage.up(num_blocks=128)
    text = prompt_of("r0", 100).tolist()
    computed = []
    for turn in range(5):
        stage.handle(submitted(f"r{turn}", text, max_tokens=200))
        stage.run()
        computed.append(stage.frames_of(f"r{turn}")[0].num_scheduled)
        assert stage.outputs[f"r{turn}"] == scripted(f"r{turn}", 0, 200)
        text += stage.outputs[f"r{turn}"]
    assert computed == [100, 300 % 16, 500 % 16, 700 % 16, 900 % 16]
    stage.assert_settled()


def test_hit_of_a_drafter_that_looks_ahead_loses_its_last_block() -> None:
    """A prompt of 48 cached before: T - 1 leaves two blocks, and the draft KV at their end depends on the next
    token, so 16 tokens are hit; without such a drafter 32."""
    hits = {}
    for drop in (False, True):
        stage = Stage(max_drafts=0)
        stage.up(drop_last_hit_block=drop)
        for stream in range(2):
            stage.handle(submitted("r0", 48, max_tokens=2, stream=stream))
            stage.run()
        hits[drop] = stage.arrivals[1].num_computed_tokens
    assert hits == {False: 32, True: 16}


def test_hit_never_covers_the_last_confirmed_token() -> None:
    """Something must be computed to sample from, also when resumed at a block border."""
    stage = Stage(max_drafts=0)
    stage.up()
    stage.handle(submitted("r0", 48, max_tokens=20))
    stage.run()
    stage.handle(submitted("r1", prompt_of("r0", 48).tolist(), max_tokens=20, resume=scripted("r0", 0, 16)))
    assert stage.arrivals_of("r1")[0].num_computed_tokens == 48
    assert stage.frames_of("r1")[0].num_scheduled == 16


def test_preempted_request_finds_its_own_blocks_again() -> None:
    """What it had confirmed and completed was published before it left."""
    stage = Stage(max_drafts=0, max_steps_in_flight=1)
    stage.up()
    stage.handle(submitted("r0", 40, max_tokens=30))
    while len(stage.outputs["r0"]) < 10:
        stage.answer()
    stage.handle(PreemptRequested(request_id="r0"))
    stage.answer()
    assert stage.arrivals_of("r0")[-1].num_computed_tokens == 48
    stage.run()
    assert stage.outputs["r0"] == scripted("r0", 0, 30)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("max_tokens", [1, 14, 15, 16, 17])
def test_no_block_leaks_whatever_the_length_at_the_end(num_tokens: int, max_tokens: int) -> None:
    """Confirmed lengths that are not block-aligned: free + used == total at all times. sglang issue 31616."""
    stage = Stage(max_drafts=3, max_steps_in_flight=2, num_accepted=lambda _r, outputs, drafts: outputs % (drafts + 1))
    stage.up(num_blocks=12)
    for round_ in range(3):
        for index in range(2):
            stage.handle(submitted(f"r{index}", num_tokens, max_tokens=max_tokens, stream=10 * round_ + index))
        stage.run()
        assert stage.pool().num_free == 12
    stage.assert_settled()


def test_blocks_of_the_old_namespace_are_no_hits_after_a_reset() -> None:
    """Whoever wrote them."""
    stage = Stage(max_drafts=0)
    stage.up()
    for stream, reset in enumerate((False, True, False)):
        if reset:
            stage.handle(CacheReset())
        stage.handle(submitted("r0", 64, max_tokens=2, stream=stream))
        stage.run()
    assert [arrival.num_computed_tokens for arrival in stage.arrivals] == [0, 0, 48]
