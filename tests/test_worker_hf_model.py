"""Decoders outside the lean family, through transformers' own code with our attention."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.bloom import BloomConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.phi3 import Phi3Config

from cluster.engine import Engine
from scheduler.events import SchedulerConfig
from scheduler.request import SamplingParams
from tests.oracle import OracleDrafter
from tests.tiny_model import save_tiny_model
from worker.fingerprint import fingerprint, make_batch, self_test
from worker.hf_model import HfModel, load_any_model
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "gemma3 with sliding windows": Gemma3TextConfig(
        **GROUPED, head_dim=32, sliding_window=8, query_pre_attn_scalar=48,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": Phi3Config(**GROUPED),
}  # fmt: skip
PROMPTS = [[5, 9, 2, 77, 1], list(range(3, 40)), [7] * 12]
NUM_TOKENS = 16


pytestmark = pytest.mark.usefixtures("one_thread")


def made(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()


def generated(model: Any, prompt: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return [int(token_id) for token_id in out[0, len(prompt) :]]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_streams_are_those_of_generate(name: str) -> None:
    reference = made(CONFIGS[name])
    expected = {f"r{index}": generated(reference, prompt) for index, prompt in enumerate(PROMPTS)}
    model = HfModel(reference, num_blocks=40, block_size=16)
    assert self_test(model) == []
    assert "attention=" in fingerprint(model)
    drafter = OracleDrafter(max_drafts=3, vocab_size=120, spoil=0.3)
    drafter.learn({f"r{i}": [*prompt, *expected[f"r{i}"]] for i, prompt in enumerate(PROMPTS)})
    runner = Runner(
        worker_id="a",
        model=model,
        drafter=drafter,
        max_num_seqs=4,
        sanitizer=KVSanitizer(40, 16),
    )
    config = SchedulerConfig(block_size=16, max_model_len=256, max_num_batched_tokens=20, max_drafts=3)
    engine = Engine([runner], config)
    for request_id, prompt in zip(expected, PROMPTS, strict=True):
        engine.submit(prompt, SamplingParams(temperature=0.0), NUM_TOKENS, request_id)
    assert {request_id: output.token_ids for request_id, output in engine.run().items()} == expected
    assert engine.scheduler.stats().num_accepted_tokens > 0


def test_a_directory_is_loaded_by_the_code_that_serves_its_architecture(tmp_path: Path) -> None:
    reference = made(CONFIGS["phi3"])
    reference.save_pretrained(tmp_path / "phi3")
    save_tiny_model(tmp_path / "llama")
    settings: dict[str, Any] = {"dtype": torch.float32, "attention": "cpu", "num_blocks": 8, "block_size": 16}
    model = load_any_model(tmp_path / "phi3", device="cpu", **settings)
    assert isinstance(model, HfModel)
    batch = make_batch([(PROMPTS[0], 0, range(4))], 16)
    with torch.inference_mode():
        expected = reference(torch.tensor(PROMPTS[:1]), output_hidden_states=True)
    hidden, states = model.forward_with_states(batch, (1,))
    torch.testing.assert_close(model.logits(hidden), expected.logits[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(states, expected.hidden_states[1][0], atol=1e-3, rtol=1e-3)
    assert not isinstance(load_any_model(tmp_path / "llama", device="cpu", **settings), HfModel)
    with pytest.raises(ValueError, match="--device cpu only"):
        load_any_model(tmp_path / "phi3", device="cuda", **settings)


REFUSED: dict[str, PreTrainedConfig] = {
    "BloomForCausalLM does not use transformers' attention interface": BloomConfig(
        vocab_size=120, hidden_size=64, n_layer=1, n_head=2
    ),
    "GPT2LMHeadModel has cross-attention": GPT2Config(
        vocab_size=120, n_embd=64, n_layer=1, n_head=2, n_positions=64, add_cross_attention=True
    ),
    "Gemma2ForCausalLM: attn_logit_softcapping": Gemma2Config(**GROUPED, head_dim=32),
    "MixtralForCausalLM chooses experts": MixtralConfig(**GROUPED, num_local_experts=2),
    "GPTNeoXForCausalLM: rope type dynamic": GPTNeoXConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HfModel(made(REFUSED[message]), num_blocks=4, block_size=16)
