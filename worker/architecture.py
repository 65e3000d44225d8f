"""Which architectures the lean forward serves, and the numbers of one: a checkpoint's config.json, checked.

Reads JSON only; weights are worker.weights' business.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from worker.rope import RopeConfig, parse_rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of one model of the Llama family."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of query and key
    windows: tuple[int | None, ...] = ()  # sliding window of each layer in tokens; empty: none anywhere
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """ValueError names the first number that cannot be."""
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_attention_heads {self.num_heads} is not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} layer types for {self.num_layers} layers")


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


def read_config(directory: Path) -> ModelConfig:
    """The model of a Hugging Face directory. ValueError names the file and the setting that is wrong."""
    path = directory / "config.json"
    settings = _read_json(path)
    try:
        return parse_config(settings, eos_token_ids=_eos_token_ids(directory, settings))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_config(settings: Mapping[str, object], *, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The model of a config.json. ValueError names the setting that is wrong or not supported."""
    architecture = _architecture(settings)
    if settings.get("quantization_config") is not None:
        raise ValueError("quantization_config: quantized checkpoints are not supported")
    if settings.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {settings['hidden_act']!r} is not supported, only 'silu'")
    num_heads, num_layers = _count(settings, "num_attention_heads"), _count(settings, "num_hidden_layers")
    hidden_size = _count(settings, "hidden_size")
    attention_bias = architecture != "MistralForCausalLM" and bool(settings.get("attention_bias", False))
    head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // max(num_heads, 1)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(settings, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(settings, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(settings, "num_key_value_heads", num_heads),
        head_dim=_count(settings, "head_dim", head_dim),
        max_position_embeddings=_count(settings, "max_position_embeddings", 2048),
        rms_norm_eps=_real(settings, "rms_norm_eps", 1e-6),
        rope=parse_rope(settings),
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=architecture == "LlamaForCausalLM" and bool(settings.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(settings, architecture, num_layers),
        bos_token_id=_optional_id(settings, "bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def _architecture(settings: Mapping[str, object]) -> str:
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else settings.get("model_type")
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(name)


def _windows(settings: Mapping[str, object], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Which layers look back only so far. Qwen's are off unless switched on, Mistral's are on if given."""
    if architecture == "LlamaForCausalLM" or settings.get("sliding_window", 4096) is None:
        return ()
    if architecture != "MistralForCausalLM" and not settings.get("use_sliding_window", False):
        return ()
    size = _count(settings, "sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return (size,) * num_layers
    types = settings.get("layer_types")
    if isinstance(types, list):
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types: {sorted(map(str, unknown))[0]!r} is not supported")
        return tuple(size if kind == "sliding_attention" else None for kind in types)
    full = _count(settings, "max_window_layers", 28)
    return tuple(None if layer < full else size for layer in range(num_layers))


def _eos_token_ids(directory: Path, settings: Mapping[str, object]) -> tuple[int, ...]:
    """Of generation_config.json, which serving goes by, or of config.json."""
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id", settings.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"{path}: eos_token_id must be token ids, got {value!r}")
    return tuple(ids)


def _read_json(path: Path) -> dict[str, object]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return settings


def _count(settings: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = settings.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value


def _real(settings: Mapping[str, object], name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _optional_id(settings: Mapping[str, object], name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) else None
