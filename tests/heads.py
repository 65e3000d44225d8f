"""Synthetic EAGLE-3 checkpoints in every layout, and what such a head computes, written out in plain torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from worker.architecture import ModelConfig
from worker.fingerprint import make_batch
from worker.model import Model

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A head to be made up."""

    target: ModelConfig
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    state_layers: tuple[int, ...] = (0, 1, 1)
    draft_token_ids: tuple[int, ...] | None = None  # None: the whole vocabulary
    flavour: str = "llama"  # or qwen3
    layout: str = "speculators"  # or raw
    file: str = "model.safetensors"  # or pytorch_model.bin
    own_embedding: bool = True
    own_head: bool = True
    flags: tuple[str, ...] = ()  # that are true


def tensors_of(sketch: Sketch, seed: int = 0) -> Tensors:
    """Random tensors under their `speculators` names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, size = sketch.hidden_size, 96, sketch.target.hidden_size
    queries, keys = sketch.num_heads * sketch.head_dim, sketch.num_kv_heads * sketch.head_dim
    num_states, vocab_size = len(sketch.state_layers), sketch.target.vocab_size
    draft_size = vocab_size if sketch.draft_token_ids is None else len(sketch.draft_token_ids)
    attention = "layers.0.self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_states * size),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        f"{attention}q_proj.weight": (queries, 2 * hidden),
        f"{attention}k_proj.weight": (keys, 2 * hidden),
        f"{attention}v_proj.weight": (keys, 2 * hidden),
        f"{attention}o_proj.weight": (hidden, queries),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
    }
    if sketch.own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, hidden)
    if sketch.own_head:
        shapes["lm_head.weight"] = (draft_size, hidden)
    if sketch.flavour == "qwen3":
        shapes |= {f"{attention}{name}_norm.weight": (sketch.head_dim,) for name in "qk"}
    if "norm_before_fc" in sketch.flags:
        shapes["input_norm.weight"] = (num_states * size,)
    if "fc_norm" in sketch.flags:
        shapes |= {f"fc_norm.{index}.weight": (size,) for index in range(num_states)}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1.0 + 0.2 * noise if len(shape) == 1 else noise * (2.0 / shape[1] ** 0.5)
    if sketch.draft_token_ids is not None:
        token_ids = torch.tensor(sketch.draft_token_ids)
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    return tensors


def settings_of(sketch: Sketch) -> dict[str, Any]:
    """Its config.json."""
    layer: dict[str, Any] = {
        "model_type": sketch.flavour,
        "hidden_size": sketch.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sketch.num_heads,
        "num_key_value_heads": sketch.num_kv_heads,
        "head_dim": sketch.head_dim,
        "vocab_size": sketch.target.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": sketch.target.max_position_embeddings,
    }
    flags = dict.fromkeys(sketch.flags, True)
    layers = list(sketch.state_layers)
    draft_size = sketch.target.vocab_size if sketch.draft_token_ids is None else len(sketch.draft_token_ids)
    if sketch.layout == "raw":
        eagle = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
        return (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": draft_size, "eagle_config": eagle}
            | layer
            | flags
        )
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_size,
        "eagle_aux_hidden_state_layer_ids": layers,
    } | flags  # fmt: skip


def save_head(sketch: Sketch, directory: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write it; the directory."""
    tensors = dict(tensors_of(sketch) if tensors is None else tensors)
    if sketch.layout == "raw":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings_of(sketch)))
    if sketch.file.endswith(".bin"):
        torch.save(tensors, directory / sketch.file)
    else:
        save_file(tensors, directory / sketch.file)
    return directory


def true_states(model: Model, token_ids: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """The target's states at every position of a sequence, [num_tokens, len(layers) * hidden_size]."""
    size = model.kv_cache.block_size
    batch = make_batch([(token_ids, 0, range(-(-len(token_ids) // size)))], size)
    return model.forward_with_states(batch, layers)[1]


class WrittenOut:
    """A head in float32 over whole sequences: no cache, no batches."""

    def __init__(self, sketch: Sketch, tensors: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]) -> None:
        """shared: the target's `embed_tokens.weight` and `lm_head.weight`."""
        self._sketch = sketch
        self.token_ids = range(sketch.target.vocab_size) if sketch.draft_token_ids is None else sketch.draft_token_ids
        rows = shared["lm_head.weight"][torch.tensor(list(self.token_ids))]
        self._weights = {"embed_tokens.weight": shared["embed_tokens.weight"], "lm_head.weight": rows} | dict(tensors)

    def drafts(self, states: torch.Tensor, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """Greedy drafts after `token_ids`, whose states are known but for the last: [num_tokens - 1, ...]."""
        features, known = self.features(states), list(token_ids)
        drafts: list[int] = []
        for _ in range(num_drafts):
            hidden = self.hidden(features, known[1:])
            drafts.append(self.token_ids[int(self.logits(hidden[-1:])[0].argmax())])
            known.append(drafts[-1])
            last = hidden[-1:]
            features = torch.cat((features, self._norm("norm", last) if "norm_output" in self._sketch.flags else last))
        return drafts

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """[n, num_states * target hidden size] to [n, hidden_size]."""
        states = states.float()
        if "norm_before_fc" in self._sketch.flags:
            states = self._norm("input_norm", states)
        if "fc_norm" in self._sketch.flags:
            parts = states.chunk(len(self._sketch.state_layers), -1)
            states = torch.cat([self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], -1)
        return states @ self._weights["fc.weight"].T

    def hidden(self, features: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Pairs 0..n-1 to [n, hidden_size]."""
        weights, sketch, count = self._weights, self._sketch, len(token_ids)
        normed = self._norm("layers.0.hidden_norm", features)
        embedded = self._norm("layers.0.input_layernorm", weights["embed_tokens.weight"][torch.tensor(token_ids)])
        inputs = torch.cat((embedded, normed), -1)
        query, key, value = (
            (inputs @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(count, -1, sketch.head_dim)
            for name in "qkv"
        )
        if sketch.flavour == "qwen3":
            query, key = self._norm("layers.0.self_attn.q_norm", query), self._norm("layers.0.self_attn.k_norm", key)
        query, key = _turned(query), _turned(key)
        group = sketch.num_heads // sketch.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * sketch.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, -1)
        residual = normed if "norm_before_residual" in sketch.flags else features
        residual = residual + attended @ weights["layers.0.self_attn.o_proj.weight"].T
        x = self._norm("layers.0.post_attention_layernorm", residual)
        gate, up = (x @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return residual + (F.silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, draft_vocab_size]."""
        return self._norm("norm", hidden) @ self._weights["lm_head.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self._weights[f"{name}.weight"]


def _turned(x: torch.Tensor) -> torch.Tensor:
    """RoPE, [n, heads, head_dim]."""
    count, _, size = x.shape
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
