"""EAGLE-3 checkpoints, `speculators` and raw ones: read, checked against their target, made whole.

What a checkpoint is, its tensors decide, since names lie: raw heads call themselves LlamaForCausalLM. A raw
head's `midlayer.` is `layers.0.`; embeddings and output rows that it lacks are the target's. Whatever is
unknown, missing, of another size or for another target is a ValueError naming file and tensor.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from scheduler.step import Int64Array
from worker.architecture import ModelConfig
from worker.rope import RopeConfig, parse_rope

Shape = tuple[int, ...]
LAYER = "layers.0."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadConfig:
    """The numbers of one head."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    state_layers: tuple[int, ...]  # of the target: what enters them is read
    token_ids: Int64Array | None  # [draft_vocab_size] target's id of each draft id; None: they are the same
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def num_states(self) -> int:
        """Hidden states of one position."""
        return len(self.state_layers)


def read_head(
    directory: Path, target: ModelConfig, shared: Mapping[str, torch.Tensor]
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A head and its tensors under their `speculators` names, whole.

    shared: the target's `embed_tokens.weight` and `lm_head.weight`, [vocab_size, hidden_size] each, for a head
    without its own.
    """
    settings = _read_settings(directory)
    try:
        weights = _renamed(_read_tensors(directory))
        return _Reader(settings, weights, target).head(shared)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


class _Reader:
    """One checkpoint beside the target it is to serve."""

    def __init__(
        self, settings: Mapping[str, object], weights: Mapping[str, torch.Tensor], target: ModelConfig
    ) -> None:
        self._settings, self._weights, self._target = settings, dict(weights), target
        kind = settings.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type {kind!r} is not supported, only 'eagle3'")
        layer = settings.get("transformer_layer_config", settings)
        if not isinstance(layer, Mapping):
            raise ValueError("transformer_layer_config must be an object")
        self._layer: Mapping[str, object] = layer
        eagle = settings.get("eagle_config")
        self._eagle: Mapping[str, object] = eagle if isinstance(eagle, Mapping) else {}

    def head(self, shared: Mapping[str, torch.Tensor]) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
        """Check everything, then fill in what the target lends."""
        self._check_kind()
        config = self._config()
        self._check_shapes(config)
        weights = {name: tensor for name, tensor in self._weights.items() if name not in ("d2t", "t2d")}
        weights.setdefault("embed_tokens.weight", shared["embed_tokens.weight"])
        if "lm_head.weight" not in weights:
            rows = shared["lm_head.weight"]
            if config.token_ids is not None:
                rows = rows[torch.from_numpy(config.token_ids).to(rows.device)]
            weights["lm_head.weight"] = rows
        return config, weights

    def _check_kind(self) -> None:
        if self._eagle.get("use_aux_hidden_state") is False:
            raise ValueError("eagle_config: use_aux_hidden_state is false: not an EAGLE-3 head")
        if self._count("num_hidden_layers", 1) != 1:
            raise ValueError(f"num_hidden_layers is {self._count('num_hidden_layers', 1)}; heads have one layer here")
        if f"{LAYER}hidden_norm.weight" not in self._weights:
            raise ValueError(
                f"tensor {LAYER}hidden_norm.weight is missing: not an EAGLE-3 head (EAGLE-1 and -2 are not)"
            )

    def _config(self) -> HeadConfig:
        target, layer = self._target, self._layer
        hidden_size, joined = self._shape("fc.weight", 2)
        target_hidden = self._setting("target_hidden_size") or target.hidden_size
        if target_hidden != target.hidden_size or joined % target.hidden_size:
            raise ValueError(
                f"a head for another target: fc.weight reads {joined} features, the target's hidden size is "
                f"{target.hidden_size}"
            )
        num_heads = self._count("num_attention_heads")
        head_dim = self._count("head_dim", hidden_size // max(num_heads, 1))
        eps = layer.get("rms_norm_eps", 1e-6)
        if not isinstance(eps, int | float):
            raise ValueError(f"rms_norm_eps must be a number, got {eps!r}")
        if layer.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {layer['hidden_act']!r} is not supported, only 'silu'")
        config = HeadConfig(
            hidden_size=hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=self._shape(f"{LAYER}mlp.gate_proj.weight", 2)[0],
            num_heads=num_heads,
            num_kv_heads=self._count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_position_embeddings=self._count("max_position_embeddings", 2048),
            rms_norm_eps=float(eps),
            rope=parse_rope(layer),
            state_layers=self._state_layers(joined // target.hidden_size),
            token_ids=self._token_ids(),
            norm_before_residual=bool(self._setting("norm_before_residual")),
            norm_before_fc=bool(self._setting("norm_before_fc")),
            fc_norm=bool(self._setting("fc_norm")),
            norm_output=bool(self._setting("norm_output")),
        )
        if config.norm_before_fc and config.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if num_heads < 1 or config.num_kv_heads < 1 or num_heads % config.num_kv_heads or head_dim % 2:
            raise ValueError(f"{num_heads} heads of {head_dim} over {config.num_kv_heads} KV heads cannot be")
        return config

    def _setting(self, name: str) -> object:
        """Of the checkpoint, or of its `eagle_config`."""
        value = self._settings.get(name)
        return self._eagle.get(name) if value is None else value

    def _count(self, name: str, default: int | None = None) -> int:
        value = self._layer.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        return value

    def _shape(self, name: str, num_dims: int) -> Shape:
        tensor = self._weights.get(name)
        if tensor is None:
            raise ValueError(f"tensor {name} is missing")
        if tensor.dim() != num_dims:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, not {num_dims} dimensions")
        return tuple(tensor.shape)

    def _state_layers(self, num_states: int) -> tuple[int, ...]:
        """Layer i stands for what enters layer i, as in speculators and vLLM."""
        num_layers = self._target.num_layers
        layers = self._setting("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
        if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids must be a list of layers, got {layers!r}")
        if len(layers) != num_states:
            raise ValueError(
                f"fc.weight reads {num_states} hidden states, eagle_aux_hidden_state_layer_ids are {layers}"
            )
        outside = [layer for layer in layers if not 0 <= layer < num_layers]
        if outside:
            raise ValueError(f"a head for another target: it reads layer {outside[0]} of {num_layers}")
        return tuple(layers)

    def _token_ids(self) -> Int64Array | None:
        """The target's token of each draft token, from d2t (offsets) and t2d (a mask), which must agree."""
        vocab_size, weights = self._target.vocab_size, self._weights
        said = self._layer.get("vocab_size")
        if said is not None and said != vocab_size:
            raise ValueError(f"a head for another target: its vocab_size is {said}, the target's is {vocab_size}")
        if "d2t" not in weights:
            draft_size = weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else vocab_size
            if draft_size != vocab_size:
                raise ValueError(f"tensor d2t is missing: lm_head.weight has {draft_size} rows for {vocab_size} tokens")
            return None
        offsets = weights["d2t"].to(torch.int64).numpy()
        token_ids: Int64Array = np.arange(len(offsets), dtype=np.int64) + offsets
        if len(token_ids) == 0 or token_ids.min() < 0 or token_ids.max() >= vocab_size:
            raise ValueError(f"a head for another target: d2t leads outside the vocabulary of {vocab_size}")
        if len(np.unique(token_ids)) != len(token_ids):
            raise ValueError("tensor d2t names a token twice")
        if "t2d" in weights:
            mask = weights["t2d"].numpy().astype(bool)
            if len(mask) != vocab_size:
                raise ValueError(f"a head for another target: t2d is over {len(mask)} tokens, not {vocab_size}")
            if not np.array_equal(np.flatnonzero(mask), np.sort(token_ids)):
                raise ValueError("tensors d2t and t2d contradict each other")
        return token_ids

    def _check_shapes(self, config: HeadConfig) -> None:
        expected, optional = self._shapes(config)
        for name, tensor in self._weights.items():
            shape = expected.get(name, optional.get(name))
            if shape is None:
                raise ValueError(f"tensor {name} is unknown")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        missing = [name for name in expected if name not in self._weights]
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if name not in self._weights and config.hidden_size != self._target.hidden_size:
                missing.append(name)  # the target's have another width
        if missing:
            raise ValueError(f"tensor {missing[0]} is missing ({len(missing)} in all)")

    def _shapes(self, config: HeadConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Of the tensors that must be there, and of those that may."""
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.target_hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        vocab_size = self._target.vocab_size
        draft_size = vocab_size if config.token_ids is None else len(config.token_ids)
        expected: dict[str, Shape] = {
            "fc.weight": (hidden, config.num_states * size),
            f"{LAYER}input_layernorm.weight": (hidden,),
            f"{LAYER}hidden_norm.weight": (hidden,),
            f"{LAYER}self_attn.q_proj.weight": (queries, 2 * hidden),
            f"{LAYER}self_attn.k_proj.weight": (keys, 2 * hidden),
            f"{LAYER}self_attn.v_proj.weight": (keys, 2 * hidden),
            f"{LAYER}self_attn.o_proj.weight": (hidden, queries),
            f"{LAYER}post_attention_layernorm.weight": (hidden,),
            f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
            f"{LAYER}mlp.up_proj.weight": (inner, hidden),
            f"{LAYER}mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
        }
        if config.norm_before_fc:
            expected["input_norm.weight"] = (config.num_states * size,)
        if config.fc_norm:
            expected |= {f"fc_norm.{index}.weight": (size,) for index in range(config.num_states)}
        if any(f"{LAYER}self_attn.{name}_norm.weight" in self._weights for name in "qk"):  # Qwen3's layer
            expected |= {f"{LAYER}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        biases = {f"{LAYER}self_attn.{name}_proj.bias": (keys if name in "kv" else queries,) for name in "qkv"}
        if any(name in self._weights for name in biases):
            expected |= biases
        optional: dict[str, Shape] = {
            "embed_tokens.weight": (vocab_size, hidden),
            "lm_head.weight": (draft_size, hidden),
            "d2t": (draft_size,),
            "t2d": (vocab_size,),
        }
        return expected, optional


def _renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        if short.startswith("midlayer."):
            short = LAYER + short.removeprefix("midlayer.")
        if short in renamed:
            raise ValueError(f"tensor {name} is there twice under other names")
        if not short.endswith("rotary_emb.inv_freq"):
            renamed[short] = tensor
    return renamed


def _read_settings(directory: Path) -> dict[str, object]:
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return settings


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every weight file: *.safetensors, or *.bin, of which nothing but tensors is unpickled."""
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise ValueError("has neither *.safetensors nor *.bin")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        read = _read_safetensors(file) if file.suffix == ".safetensors" else _read_bin(file)
        twice = tensors.keys() & read.keys()
        if twice:
            raise ValueError(f"tensor {min(twice)} is in two files")
        tensors |= read
    return tensors


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file.name} is damaged: {error}") from error


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its unpickler meets
        raise ValueError(f"{file.name} holds more than tensors or is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file.name} must hold tensors by name")
    return tensors
