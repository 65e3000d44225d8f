"""The head that ships for SmolLM2: it loads, it is worth drafting with, and a prefix hit takes nothing from it."""

import functools
from typing import NamedTuple

import pytest

from cluster.engine import Engine
from cluster.sizing import SHIPPED_HEADS
from scheduler.events import SchedulerConfig
from scheduler.request import SamplingParams
from tests.test_real_model import directory, model_of, prompts
from tests.worlds import with_pool
from worker.eagle3 import Eagle3Drafter, load_head
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

NUM_BLOCKS, BLOCK = 32, 16
MAX_TOKENS = 48


pytestmark = pytest.mark.usefixtures("one_thread")


class Served(NamedTuple):
    token_ids: list[int]
    num_drafts: int
    accepted_per_pos: list[int]
    prefix_hits: int


@functools.cache
def served(with_hit: bool) -> Served:
    """A chat prompt answered with K = 3; before it, if so, one token for the same prompt."""
    model = with_pool(model_of("bf16"), BLOCK, NUM_BLOCKS)
    head = load_head(SHIPPED_HEADS / "smollm2", model, directory())
    runner = Runner(
        worker_id="a",
        model=model,
        drafter=Eagle3Drafter(head, max_drafts=3),
        max_num_seqs=1,
        sanitizer=KVSanitizer(NUM_BLOCKS, BLOCK),
    )
    engine = Engine([runner], SchedulerConfig(block_size=BLOCK, max_model_len=256, max_drafts=3))
    if with_hit:
        engine.submit(prompts()[3], SamplingParams(temperature=0.0), 1)
        engine.run()
    request_id = engine.submit(prompts()[3], SamplingParams(temperature=0.0), MAX_TOKENS)
    output = engine.run()[request_id]
    stats = engine.scheduler.stats()
    return Served(
        output.token_ids, stats.num_drafts, list(stats.num_accepted_tokens_per_pos), stats.prefix_cache_hits
    )


def test_acceptance_after_a_prefix_hit_is_that_without_one() -> None:
    assert (served(with_hit=True).prefix_hits, served(with_hit=False).prefix_hits) == (2 * BLOCK, 0)
    assert served(with_hit=True)[:3] == served(with_hit=False)[:3]


def test_its_drafts_are_accepted() -> None:
    without = served(with_hit=False)
    assert 1.0 + sum(without.accepted_per_pos) / without.num_drafts > 1.5
