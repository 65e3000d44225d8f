"""The lean forward against transformers in fp32, and bit by bit against itself in bf16 and fp32."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from worker.architecture import read_config
from worker.fingerprint import make_batch
from worker.model import Model, ModelConfig, load_model, random_model
from worker.rope import RopeConfig

DTYPES = (torch.bfloat16, torch.float32)
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500000.0}  # fmt: skip
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0 + 0.2 * i for i in range(16)], "factor": 4.0,
            "long_factor": [2.0 + i for i in range(16)], "original_max_position_embeddings": 256,
            "rope_theta": 10000.0}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama tied": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SIZES, head_dim=32, attention_bias=True, mlp_bias=True),
    "llama llama3": LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3),
    "llama linear": LlamaConfig(**SIZES, head_dim=32, rope_parameters=LINEAR),
    "llama dynamic": LlamaConfig(**SIZES, head_dim=32, rope_parameters=DYNAMIC),
    "llama longrope": LlamaConfig(**SIZES, head_dim=32, rope_parameters=LONGROPE),
    "mistral": MistralConfig(**SIZES, head_dim=32, sliding_window=None),
    "mistral with a window": MistralConfig(**SIZES, head_dim=32, sliding_window=21),
    "qwen2": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen2 with a window in its last layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=17, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3 tied with biases": Qwen3Config(**SIZES, head_dim=32, attention_bias=True, tie_word_embeddings=True),
}
TINY = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip


@pytest.fixture(params=(1, 2), ids=("one thread", "two threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def saved(config: PreTrainedConfig, directory: Path) -> Any:
    """A random model of transformers, saved where `load_model` can find it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    model.save_pretrained(directory)
    return model.eval()


def load(directory: Path, dtype: torch.dtype = torch.float32, num_blocks: int = 24) -> Model:
    return load_model(directory, dtype=dtype, device="cpu", attention="cpu", num_blocks=num_blocks, block_size=16)


