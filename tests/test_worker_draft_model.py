"""A draft model beside its target: two KV groups, drafts as from scratch, and what happens when its pool is short."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cluster.engine import Engine
from scheduler.events import CacheReset, PreemptRequested, SchedulerConfig
from scheduler.request import FinishReason, SamplingParams
from scheduler.step import Arrival
from tests.oracle import single_row_batch, undisturbed
from tests.worlds import with_pool
from worker import draft_model
from worker.draft_model import DraftModelDrafter
from worker.drafter import Drafter
from worker.model import Model, ModelConfig, random_model
from worker.rows import RowState, RowTable
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

TARGET = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip
DRAFT = ModelConfig(
    vocab_size=112, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=64,
    max_position_embeddings=256,
)  # fmt: skip
BLOCK, DRAFT_BLOCK = 16, 8
GREEDY = SamplingParams(temperature=0.0)


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def target() -> Model:
    return random_model(TARGET, seed=1, dtype=torch.float32, num_blocks=1, block_size=BLOCK)


@functools.cache
def draft() -> Model:
    return random_model(DRAFT, seed=2, dtype=torch.float32, num_blocks=1, block_size=DRAFT_BLOCK)


class Watched(Drafter):
    """Compares every proposal with the draft model's own from scratch."""

    def __init__(self, drafter: DraftModelDrafter, window: int | None) -> None:
        self.max_drafts = drafter.max_drafts
        self.drafter, self._window = drafter, window
        self._alone = with_pool(draft(), DRAFT_BLOCK, 32)
        self.num_compared = self.num_silent = 0
        self.most_used = 0

    def begin_session(self) -> None:
        self.drafter.begin_session()

    def forget(self, epoch: int) -> None:
        self.drafter.forget(epoch)

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        proposed = self.drafter.propose(rows, num_propose)
        for row, drafts in zip(rows, proposed, strict=True):
            assert drafts == self._from_scratch(row, len(drafts))
            self.num_compared += len(drafts)
            self.num_silent += not drafts
        used = self.drafter.model.kv_cache.num_blocks - self.drafter.num_free_blocks
        self.most_used = max(self.most_used, used)
        return proposed

    def _from_scratch(self, row: RowState, count: int) -> list[int]:
        known = row.token_ids.tolist()[-self._window if self._window else 0 :]
        drafts: list[int] = []
        for _ in range(count):
            hidden = self._alone.forward(single_row_batch(known + drafts, 0, DRAFT_BLOCK))
            logits = self._alone.logits(hidden[-1:])[0, : TARGET.vocab_size].numpy()
            assert row.sampler is not None
            drafts.append(row.sampler.draft(logits, row.num_tokens + len(drafts)))
        return drafts


def watched_engine(
    *,
    num_blocks: int = 64,
    num_draft_blocks: int = 128,
    budget: int = 2048,
    retention: str = "request",
    window: int = 24,
    max_model_len: int | None = None,
    max_drafts: int = 3,
) -> tuple[Engine, Watched]:
    drafter = DraftModelDrafter(
        with_pool(draft(), DRAFT_BLOCK, num_draft_blocks),
        max_drafts=max_drafts,
        max_num_seqs=8,
        vocab_size=TARGET.vocab_size,
        retention=retention,
        window=window,
        max_model_len=max_model_len,
        sanitizer=KVSanitizer(num_draft_blocks, DRAFT_BLOCK),
    )
    watched = Watched(drafter, window if retention == "step" else None)
    runner = Runner(
        worker_id="a",
        model=with_pool(target(), BLOCK, num_blocks),
        drafter=watched,
        max_num_seqs=8,
        sanitizer=KVSanitizer(num_blocks, BLOCK),
    )
    config = SchedulerConfig(block_size=BLOCK, max_model_len=256, max_num_batched_tokens=budget, max_drafts=max_drafts)
    return Engine([runner], config), watched


def prompt_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TARGET.vocab_size, (length,), generator=generator).tolist()


