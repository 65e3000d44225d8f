"""Checkpoints: whole, sharded, and everything that can be wrong with one, named by file and tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama import LlamaConfig
from transformers.models.phi3 import Phi3Config

from worker.architecture import ModelConfig
from worker.hf_model import load_any_model
from worker.weights import INDEX_FILE, SINGLE_FILE, expected_shapes, random_weights, read_weights, weights_hash

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    qkv_bias=True, qk_norm=True,
)  # fmt: skip
UNTIED = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    tie_word_embeddings=False,
)  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return random_weights(CONFIG, seed=0)


def save_sharded(weights: dict[str, torch.Tensor], directory: Path) -> None:
    names = sorted(weights)
    files = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, mine in files.items():
        save_file({name: weights[name] for name in mine}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, mine in files.items() for name in mine}}
    (directory / INDEX_FILE).write_text(json.dumps(index))


def test_one_file_and_shards_hold_the_same_weights(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(weights, single / SINGLE_FILE)
    save_sharded(weights, sharded)
    assert (
        weights_hash(read_weights(single, CONFIG))
        == weights_hash(read_weights(sharded, CONFIG))
        == weights_hash(weights)
    )


def test_a_tied_head_and_old_rope_tables_are_ignored(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    extra = {"lm_head.weight": torch.zeros(32, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(weights | extra, tmp_path / SINGLE_FILE)
    assert set(read_weights(tmp_path, CONFIG)) == set(expected_shapes(CONFIG))


def test_an_untied_head_is_required(tmp_path: Path) -> None:
    weights = random_weights(UNTIED, seed=0)
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor lm_head\.weight is missing \(1 in all\)"):
        read_weights(tmp_path, UNTIED)


def test_a_missing_misshapen_unknown_or_whole_number_tensor_is_named(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, tmp_path / SINGLE_FILE)
        with pytest.raises(ValueError, match=r"model\.safetensors: tensor ") as error:
            read_weights(tmp_path, CONFIG)
        return str(error.value)

    assert f"tensor {name} is missing" in refusal({n: t for n, t in weights.items() if n != name})
    assert f"tensor {name} has shape [16, 24], not [24, 16]" in refusal(weights | {name: torch.zeros(16, 24)})
    assert "tensor model.layers.9.bias is unknown" in refusal(weights | {"model.layers.9.bias": torch.zeros(3)})
    assert f"tensor {name} has type torch.int8" in refusal(weights | {name: torch.zeros(24, 16, dtype=torch.int8)})


@pytest.mark.parametrize("damage", ["cut short", "broken header", "empty"])
def test_a_damaged_file_is_named(weights: dict[str, torch.Tensor], tmp_path: Path, damage: str) -> None:
    path = tmp_path / SINGLE_FILE
    save_file(weights, path)
    content = path.read_bytes()
    path.write_bytes({"cut short": content[:-100], "broken header": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors: is missing or damaged"):
        read_weights(tmp_path, CONFIG)


def test_shards_that_are_missing_doubled_or_outside_are_named(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_weights(tmp_path, CONFIG)
    save_sharded(weights, tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file(weights, second)
    with pytest.raises(ValueError, match=r"00002\.safetensors: tensor \S+ is also in another file"):
        read_weights(tmp_path, CONFIG)
    second.unlink()
    with pytest.raises(ValueError, match=r"00002\.safetensors: is missing or damaged"):
        read_weights(tmp_path, CONFIG)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match=r"file '\.\./secret\.safetensors' is not inside the checkpoint"):
        read_weights(tmp_path, CONFIG)
    (tmp_path / INDEX_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: is not a safetensors index"):
        read_weights(tmp_path, CONFIG)


def test_the_hash_tells_every_bit_and_the_type(weights: dict[str, torch.Tensor]) -> None:
    name = "model.norm.weight"
    changed = weights[name].clone()
    changed[3] = changed[3].nextafter(torch.tensor(9.0))
    hashes = {
        weights_hash(weights),
        weights_hash(weights | {name: changed}),
        weights_hash(weights | {name: weights[name].bfloat16()}),
    }
    assert len(hashes) == 3


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), Phi3Config(**SHAPE, pad_token_id=0)])
def test_weights_in_another_file_than_safetensors_are_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    settings: dict[str, Any] = {"dtype": torch.float32, "attention": "cpu", "num_blocks": 8, "block_size": 16}
    with pytest.raises(ValueError, match="safetensors"):
        load_any_model(tmp_path, device="cpu", **settings)
    model.save_pretrained(tmp_path)
    load_any_model(tmp_path, device="cpu", **settings)
