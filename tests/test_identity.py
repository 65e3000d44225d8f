"""The promise: a stream is a function of (model, prompt, sampling parameters, seed) alone.

Random schedules on a small random model; token ids and logprobs must be bitwise those of each request
decoded alone.
"""

import functools
import os
import random
from collections import Counter

import pytest
import torch

from scheduler.request import SamplingParams
from tests.oracle import ToyModel, undisturbed
from tests.worlds import MAX_MODEL_LEN, Ask, Play, Stage, assert_everything_happened, with_pool, world_of
from worker.model import Model, ModelConfig, random_model

FULL = os.environ.get("SLIPSTREAM_FULL") == "1"
WORLDS_PER_GROUP = 60 if FULL else 20  # of 6 groups
CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=MAX_MODEL_LEN,
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


pytestmark = pytest.mark.usefixtures("one_thread")


def asks_of(alone: Model) -> list[Ask]:
    """Requests of all kinds, each decoded alone once. Prompts share prefixes and repeat themselves."""
    rng = random.Random(5)
    vocabulary = range(alone.config.vocab_size)
    system = rng.choices(vocabulary, k=40)
    asks = []
    for index in range(36):
        prompt = system[: rng.choice((0, 16, 33, 40))] + rng.choices(vocabulary, k=rng.randint(1, 30))
        if index % 3 == 0:
            prompt += prompt[-8:]
        sampling = SamplingParams(
            temperature=0.0 if index % 2 else 0.8,
            seed=rng.getrandbits(64),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
            eos_token_ids=(rng.choice(vocabulary),),
            stop_token_ids=(rng.choice(vocabulary),),
            min_tokens=rng.choice((0, 0, 6)),
            num_logprobs=rng.choice((0, 0, 3, None)),
        )
        max_tokens = rng.choice((1, 2, 3, 5, 16, 32, 48))
        stream = undisturbed(alone, prompt, sampling, max_tokens)
        asks.append(Ask(prompt_token_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens, stream=stream))
    return asks


@functools.cache
def stage_of(dtype: str) -> Stage:
    """A small random model, or under "toy" one whose KV is its tokens."""
    if dtype == "toy":
        pooled = functools.partial(toy, 64)
        return Stage(64, asks_of(pooled(16, MAX_MODEL_LEN // 16)), pooled)
    model = random_model(CONFIG, seed=3, dtype=DTYPES[dtype], num_blocks=1, block_size=16)
    return Stage.of(model, asks_of(with_pool(model, 16, MAX_MODEL_LEN // 16)))


def toy(vocab_size: int, block_size: int, num_blocks: int) -> Model:
    """Its last token decides most, so that n-gram drafts come true now and then."""
    return ToyModel(vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size, last_token_weight=3.0)


@pytest.mark.parametrize("dtype", [*DTYPES, "toy"])
@pytest.mark.parametrize("drafter", ["ngram", "oracle"])
def test_streams_are_bitwise_those_of_undisturbed_runs(dtype: str, drafter: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(WORLDS_PER_GROUP):
        happened += Play(world_of(seed, dtype, drafter), stage_of(dtype)).to_the_end()
    assert_everything_happened(happened, drafter)
