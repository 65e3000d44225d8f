"""The promise, whatever drafts: heads, draft models and mixtures in random schedules never show in a stream."""

import functools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from tests.heads import Sketch, tensors_of
from tests.test_identity import CONFIG, DTYPES, asks_of
from tests.worlds import MAX_MODEL_LEN, Play, Stage, World, with_pool, world_of
from worker.adaptive import AdaptiveDrafts
from worker.draft_model import DraftModelDrafter
from worker.drafter import Drafter, NgramDrafter
from worker.eagle3 import Eagle3Drafter, Eagle3Head
from worker.eagle3_checkpoint import HeadConfig
from worker.mixture import MixedDrafter, PreferLookup
from worker.model import Model, ModelConfig, random_model
from worker.rope import RopeConfig
from worker.rows import RowState
from worker.sanitizer import KVSanitizer
from worker.step_costs import StepCosts

WORLDS = 3  # of each drafter and dtype
HEAD = Sketch(target=CONFIG, state_layers=(0, 1, 1))


pytestmark = pytest.mark.usefixtures("one_thread")


class Sometimes(Drafter):
    """Another drafter at two positions of three: the mixture's other half drafts at the third."""

    def __init__(self, drafter: Drafter) -> None:
        self.max_drafts = drafter.max_drafts
        self._drafter = drafter

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        proposed = self._drafter.propose(rows, num_propose)
        return [drafts if row.num_tokens % 3 else [] for row, drafts in zip(rows, proposed, strict=True)]


def head_of(model: Model) -> Eagle3Head:
    config = HeadConfig(
        hidden_size=HEAD.hidden_size,
        target_hidden_size=CONFIG.hidden_size,
        intermediate_size=96,
        num_heads=HEAD.num_heads,
        num_kv_heads=HEAD.num_kv_heads,
        head_dim=HEAD.head_dim,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        state_layers=HEAD.state_layers,
        token_ids=None,
    )
    return Eagle3Head(config, tensors_of(HEAD), model)


def eagle3(world: World, model: Model, oracle: Drafter) -> Drafter:
    """The head beside a drafter that is often right, so that there is something to accept and to roll back."""
    head = Eagle3Drafter(head_of(model), max_drafts=world.num_drafts)
    return MixedDrafter(Sometimes(oracle), head, PreferLookup())


def lookup_and_head(world: World, model: Model, oracle: Drafter) -> Drafter:
    head = Eagle3Drafter(head_of(model), max_drafts=max(world.num_drafts - 1, 1), max_model_len=100)
    lookup = NgramDrafter(max_drafts=world.num_drafts, prompt_lookup_min=1, prompt_lookup_max=3)
    return MixedDrafter(lookup, head, PreferLookup())


def draft_model(world: World, model: Model, oracle: Drafter) -> Drafter:
    """Other heads, other blocks, and a pool too small for everybody."""
    retention = "step" if world.seed % 2 else "request"
    drafter = DraftModelDrafter(
        with_pool(draft(), 8, 24),
        max_drafts=world.num_drafts,
        max_num_seqs=world.max_num_seqs,
        vocab_size=CONFIG.vocab_size,
        retention=retention,
        window=40,
        max_model_len=90,
        sanitizer=KVSanitizer(24, 8),
    )
    return MixedDrafter(Sometimes(oracle), drafter, PreferLookup())


def auto(world: World, model: Model, oracle: Drafter) -> Drafter:
    """K chosen in every step, by the time that steps really take here."""
    head = Eagle3Drafter(head_of(model), max_drafts=world.num_drafts)
    costs = StepCosts({1: 1e6, 4: 1.1e6, 16: 1.5e6})
    return MixedDrafter(Sometimes(oracle), head, AdaptiveDrafts(costs, world.num_drafts))


DRAFTERS = {"eagle3": eagle3, "ngram and eagle3": lookup_and_head, "draft_model": draft_model, "auto": auto}


@functools.cache
def draft() -> Model:
    """Another shape than the target's 4/2 heads of 32."""
    config = ModelConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    return random_model(config, seed=4, dtype=torch.float32, num_blocks=1, block_size=8)


@functools.cache
def stage_of(dtype: str) -> Stage:
    model = random_model(CONFIG, seed=3, dtype=DTYPES[dtype], num_blocks=1, block_size=16)
    return Stage.of(model, asks_of(with_pool(model, 16, MAX_MODEL_LEN // 16)), DRAFTERS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_shows_in_a_stream(dtype: str, drafter: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(1, 1 + WORLDS):
        happened += Play(world_of(seed, dtype, drafter), stage_of(dtype)).to_the_end()
    for what in ("rolled back", "accepted tokens", "preempted: blocks"):
        assert happened[what] > 0, f"never happened: {what}; {happened}"
    assert happened["preempt with frames in flight"] + happened["reset running with frames in flight"] > 0
