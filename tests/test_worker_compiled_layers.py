"""A step's layers in one call give the bits of the layers one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.heads import Sketch, save_head
from worker import amx
from worker.eagle3 import Eagle3Head
from worker.eagle3_checkpoint import read_head
from worker.fingerprint import make_batch, self_test
from worker.model import Model, ModelConfig, random_model

pytestmark = pytest.mark.skipif(not amx.is_available(), reason="this processor has no AMX tiles")

PLAIN = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip
FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head norms": {"qk_norm": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "windows": {"windows": (8, None, 24, None)},
    "a vocabulary that fills no tiles, so rows are padded": {"vocab_size": 132},
}


def model(flavour: str, quantization: str | None) -> Model:
    settings = {name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__} | FLAVOURS[flavour]
    return random_model(
        ModelConfig(**settings), seed=0, dtype=torch.bfloat16, num_blocks=32, block_size=16, quantization=quantization
    )


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("quantization", [None, "int8"], ids=str)
def test_one_call_gives_the_bits_of_layer_after_layer(flavour: str, quantization: str | None) -> None:
    compiled, plain = model(flavour, quantization), model(flavour, quantization)
    assert compiled._compiled is not None
    plain._compiled = None
    tokens = list(range(3, 100))
    batches = [
        make_batch([(tokens[:70], 0, range(7)), (tokens[:9], 0, [10])], 16),
        make_batch([(tokens[70:71], 70, range(7)), (tokens[9:14], 9, [10])], 16),
        make_batch([(tokens[71:72], 71, range(7))], 16),
    ]
    for batch in batches:
        outputs = [m.forward_with_states(batch, (0, 1, 3)) for m in (compiled, plain)]
        for one, other in zip(*outputs, strict=True):
            assert torch.equal(one, other)
    assert torch.equal(compiled.kv_cache.key, plain.kv_cache.key)
    assert torch.equal(compiled.kv_cache.value, plain.kv_cache.value)


@pytest.mark.parametrize("flavour", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", [(), ("norm_before_residual",)], ids=str)
def test_a_draft_head_in_one_call_gives_the_same_bits(flavour: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    target = model("plain", None)
    shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.embedding}
    sketch = Sketch(target=PLAIN, flavour=flavour, flags=flags, draft_token_ids=tuple(range(97)))
    directory = save_head(sketch, tmp_path)
    compiled, plain = (Eagle3Head(*read_head(directory, PLAIN, shared), target) for _ in range(2))
    assert compiled._compiled is not None
    plain._compiled = None
    tokens = list(range(3, 60))
    for batch in (
        make_batch([(tokens[:40], 0, range(4)), (tokens[:9], 0, [10])], 16),
        make_batch([(tokens[40:41], 40, range(4)), (tokens[9:14], 9, [10])], 16),
        make_batch([(tokens[41:42], 41, range(4))], 16),
    ):
        features = torch.randn(len(batch.token_ids), PLAIN.hidden_size).bfloat16()
        one, other = compiled.forward(features, batch), plain.forward(features, batch)
        assert torch.equal(one, other)
        assert torch.equal(compiled.logits(one), plain.logits(other))
    assert torch.equal(compiled.kv_cache.key, plain.kv_cache.key)
    assert torch.equal(compiled.kv_cache.value, plain.kv_cache.value)


@pytest.mark.parametrize("quantization", [None, "int8"], ids=str)
def test_a_model_in_one_call_keeps_its_rows(quantization: str | None) -> None:
    assert self_test(model("plain", quantization)) == []
