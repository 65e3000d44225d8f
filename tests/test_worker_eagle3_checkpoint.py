"""Files of EAGLE-3 checkpoints that are not what they should be: each is refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.heads import Sketch, save_head, tensors_of
from worker.architecture import ModelConfig
from worker.eagle3_checkpoint import read_head

TARGET = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip
SKETCH = Sketch(target=TARGET)
SHARED = {name: torch.zeros(96, 64) for name in ("embed_tokens.weight", "lm_head.weight")}
WEIGHTS, BIN = "model.safetensors", "pytorch_model.bin"


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def as_bin(directory: Path) -> Path:
    """The same head in the other format."""
    (directory / WEIGHTS).unlink()
    torch.save(tensors_of(SKETCH), directory / BIN)
    return directory / BIN


def with_raw_name_as_well(directory: Path) -> None:
    tensors = tensors_of(SKETCH)
    tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"].clone()
    save_file(tensors, directory / WEIGHTS)


def spelled(name: str, value: object) -> Callable[[Path], None]:
    """A change of one number of the layer's."""

    def change(directory: Path) -> None:
        settings = json.loads((directory / "config.json").read_text())
        settings["transformer_layer_config"][name] = value
        (directory / "config.json").write_text(json.dumps(settings))

    return change


FAULTS: dict[str, Callable[[Path], object]] = {
    r"model\.safetensors is damaged": lambda head: halve(head / WEIGHTS),
    r"pytorch_model\.bin holds more than tensors or is damaged": lambda head: halve(as_bin(head)),
    r"pytorch_model\.bin must hold tensors by name": lambda head: torch.save([torch.zeros(2)], as_bin(head)),
    r"has neither \*\.safetensors nor \*\.bin": lambda head: (head / WEIGHTS).unlink(),
    "tensor fc.weight is in two files": lambda head: save_file(
        {"fc.weight": torch.zeros(64, 192)}, head / "model-2.safetensors"
    ),
    "is there twice under other names": with_raw_name_as_well,
    r"config\.json: cannot be read": lambda head: halve(head / "config.json"),
    r"config\.json: must hold a JSON object": lambda head: (head / "config.json").write_text("[]"),
    "num_attention_heads must be a whole number, got 'four'": spelled("num_attention_heads", "four"),
    "rms_norm_eps must be a number": spelled("rms_norm_eps", "small"),
    "hidden_act 'gelu' is not supported": spelled("hidden_act", "gelu"),
    "4 heads of 32 over 3 KV heads cannot be": spelled("num_key_value_heads", 3),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_file_that_is_not_what_it_should_be_is_named(message: str, tmp_path: Path) -> None:
    head = save_head(SKETCH, tmp_path)
    read_head(head, TARGET, SHARED)
    FAULTS[message](head)
    with pytest.raises(ValueError, match=message) as refusal:
        read_head(head, TARGET, SHARED)
    assert str(tmp_path) in str(refusal.value)