def rows_of(prompts: Sequence[Sequence[int]]) -> list[RowState]:
    """Greedy requests resident on a worker, epochs and rows from 0."""
    table = RowTable(len(prompts), BLOCK)
    arrivals = [
        Arrival(
            row=index, request_id=f"r{index}", epoch=index, prompt_token_ids=np.array(prompt, np.int32),
            output_token_ids=np.empty(0, np.int32), num_computed_tokens=0, sampling=GREEDY, end=100, namespace=0,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    return [RowState.of(arrival, table, TARGET.vocab_size) for arrival in arrivals]


def sampling_of(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=index) if index % 2 else GREEDY


def run_many(engine: Engine, *, num_tokens: int = 24, disturb: bool = False) -> None:
    """Ten requests of different lengths; their streams are the undisturbed ones."""
    for index in range(10):
        engine.submit(prompt_of(index, 7 + 9 * index), sampling_of(index), num_tokens, f"r{index}")
        for _ in range(3):
            engine.step()
        if disturb and index in (4, 7):
            engine.handle(PreemptRequested(request_id=f"r{index}"))
        if disturb and index == 8:
            engine.handle(CacheReset(reset_running=True))
    alone = with_pool(target(), BLOCK, 16)
    for index, output in enumerate(engine.run().values()):
        assert output.finish_reason is FinishReason.LENGTH, output.finish
        prompt = output.prompt_token_ids.tolist()
        assert output.token_ids == undisturbed(alone, prompt, sampling_of(index), num_tokens).token_ids


def test_drafts_that_reach_far_past_the_accepted_ones_are_forgotten() -> None:
    # The drafts that nobody accepted reach past the confirmed tokens by two and more.
    engine, watched = watched_engine(max_drafts=5)
    run_many(engine)
    assert watched.num_compared > 300
    assert engine.scheduler.stats().num_accepted_tokens_per_pos[0] > 0


@pytest.mark.parametrize("retention", ["request", "step"])
def test_drafts_are_as_from_scratch_and_no_block_is_left_behind(retention: str) -> None:
    engine, watched = watched_engine(num_blocks=24, budget=40, retention=retention)
    run_many(engine, disturb=True)
    assert watched.num_compared > 300
    # What ended last is released with the next plan.
    watched.begin_session()
    assert watched.drafter.num_free_blocks == 128


def test_trap_40_two_groups_of_different_shape_share_no_block() -> None:
    engine, watched = watched_engine()
    before = [watched.drafter.model.kv_cache.key.shape, target().kv_cache.key.shape[2:]]
    assert before[0][2:] != before[1]
    run_many(engine)
    assert watched.num_silent < watched.num_compared


def test_a_short_pool_evicts_draft_kv_and_the_rows_catch_up_later() -> None:
    engine, watched = watched_engine(num_draft_blocks=20)
    run_many(engine)
    assert watched.num_silent > 0
    assert watched.num_compared > 60
    assert engine.scheduler.stats().num_preemptions.get("blocks", 0) == 0


def test_rows_that_do_not_draft_lose_their_kv_to_those_that_do() -> None:
    engine, watched = watched_engine(num_draft_blocks=14)
    drafter = watched.drafter
    for index in range(2):
        engine.submit(prompt_of(index, 60), GREEDY, 60, f"r{index}")
    for _ in range(6):
        engine.step()
    rows = [seat.row for seat in drafter._seats.values()]
    assert len(rows) == 1  # there is room for one of them
    engine.run()
    assert watched.num_compared > 50


def test_the_row_that_has_not_drafted_for_longest_is_evicted_first_and_drafts_again_later() -> None:
    drafter = watched_engine(num_draft_blocks=12)[1].drafter  # 4 blocks for each of three rows
    rows = rows_of([prompt_of(index, 28) for index in range(4)])
    first = drafter.propose(rows[:3], [3, 3, 3])
    drafter.propose([rows[0], rows[2]], [3, 3])
    drafter.propose([rows[2]], [3])
    assert (drafter.num_free_blocks, drafter.num_evictions) == (0, 0)
    [drafts] = drafter.propose([rows[3]], [3])
    assert len(drafts) == 3
    assert list(drafter._seats) == [0, 2, 3]
    assert drafter.propose([rows[1]], [3]) == [first[1]]
    assert list(drafter._seats) == [2, 3, 1]
    assert drafter.num_evictions == 2


def test_a_long_prompt_is_caught_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 20)
    engine, watched = watched_engine()
    engine.submit(prompt_of(1, 90), GREEDY, 24)
    engine.run()
    assert 4 <= watched.num_silent <= 8
    assert watched.num_compared > 20


def test_under_retention_step_only_a_window_is_held_and_nothing_between_steps() -> None:
    engine, watched = watched_engine(retention="step", num_draft_blocks=8)
    run_many(engine)
    assert watched.most_used == 0  # after each proposal
    assert watched.num_compared > 60


def test_trap_12_past_the_draft_model_s_context_the_output_goes_on_without_drafts() -> None:
    engine, watched = watched_engine(max_model_len=40)
    engine.submit(prompt_of(1, 30), GREEDY, 50)
    [output] = engine.run().values()
    assert len(output.token_ids) == 50
    assert output.finish_reason is FinishReason.LENGTH
    assert 0 < watched.num_compared <= 40
    assert watched.most_used <= 5


def test_a_draft_model_equal_to_its_target_is_always_right() -> None:
    pool = with_pool(target(), DRAFT_BLOCK, 64)
    drafter = DraftModelDrafter(pool, max_drafts=3, max_num_seqs=8, vocab_size=TARGET.vocab_size)
    model = with_pool(target(), BLOCK, 64)
    runner = Runner(worker_id="a", model=model, drafter=drafter, max_num_seqs=8, sanitizer=None)
    engine = Engine([runner], SchedulerConfig(block_size=BLOCK, max_model_len=256, max_drafts=3))
    for index in range(4):
        engine.submit(prompt_of(index, 20), sampling_of(index), 40)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 200}, "another tokenizer"),
        ({"retention": "ever"}, "draft_kv_retention 'ever' is unknown"),
        ({"max_drafts": 0}, "num_speculative_tokens"),
        ({"retention": "step", "window": 300}, "a window of 300"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, int], message: str) -> None:
    settings = {"max_drafts": 3, "max_num_seqs": 8, "vocab_size": 96} | change
    with pytest.raises(ValueError, match=message):
        DraftModelDrafter(with_pool(draft(), DRAFT_BLOCK, 4), **settings)  # type: ignore[arg-type]