def greedy(model: Model, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Outputs, and the logits of every position that was sampled."""
    blocks = range(model.kv_cache.num_blocks)
    tokens, start, rows = list(prompt), 0, []
    for _ in range(num_tokens):
        hidden = model.forward(make_batch([(tokens[start:], start, blocks)], model.kv_cache.block_size))
        rows.append(model.logits(hidden[-1:])[0])
        start = len(tokens)
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(CONFIGS[name], tmp_path)
    model = load(tmp_path)
    prompt = random.Random(0).choices(range(3, 160), k=30)
    with torch.inference_mode():
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 30, dtype=torch.int64), max_new_tokens=60,
            do_sample=False, eos_token_id=-1, pad_token_id=0,
        )[0, 30:].tolist()  # fmt: skip
        logits = theirs(torch.tensor([prompt + expected])).logits[0, 29:-1]
    outputs, ours = greedy(model, prompt, 60)
    assert outputs == expected
    assert torch.allclose(ours, logits, atol=1e-3)
    assert len(set(outputs)) > 10


@pytest.mark.usefixtures("one_thread")
def test_a_sequence_past_the_trained_length_uses_the_long_factors_from_its_first_token(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, head_dim=32, rope_parameters=LONGROPE | {"original_max_position_embeddings": 64})
    theirs = saved(config, tmp_path)
    prompt = random.Random(0).choices(range(3, 160), k=100)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]  # of 100 tokens at once: long factors
    model = load(tmp_path)
    start = model.forward(make_batch([(prompt[:40], 0, range(24))], 16))
    rest = model.forward(make_batch([(prompt[40:], 40, range(24))], 16))
    assert torch.allclose(model.logits(torch.cat((start, rest))), expected, atol=1e-3)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_a_row_are_bitwise_the_same_in_any_company_and_chunking(
    threads: int, dtype: torch.dtype, block_size: int
) -> None:
    model = random_model(TINY, seed=0, dtype=dtype, num_blocks=512 // block_size, block_size=block_size)
    blocks = list(range(model.kv_cache.num_blocks))
    random.Random(0).shuffle(blocks)
    half = len(blocks) // 2
    tables = [blocks[:half], blocks[half:]]
    rng = random.Random(1)
    length = 150
    tokens = [rng.choices(range(128), k=length) for _ in tables]

    def run(*ranges: tuple[int, int, int]) -> list[torch.Tensor]:
        batch = make_batch([(tokens[i][start:stop], start, tables[i]) for i, start, stop in ranges], block_size)
        return list(model.logits(model.forward(batch)).split([stop - start for _, start, stop in ranges]))

    whole = [run((i, 0, length))[0] for i in (0, 1)]
    done = [0, 0]
    while min(done) < length:
        ranges = []
        for i in rng.sample((0, 1), 2):
            stop = min(done[i] + rng.choice((1, 1, 1, 2, 3, 5, 5, 12, 20, 70)), length)
            if done[i] < stop and rng.random() < 0.8:
                ranges.append((i, done[i], stop))
        if not ranges:
            continue
        for (i, start, stop), logits in zip(ranges, run(*ranges), strict=True):
            assert torch.equal(logits, whole[i][start:stop]), (ranges, i)
            # Some rows are computed again, as after a rejected draft.
            done[i] = stop if rng.random() < 0.8 else min(start + 1, stop)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_decodes_beside_a_prefill_have_the_bits_of_each_alone(dtype: torch.dtype) -> None:
    model = random_model(TINY, seed=0, dtype=dtype, num_blocks=80, block_size=16)
    rng = random.Random(0)
    prompts = [rng.choices(range(128), k=rng.randint(5, 60)) for _ in range(19)]
    tables = [range(4 * i, 4 * i + 4) for i in range(19)]
    alone = [
        model.logits(model.forward(make_batch([(p, 0, t)], 16))[-1:])[0] for p, t in zip(prompts, tables, strict=True)
    ]
    model.kv_cache.key.zero_()
    model.forward(make_batch([(p[:-1], 0, t) for p, t in zip(prompts[:-1], tables, strict=False)], 16))
    rows = [(p[-1:], len(p) - 1, t) for p, t in zip(prompts[:-1], tables, strict=False)]
    batch = make_batch([*rows, (prompts[-1], 0, tables[-1])], 16)
    logits = model.logits(model.forward(batch)[batch.logits_indices])
    assert torch.equal(logits, torch.stack(alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_float32_and_hidden_states_of_the_model_type(dtype: torch.dtype) -> None:
    model = random_model(TINY, seed=0, dtype=dtype, num_blocks=4, block_size=16)
    hidden = model.forward(make_batch([([1, 2, 3], 0, [2])], 16))
    assert hidden.dtype == dtype
    assert hidden.shape == (3, 64)
    assert model.logits(hidden).dtype == torch.float32
    assert model.logits(hidden[:0]).shape == (0, 128)


def test_a_random_model_is_its_seed_and_does_not_repeat_itself() -> None:
    models = [random_model(TINY, seed=seed, dtype=torch.float32, num_blocks=16, block_size=16) for seed in (0, 0, 1)]
    outputs = [greedy(model, [5, 6, 7], 60)[0] for model in models]
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(set(outputs[0])) > 20


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    def refusal(**changes: object) -> str:
        saved_config = {"architectures": ["LlamaForCausalLM"], **SIZES} | changes
        (tmp_path / "config.json").write_text(json.dumps(saved_config))
        with pytest.raises(ValueError, match=r"config\.json") as error:
            read_config(tmp_path)
        return str(error.value)

    message = refusal(architectures=["GemmaForCausalLM"])
    assert "architecture 'GemmaForCausalLM' is not supported" in message
    assert all(name in message for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
    assert "quantization_config" in refusal(quantization_config={"quant_method": "gptq"})
    assert "hidden_act 'gelu' is not supported" in refusal(hidden_act="gelu")
    assert "vocab_size must be a whole number, got 'many'" in refusal(vocab_size="many")
    assert "num_attention_heads 3 is not a multiple of 2" in refusal(num_attention_heads=3)
    assert "num_layers must be at least 1" in refusal(num_hidden_layers=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "dtype torch.float16 is not supported on cpu"),
        ({"attention": "flash"}, "attention 'flash' is unknown; known: cpu, triton"),
        ({"device": "mps"}, "device 'mps' is not supported; supported: cpu, cuda"),
        ({"device": "cuda"}, "attention cpu needs device cpu"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"dtype": torch.float32, "device": "cpu", "attention": "cpu"}
    settings |= {"num_blocks": 4, "block_size": 16} | changes
    with pytest.raises(ValueError, match=message):
        random_model(TINY, seed=0, **settings)  # type: ignore[arg-type]


def test_the_longest_served_length_fixes_the_factors() -> None:
    config = ModelConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32,
        max_position_embeddings=64, rope=RopeConfig(kind="dynamic", factor=2.0),
    )  # fmt: skip
    short, long = (
        random_model(config, seed=0, dtype=torch.float32, num_blocks=8, block_size=16, max_model_len=length)
        for length in (64, 128)
    )
    assert not torch.equal(short.rope.inverse_frequencies, long.rope.inverse_frequencies)
    assert (short.max_model_len, long.max_model_len) == (64, 128)


def test_the_states_that_enter_layers_are_those_of_transformers(tmp_path: Path) -> None:
    reference = saved(CONFIGS["qwen3"], tmp_path)
    model = load(tmp_path)
    token_ids = [5, 9, 2, 150, 77, 1]
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hidden, states = model.forward_with_states(make_batch([(token_ids, 0, range(4))], 16), (1, 0))
    torch.testing.assert_close(states, torch.cat((expected[1][0], expected[0][0]), 1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, expected[2][0], atol=1e-4, rtol=1e-4)
