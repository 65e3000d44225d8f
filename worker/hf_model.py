"""Any decoder of transformers over our paged KV pool: its own modelling code, our attention.

Registered in transformers' attention interface, our backend gets every layer's queries, keys and values; no cache of
theirs is used, and no mask of theirs is made. Matrix products are replaced by worker.linear's, whose rows do not
depend on their company. What cannot work so is refused by name. Knows nothing about requests or steps.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from worker.architecture import ARCHITECTURES, ModelConfig, read_config
from worker.attention import AttentionBackend, CpuAttention, KVCache
from worker.batch import Batch
from worker.linear import Linear, padded_rows
from worker.model import Model, load_model
from worker.products import dense
from worker.rope import Rope
from worker.weights import read_weights, weights_hash

NAME = "slipstream"  # in transformers' attention interface
# Settings that change a model's logits behind its last linear layer: what they ask for is not done here.
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")  # the longest row of a batch would choose everybody's factors

_step: ContextVar[tuple[AttentionBackend, Batch]] = ContextVar("step")


class TheirRope(Rope):
    """What worker.fingerprint asks of a rope: theirs, as it was loaded."""

    def __init__(self, frequencies: torch.Tensor, attention_factor: float) -> None:
        self.inverse_frequencies = frequencies
        self.attention_factor = attention_factor


class InvariantLinear(nn.Module):
    """Stands in for an `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.linear = dense(linear.weight.detach(), bias)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class HfModel(Model):
    """A loaded model of transformers."""

    def __init__(self, model: Any, *, num_blocks: int, block_size: int, max_model_len: int | None = None) -> None:
        """model: any causal language model of transformers, on the CPU. ValueError names what cannot work here."""
        self.quantization = None
        settings = model.config.get_text_config()
        _refuse(model, settings)
        self.config = config_of(settings, type(model).__name__)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.device = torch.device("cpu")
        self.max_model_len = max_model_len or self.config.max_position_embeddings
        tensors = weights_hash({name: tensor.detach() for name, tensor in model.state_dict().items()})
        # Their code decides the numbers as well.
        self.weights_hash = hashlib.sha256(f"transformers {version('transformers')} {tensors}".encode()).hexdigest()
        self.kv_cache = KVCache(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )
        self.attention: AttentionBackend = CpuAttention(
            self.kv_cache, num_heads=self.config.num_heads, scale=_scale(model), windows=self.config.windows
        )
        self.rope = _rope(model)
        self._embedding: torch.Tensor = model.get_input_embeddings().weight.detach()
        self._linears = dict(_replace_linears(model))
        _register()
        model.set_attn_implementation(NAME)
        self._decoder = model.base_model
        head = model.get_output_embeddings()
        assert isinstance(head, InvariantLinear), head
        self._head = head.linear

    @property
    def linears(self) -> dict[str, Linear]:
        """Every matrix product of the model by name."""
        return self._linears

    @torch.inference_mode()
    def forward_with_states(self, batch: Batch, layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and what entered each of these layers, side by side: [num_tokens, len(layers) * hidden_size]."""
        num_tokens = len(batch.token_ids)
        padding = padded_rows(num_tokens) - num_tokens
        self.attention.prepare(batch)
        with _stepping(self.attention, batch):
            out = self._decoder(
                input_ids=F.pad(batch.token_ids, (0, padding))[None],
                position_ids=F.pad(batch.positions, (0, padding))[None],
                use_cache=False,
                output_hidden_states=bool(layers),
            )
        hidden = out.last_hidden_state[0, :num_tokens]
        states = [out.hidden_states[layer][0, :num_tokens] for layer in layers]
        return hidden, torch.cat(states, 1) if states else hidden[:, :0]


def load_any_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: str,
    attention: str,
    num_blocks: int,
    block_size: int,
    max_model_len: int | None = None,
    quantization: str | None = None,
) -> Model:
    """The lean forward where it serves the architecture, transformers' code elsewhere. ValueError as `load_model`."""
    if _is_lean(directory):
        return load_model(
            directory,
            dtype=dtype,
            device=device,
            attention=attention,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            quantization=quantization,
        )
    if (device, attention, quantization) != ("cpu", "cpu", None):
        raise ValueError(f"{directory}: this architecture runs on --device cpu only, and not quantized")
    return load_hf_model(
        directory, dtype=dtype, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len
    )


def read_any_config(directory: Path) -> ModelConfig:
    """The numbers of whatever `load_any_model` loads. ValueError names the file."""
    if _is_lean(directory):
        return read_config(directory)
    from transformers import AutoConfig

    try:
        settings: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        return config_of(settings.get_text_config(), settings.architectures[0])
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{directory}: {str(error).splitlines()[0]}") from error


def read_shared(directory: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """What a drafter may have in common with its target: `embed_tokens.weight`, `lm_head.weight`, [vocab_size,
    hidden_size] each, and of a lean one `norm.weight`.
    """
    if _is_lean(directory):
        weights = read_weights(directory, config)
        embedding = weights["model.embed_tokens.weight"]
        return {
            "embed_tokens.weight": embedding,
            "lm_head.weight": weights.get("lm_head.weight", embedding),
            "norm.weight": weights["model.norm.weight"],
        }
    model = _read_model(directory, "auto")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, rows = (end.weight.detach() for end in ends)
    return {"embed_tokens.weight": embedding, "lm_head.weight": rows}


def _is_lean(directory: Path) -> bool:
    """True also for what cannot be read: `load_model` says best what is wrong."""
    try:
        names = json.loads((directory / "config.json").read_text(encoding="utf-8"))["architectures"]
        return names[0] in ARCHITECTURES
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return True


def load_hf_model(
    directory: Path, *, dtype: torch.dtype, num_blocks: int, block_size: int, max_model_len: int | None = None
) -> HfModel:
    """Any causal language model of a Hugging Face directory, without running code that comes with it."""
    model = _read_model(directory, dtype)
    return HfModel(model.eval(), num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)


def _read_model(directory: Path, dtype: torch.dtype | str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}: {str(error).splitlines()[0]}") from error


def config_of(settings: Any, architecture: str) -> ModelConfig:
    """The numbers of a transformers config."""
    num_heads = int(settings.num_attention_heads)
    eos = settings.eos_token_id
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(settings.vocab_size),
        hidden_size=int(settings.hidden_size),
        intermediate_size=int(getattr(settings, "intermediate_size", None) or settings.hidden_size),
        num_layers=int(settings.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=int(getattr(settings, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(settings, "head_dim", None) or settings.hidden_size // num_heads),
        max_position_embeddings=int(settings.max_position_embeddings),
        windows=_windows(settings),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def _windows(settings: Any) -> tuple[int | None, ...]:
    size = getattr(settings, "sliding_window", None)
    kinds = getattr(settings, "layer_types", None)
    if size is None or getattr(settings, "use_sliding_window", True) is False:
        return ()
    if kinds is None:
        return (int(size),) * int(settings.num_hidden_layers)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layer_types: {min(unknown)!r} is not supported")
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)


def _refuse(model: Any, settings: Any) -> None:
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use transformers' attention interface")
    if getattr(settings, "is_encoder_decoder", False) or getattr(settings, "add_cross_attention", False):
        raise ValueError(f"{name} has cross-attention")
    if getattr(settings, "attn_logit_softcapping", None):
        raise ValueError(f"{name}: attn_logit_softcapping is not supported")
    for setting in LOGIT_SETTINGS:
        if getattr(settings, setting, None) not in (None, 1, 1.0):
            raise ValueError(f"{name}: {setting} is not supported")
    if any("expert" in part for part, _ in model.named_modules()):
        raise ValueError(f"{name} chooses experts: its rows would depend on their company")
    for kind in _rope_kinds(settings):
        if kind in LENGTH_DEPENDENT_ROPES:
            raise ValueError(f"{name}: rope type {kind} is not supported, its factors depend on the batch")


def _rope_kinds(settings: Any) -> Iterator[str]:
    parameters = getattr(settings, "rope_parameters", None) or {}
    for one in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        yield str(one.get("rope_type", "default"))


def _scale(model: Any) -> float | None:
    scales = {
        float(module.scaling) for module in model.modules() if isinstance(getattr(module, "scaling", None), float)
    }
    if len(scales) > 1:
        raise ValueError(f"{type(model).__name__}: layers scale their scores differently: {sorted(scales)}")
    return scales.pop() if scales else None


def _rope(model: nn.Module) -> TheirRope:
    tables = [buffer.detach().flatten().float() for name, buffer in model.named_buffers() if "inv_freq" in name]
    return TheirRope(torch.cat(tables) if tables else torch.zeros(0), 1.0)


def _replace_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        parent, _, last = name.rpartition(".")
        invariant = InvariantLinear(module)
        setattr(model.get_submodule(parent), last, invariant)
        yield name, invariant.linear


@contextmanager
def _stepping(attention: AttentionBackend, batch: Batch) -> Iterator[None]:
    token = _step.set((attention, batch))
    try:
        yield
    finally:
        _step.reset(token)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, num_heads, rows, head_dim], the batch's tokens first
    key: torch.Tensor,  # [1, num_kv_heads, rows, head_dim]
    value: torch.Tensor,  # same
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature; [1, rows, num_heads, head_dim]."""
    attention, batch = _step.get()
    num_tokens, rows = len(batch.token_ids), query.shape[2]
    query, key, value = (x[0].transpose(0, 1)[:num_tokens].contiguous() for x in (query, key, value))
    out = attention(query, key, value, module.layer_idx, batch)
    return F.pad(out, (0, 0, 0, 0, 0, rows - num_tokens))[None], None
