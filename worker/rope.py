"""Rotary position embedding with every factor fixed at load.

Some scalings let the longest row of a batch choose the factors; here `max_model_len` chooses them once,
so that a row's numbers do not depend on its company. Formulas: transformers' modeling_rope_utils.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
SCALED_BY_LENGTH = ("yarn", "llama3", "longrope")
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """`rope_parameters` of a checkpoint's config.json. Unused fields of a kind keep their defaults."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # the length before scaling
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None derives it
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    short_factor: tuple[float, ...] = ()  # longrope, [head_dim / 2]
    long_factor: tuple[float, ...] = ()  # longrope, [head_dim / 2]


def parse_rope(config: Mapping[str, object]) -> RopeConfig:
    """The RoPE of a config.json, in its newer (`rope_parameters`) or older (`rope_scaling`) spelling.

    ValueError names an unknown kind or a setting that is missing or of no number.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; known: {', '.join(KINDS)}")
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported, only 1.0")
    for name in REQUIRED.get(str(kind), ()):
        if scaling.get(name) is None:
            raise ValueError(f"rope type {kind} needs {name}")
    longest = _number(config, "max_position_embeddings", None)
    # A length beside rope_parameters wins over one inside, as in transformers.
    original = _number(config, "original_max_position_embeddings", None)
    if original is None:
        original = _number(scaling, "original_max_position_embeddings", longest if kind in SCALED_BY_LENGTH else None)
    factor = _number(scaling, "factor", None)
    if factor is None:
        factor = longest / original if kind in ("yarn", "longrope") and longest and original else 1.0
    return RopeConfig(
        kind=str(kind),
        theta=_number(scaling, "rope_theta", None) or _number(config, "rope_theta", None) or 10000.0,
        factor=factor,
        original_max_position_embeddings=None if original is None else int(original),
        attention_factor=_number(scaling, "attention_factor", None),
        beta_fast=_number(scaling, "beta_fast", None) or 32.0,
        beta_slow=_number(scaling, "beta_slow", None) or 1.0,
        mscale=_number(scaling, "mscale", None),
        mscale_all_dim=_number(scaling, "mscale_all_dim", None),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=_number(scaling, "low_freq_factor", None) or 1.0,
        high_freq_factor=_number(scaling, "high_freq_factor", None) or 4.0,
        short_factor=_numbers(scaling, "short_factor"),
        long_factor=_numbers(scaling, "long_factor"),
    )


def _number(settings: Mapping[str, object], name: str, default: float | None) -> float | None:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"rope setting {name} must be a number, got {value!r}")
    return float(value)


def _numbers(settings: Mapping[str, object], name: str) -> tuple[float, ...]:
    value = settings.get(name)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, int | float) for item in value):
        raise ValueError(f"rope setting {name} must be a list of numbers, got {value!r}")
    return tuple(float(item) for item in value)


class Rope:
    """The table of cosines and sines of every position that a sequence may have."""

    def __init__(
        self,
        config: RopeConfig,
        *,
        head_dim: int,
        max_position_embeddings: int,
        max_model_len: int,
        device: str = "cpu",
    ) -> None:
        """max_model_len chooses between a scaling's factors and bounds the positions."""
        frequencies, attention_factor = inverse_frequencies(
            config, head_dim=head_dim, max_position_embeddings=max_position_embeddings, max_model_len=max_model_len
        )
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
        self.inverse_frequencies = frequencies
        self.attention_factor = attention_factor
        self._cos = (angles.cos() * attention_factor).to(device)  # [max_model_len, head_dim / 2] float32
        self._sin = (angles.sin() * attention_factor).to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [n] to cosines and signed sines for `rotate`, [n, 1, head_dim] float32 each."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [n, heads, head_dim]; its two halves turned against each other in float32, in x's dtype.

    Products and sum apart: fused they would round differently in a vector's tail.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def inverse_frequencies(
    config: RopeConfig, *, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """[head_dim / 2] float32, and the factor of cos and sin."""
    if config.kind == "dynamic":
        return _dynamic(config, head_dim, max_position_embeddings, max_model_len), 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim, max_position_embeddings)
    if config.kind == "longrope":
        return _longrope(config, head_dim, max_position_embeddings, max_model_len)
    base = _base(config.theta, head_dim)
    if config.kind == "linear":
        return base / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, base), 1.0
    return base, 1.0


def _base(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def _dynamic(config: RopeConfig, head_dim: int, max_position_embeddings: int, max_model_len: int) -> torch.Tensor:
    """NTK scaling for sequences of max_model_len; none while the trained length holds them."""
    trained = max_position_embeddings
    length = max(max_model_len, trained)
    growth = (config.factor * length / trained - (config.factor - 1)) ** (head_dim / (head_dim - 2))
    return _base(config.theta * growth, head_dim)


def _yarn(config: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
    trained = config.original_max_position_embeddings or max_position_embeddings

    def dimension(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    extrapolated = 1 - ramp.clamp(0, 1)
    wavelengths = config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    frequencies = 1.0 / (config.factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated
    return frequencies, _yarn_attention_factor(config)


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale()


def _llama3(config: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    trained = config.original_max_position_embeddings
    assert trained is not None, "parse_rope fills it in"
    wavelength = 2 * math.pi / base
    longest, shortest = trained / config.low_freq_factor, trained / config.high_freq_factor
    scaled = torch.where(wavelength > longest, base / config.factor, base)
    smooth = (trained / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (1 - smooth) * scaled / config.factor + smooth * scaled
    is_between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(is_between, between, scaled)


def _longrope(
    config: RopeConfig, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """The long factors if a sequence may outgrow the trained length, the short ones otherwise."""
    trained = config.original_max_position_embeddings or max_position_embeddings
    factors = config.long_factor if max_model_len > trained else config.short_factor
    if len(factors) != head_dim // 2:
        raise ValueError(f"rope type longrope has {len(factors)} factors for a head size of {head_dim}")
    attention_factor = config.attention_factor
    if attention_factor is None:
        factor = config.factor
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1.0 else 1.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * config.theta**exponents), attention_factor
