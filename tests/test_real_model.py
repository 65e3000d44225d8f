"""SmolLM2-135M: greedy streams are Hugging Face's, and no schedule shows in any stream."""

import functools
import itertools
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.engine import Engine
from scheduler.events import SchedulerConfig
from scheduler.request import SamplingParams
from tests.oracle import OracleDrafter, undisturbed
from tests.worlds import MAX_MODEL_LEN, Ask, Play, Stage, assert_everything_happened, with_pool, world_of
from worker.drafter import Drafter, NgramDrafter
from worker.fetch import fetch
from worker.model import Model, load_model
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

pytestmark = pytest.mark.timeout(3600)

FULL = os.environ.get("SLIPSTREAM_FULL") == "1"
GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Name three primary colours.",
    "Translate 'good morning' into Spanish.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "1, 2, 3, 4, 5, 6, 7,",
    "Once upon a time, in a village by the sea,",
    "Roses are red, violets are blue,",
    "To be, or not to be, that is the question:",
    "A B C D E F A B C D E F A B C",
    "The Industrial Revolution began in",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at",
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to serve the prompts."""

    num_drafts: int
    max_steps_in_flight: int
    block_size: int
    max_num_batched_tokens: int  # the prefill chunk

    def name(self) -> str:
        """Its test's."""
        columns = (self.num_drafts, self.max_steps_in_flight, self.block_size, self.max_num_batched_tokens)
        return "K{}-flight{}-block{}-chunk{}".format(*columns)


KS, STEPS, BLOCKS, CHUNKS = (0, 1, 4, 8), (1, 2, 4), (16, 32), (24, 2048)
# Every pair of values of two of the four columns stands in one of these rows.
PAIRWISE = [
    Setting(
        num_drafts=num_drafts,
        max_steps_in_flight=steps,
        block_size=BLOCKS[(i + j) % 2],
        max_num_batched_tokens=CHUNKS[(i // 2 + j) % 2],
    )
    for (i, num_drafts), (j, steps) in itertools.product(enumerate(KS), enumerate(STEPS))
]
ALL = [
    Setting(num_drafts=k, max_steps_in_flight=steps, block_size=block, max_num_batched_tokens=chunk)
    for k, steps, block, chunk in itertools.product(KS, STEPS, BLOCKS, CHUNKS)
]


def test_the_sample_of_settings_holds_every_pair() -> None:
    columns = ("num_drafts", "max_steps_in_flight", "block_size", "max_num_batched_tokens")
    for one, two in itertools.combinations(columns, 2):
        pairs = {(getattr(setting, one), getattr(setting, two)) for setting in ALL}
        assert {(getattr(setting, one), getattr(setting, two)) for setting in PAIRWISE} == pairs


@functools.cache
def directory() -> Path:
    """The fetched model."""
    return fetch("smollm2")


@functools.cache
def model_of(dtype: str) -> Model:
    """Loaded once; pools come from `with_pool`."""
    return load_model(directory(), dtype=DTYPES[dtype], device="cpu", attention="cpu", num_blocks=1, block_size=16)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """20 prompts: chat questions that share a system prompt, and plain texts."""
    tokenizer = AutoTokenizer.from_pretrained(directory())
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (*chats, *TEXTS))


@functools.cache
def hugging_face_streams() -> tuple[tuple[int, ...], ...]:
    """What generate() says in fp32, without stops: [20] streams of MAX_TOKENS."""
    model = AutoModelForCausalLM.from_pretrained(directory(), dtype=torch.float32)
    streams = []
    with torch.inference_mode():
        for prompt in prompts():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
            streams.append(tuple(out[0, len(prompt) :].tolist()))
    return tuple(streams)


def drafter_of(setting: Setting) -> Drafter | None:
    """Prompt lookup where the pool has small blocks, else a drafter that knows and spoils."""
    if setting.num_drafts == 0:
        return None
    if setting.block_size == 16:
        return NgramDrafter(max_drafts=setting.num_drafts, prompt_lookup_min=1)
    oracle = OracleDrafter(max_drafts=setting.num_drafts, vocab_size=model_of("fp32").config.vocab_size, spoil=0.25)
    streams = zip(prompts(), hugging_face_streams(), strict=True)
    oracle.learn({f"r{index}": [*prompt, *stream] for index, (prompt, stream) in enumerate(streams)})
    return oracle


@pytest.mark.parametrize("setting", ALL if FULL else PAIRWISE, ids=Setting.name)
def test_greedy_streams_are_those_of_hugging_face_generate(setting: Setting) -> None:
    num_blocks = 1280 // setting.block_size
    runner = Runner(
        worker_id="a",
        model=with_pool(model_of("fp32"), setting.block_size, num_blocks),
        drafter=drafter_of(setting),
        max_num_seqs=len(prompts()),
        sanitizer=KVSanitizer(num_blocks, setting.block_size),
    )
    config = SchedulerConfig(
        block_size=setting.block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_steps_in_flight=setting.max_steps_in_flight,
        max_drafts=setting.num_drafts,
    )
    engine = Engine([runner], config)
    for index, prompt in enumerate(prompts()):
        engine.submit(prompt, GREEDY, MAX_TOKENS, f"r{index}")
    outputs = engine.run()
    engine.scheduler.check()
    streams = {f"r{index}": list(stream) for index, stream in enumerate(hugging_face_streams())}
    assert {request_id: output.token_ids for request_id, output in outputs.items()} == streams
    if setting.num_drafts:
        assert engine.scheduler.stats().num_accepted_tokens > 0
        assert engine.scheduler.stats().tokens_rolled_back > 0


# ---- no schedule shows ----


@functools.cache
def stage_of(dtype: str) -> Stage:
    """Greedy and seeded requests over the real model, each decoded alone once."""
    alone = with_pool(model_of(dtype), 16, MAX_MODEL_LEN // 16)
    asks = []
    for index, prompt in enumerate(prompts()):
        sampling = SamplingParams(
            temperature=0.8 if index % 2 else 0.0,
            top_p=0.95 if index % 3 else 1.0,
            seed=index * 0x9E3779B97F4A7C15 % 2**64,
            repetition_penalty=1.1 if index % 5 == 0 else 1.0,
            eos_token_ids=alone.config.eos_token_ids,
            num_logprobs=index % 4,
        )
        max_tokens = (4, 9, 16)[index % 3]
        stream = undisturbed(alone, prompt, sampling, max_tokens)
        asks.append(Ask(prompt_token_ids=prompt, sampling=sampling, max_tokens=max_tokens, stream=stream))
    return Stage.of(model_of(dtype), asks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_schedules_do_not_show_in_the_real_model_s_streams(dtype: str) -> None:
    happened = Play(world_of(13, dtype, "oracle"), stage_of(dtype)).to_the_end()
    assert happened["rolled back"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_forty_schedules_do_not_show_in_the_real_model_s_streams(dtype: str) -> None:
    """20 with each dtype, half of them with each drafter."""
    happened: Counter[str] = Counter()
    for drafter, seed in itertools.product(("ngram", "oracle"), range(10)):
        happened += Play(world_of(seed, dtype, drafter), stage_of(dtype)).to_the_end()
    assert_everything_happened(happened, "oracle")
