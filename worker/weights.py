"""The tensors of a Hugging Face checkpoint, checked against what the model needs.

Whatever is damaged, missing, of another shape or unknown is a ValueError naming file and tensor.
Knows names and shapes; what they compute is worker.model's business.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from worker.architecture import ModelConfig

Shape = tuple[int, ...]
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a checkpoint by its Hugging Face name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def read_weights(directory: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, by name, as they lie in its files."""
    expected = expected_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    file_of_tensor = _indexed_files(directory)
    files = sorted(set(file_of_tensor.values())) or [SINGLE_FILE]
    for file in files:
        for name, tensor in _read_file(directory / file, expected).items():
            if name in weights:
                raise ValueError(f"{directory / file}: tensor {name} is also in another file of the checkpoint")
            weights[name] = tensor
    missing = [name for name in expected if name not in weights]
    if missing:
        file = file_of_tensor.get(missing[0], files[0])
        raise ValueError(f"{directory / file}: tensor {missing[0]} is missing ({len(missing)} in all)")
    return weights


def _indexed_files(directory: Path) -> dict[str, str]:
    """Tensor to file of a sharded checkpoint; empty for a single file."""
    path = directory / INDEX_FILE
    if not path.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ValueError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not a safetensors index: {error}") from error
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path}: weight_map must map tensors to files")
    for file in files.values():
        if Path(file).name != file:
            raise ValueError(f"{path}: file {file!r} is not inside the checkpoint")
    return files


def _read_file(path: Path, expected: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if _is_ignored(name, expected):
                    continue
                tensors[name] = _checked(path, name, file.get_tensor(name), expected)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: is missing or damaged: {error}") from error
    return tensors


def _is_ignored(name: str, expected: Mapping[str, Shape]) -> bool:
    """A tied head stored all the same, and tables that older versions stored."""
    is_tied_head = name == "lm_head.weight" and name not in expected
    return is_tied_head or name.endswith("rotary_emb.inv_freq")


def _checked(path: Path, name: str, tensor: torch.Tensor, expected: Mapping[str, Shape]) -> torch.Tensor:
    shape = expected.get(name)
    if shape is None:
        raise ValueError(f"{path}: tensor {name} is unknown")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{path}: tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{path}: tensor {name} has type {tensor.dtype}, not a floating-point one")
    return tensor


def random_weights(config: ModelConfig, *, seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights whose next token depends on the whole context.

    Small embeddings and large layers: what a layer adds outweighs the token itself, which a tied head would
    only repeat; sharp attention keeps a long context from averaging out.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1.0 + 0.1 * noise
        elif len(shape) == 1 or name == "model.embed_tokens.weight":
            weights[name] = 0.1 * noise
        else:
            weights[name] = noise * (_gain(name) / shape[1] ** 0.5)
    return weights


def _gain(name: str) -> float:
    if "q_proj" in name or "k_proj" in name:
        return 3.0
    return 3.0 if "o_proj" in name or "down_proj" in name else 1.0


def weights_hash(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, types, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
