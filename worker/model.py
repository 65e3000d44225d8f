"""A lean forward for the Llama family over a paged KV pool.

A Batch in, hidden states and logits out. On the CPU every row's numbers are bitwise the same in any company
(worker.linear and worker.attention say how). Knows nothing about requests, sampling or steps.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from worker.architecture import ModelConfig, read_config
from worker.attention import AttentionBackend, CpuAttention, KVCache
from worker.batch import Batch
from worker.compiled_layers import CompiledLayers, LayerParts
from worker.linear import Linear, padded_rows
from worker.operators import RMSNorm, rotate, silu_mul
from worker.products import TileLinear, dense, int8
from worker.rope import Rope
from worker.weights import random_weights, read_weights, weights_hash

__all__ = ["Model", "ModelConfig", "load_model", "random_model"]

ATTENTIONS = ("cpu", "triton")
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of a weight and a bias
QUANTIZATIONS: dict[str | None, MakeLinear] = {None: dense, "int8": int8}
DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float16, torch.float32)}


class Layer:
    """One decoder layer: attention and a gated MLP around a float32 residual stream."""

    def __init__(
        self,
        index: int,
        weights: Mapping[str, torch.Tensor],
        config: ModelConfig,
        dtype: torch.dtype,
        linear: MakeLinear,
    ) -> None:
        """weights: of the whole model, in `dtype` and on its device; linear: what its products are."""
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        self._index = index
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._intermediate_size = config.head_dim, config.intermediate_size
        self._input_norm = RMSNorm(layer["input_layernorm.weight"], eps=config.rms_norm_eps, dtype=dtype)
        self._qkv = fused(linear, layer, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = fused(linear, layer, "self_attn.o_proj")
        self._mlp_norm = RMSNorm(layer["post_attention_layernorm.weight"], eps=config.rms_norm_eps, dtype=dtype)
        self._gate_up = fused(linear, layer, "mlp.gate_proj", "mlp.up_proj")
        self._down = fused(linear, layer, "mlp.down_proj")
        self._head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm:
            query_norm, key_norm = (
                RMSNorm(layer[f"self_attn.{name}_norm.weight"], eps=config.rms_norm_eps, dtype=dtype) for name in "qk"
            )
            self._head_norms = query_norm, key_norm

    @property
    def linears(self) -> dict[str, Linear]:
        """Its matrix products by name."""
        return {"qkv": self._qkv, "output": self._output, "gate_up": self._gate_up, "down": self._down}

    def parts(self) -> LayerParts | None:
        """What a compiled call of this layer needs; None unless all its products are on tiles."""
        tiles = {name: linear for name, linear in self.linears.items() if isinstance(linear, TileLinear)}
        if len(tiles) < len(self.linears):
            return None
        return LayerParts(tiles, self._input_norm, self._mlp_norm, self._head_norms)

    def __call__(
        self,
        residual: torch.Tensor,  # [rows, hidden_size] float32, added to in place
        addend: torch.Tensor | None,  # [rows, hidden_size]: what the layer before has to add to it
        cos: torch.Tensor,  # [rows, 1, head_dim] float32
        sin: torch.Tensor,  # same
        attention: AttentionBackend,
        batch: Batch,  # its tokens are the first rows; the others are padding
    ) -> torch.Tensor:
        """What this layer has to add to each token's residual, [rows, hidden_size]."""
        attended = self._attend(self._qkv(self._input_norm(residual, addend)), cos, sin, attention, batch)
        hidden = self._mlp_norm(residual, self._output(attended))
        return self._down(silu_mul(self._gate_up(hidden)))

    def _attend(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionBackend, batch: Batch
    ) -> torch.Tensor:
        rows, num_tokens = qkv.shape[0], batch.token_ids.shape[0]
        num_turned = self._num_heads + self._num_kv_heads
        heads = qkv.view(rows, num_turned + self._num_kv_heads, self._head_dim)
        turned = heads[:, :num_turned]
        if self._head_norms is not None:
            query_norm, key_norm = self._head_norms
            query, key = turned.split((self._num_heads, self._num_kv_heads), 1)
            query, key = query_norm.on_heads(query), key_norm.on_heads(key)
            if not turned.is_cpu:
                turned = torch.cat((query, key), 1)
        turned = rotate(turned, cos, sin)[:num_tokens]
        query, key = turned.split((self._num_heads, self._num_kv_heads), 1)
        out = attention(query, key, heads[:num_tokens, num_turned:], self._index, batch)
        out = out.reshape(num_tokens, -1)
        return out if rows == num_tokens else F.pad(out, (0, 0, 0, rows - num_tokens))


class Model:
    """One loaded model and its KV pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: str,
        attention: str,
        num_blocks: int,
        block_size: int,
        max_model_len: int | None = None,
        quantization: str | None = None,
    ) -> None:
        """weights: as `worker.weights.expected_shapes` names them, of any floating type."""
        _check_choices(config, dtype=dtype, device=device, attention=attention)
        linear = _linear(quantization)
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.config = config
        self.dtype = dtype
        self.quantization = quantization
        self.device = torch.device(device)
        self.weights_hash = weights_hash(weights)
        weights = {name: tensor.to(self.device, dtype) for name, tensor in weights.items()}
        self.kv_cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.attention = attention_backend(attention, self.kv_cache, num_heads=config.num_heads, windows=config.windows)
        self.max_model_len = max_model_len or config.max_position_embeddings
        self.rope = Rope(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=self.max_model_len,
            device=device,
        )
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [Layer(index, weights, config, dtype, linear) for index in range(config.num_layers)]
        self._norm = RMSNorm(weights["model.norm.weight"], eps=config.rms_norm_eps, dtype=dtype)
        self._head = linear(self._embedding if config.tie_word_embeddings else weights["lm_head.weight"], None)
        self._pads_rows = any(product.pads_rows for product in self.linears.values())
        self._compiled = self._compile()

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self._embedding

    @property
    def linears(self) -> dict[str, Linear]:
        """Every matrix product of the model by name."""
        named = {
            f"layers.{i}.{name}": linear
            for i, layer in enumerate(self._layers)
            for name, linear in layer.linears.items()
        }
        return named | {"lm_head": self._head}

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] after the final norm; writes this step's KV."""
        return self.forward_with_states(batch, ())[0]

    @torch.inference_mode()
    def forward_with_states(self, batch: Batch, layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and what entered each of these layers, side by side: [num_tokens, len(layers) * hidden_size]."""
        num_tokens = batch.token_ids.shape[0]
        positions, token_ids = batch.positions, batch.token_ids
        if self._pads_rows:
            padding = (0, padded_rows(num_tokens) - num_tokens)
            positions, token_ids = F.pad(positions, padding), F.pad(token_ids, padding)
        self.attention.prepare(batch)
        cos, sin = self.rope(positions)
        residual = F.embedding(token_ids, self._embedding).float()
        entered: dict[int, torch.Tensor] = {}
        addend: torch.Tensor | None = None
        for first, last in pairwise(sorted({0, *layers, len(self._layers)})):
            if first in layers:
                state = residual if addend is None else residual + addend
                entered[first] = state[:num_tokens].to(self.dtype, copy=True)
            addend = self._run(first, last, residual, addend, cos, sin, batch)
        states = torch.cat([entered[index] for index in layers], 1) if layers else residual[:num_tokens, :0]
        return self._norm(residual, addend)[:num_tokens], states

    def _run(
        self,
        first: int,
        last: int,
        residual: torch.Tensor,  # [rows, hidden_size] float32, added to in place
        addend: torch.Tensor | None,  # what layer `first` adds to it before all else
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor | None:
        """Layers first..last - 1; what is still to be added."""
        if self._compiled is not None and isinstance(self.attention, CpuAttention):
            if addend is None:
                addend = torch.empty(residual.shape, dtype=self.dtype)
            self._compiled.run(first, last, residual, addend, cos, sin, self.attention)
            return addend
        for layer in self._layers[first:last]:
            addend = layer(residual, addend, cos, sin, self.attention, batch)
        return addend

    def _compile(self) -> CompiledLayers | None:
        parts = [part for layer in self._layers if (part := layer.parts()) is not None]
        return CompiledLayers(parts, self.config) if len(parts) == len(self._layers) else None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32 of hidden states [n, hidden_size]."""
        return self._head(hidden).float()


def load_model(
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
    """A model from a Hugging Face directory.

    max_model_len fixes RoPE scalings that depend on the length of a sequence; the default is the
    checkpoint's max_position_embeddings. quantization: None or "int8" (weights only). ValueError names the
    file, tensor or setting that is wrong.
    """
    config = read_config(directory)
    return Model(
        config,
        read_weights(directory, config),
        dtype=dtype,
        device=device,
        attention=attention,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        quantization=quantization,
    )


def random_model(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    attention: str = "cpu",
    num_blocks: int,
    block_size: int,
    max_model_len: int | None = None,
    quantization: str | None = None,
) -> Model:
    """A model of random weights whose next token depends on the whole context. For tests."""
    return Model(
        config,
        random_weights(config, seed=seed),
        dtype=dtype,
        device=device,
        attention=attention,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        quantization=quantization,
    )


def fused(linear: MakeLinear, weights: Mapping[str, torch.Tensor], *names: str) -> Linear:
    """One product for several projections of the same input."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return linear(torch.cat([weights[f"{name}.weight"] for name in names]), torch.cat(biases) if biases else None)


def _check_choices(config: ModelConfig, *, dtype: torch.dtype, device: str, attention: str) -> None:
    kind = torch.device(device).type
    if kind not in DTYPES:
        raise ValueError(f"device {device!r} is not supported; supported: {', '.join(DTYPES)}")
    if dtype not in DTYPES[kind]:
        raise ValueError(f"dtype {dtype} is not supported on {kind}; supported: {', '.join(map(str, DTYPES[kind]))}")
    if attention not in ATTENTIONS:
        raise ValueError(f"attention {attention!r} is unknown; known: {', '.join(ATTENTIONS)}")
    if attention == "cpu" and kind != "cpu":
        raise ValueError(f"attention cpu needs device cpu, not {device}")


def _linear(quantization: str | None) -> MakeLinear:
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is unknown; known: {', '.join(filter(None, QUANTIZATIONS))}")
    return QUANTIZATIONS[quantization]


def attention_backend(
    name: str, kv_cache: KVCache, *, num_heads: int, windows: Sequence[int | None] = ()
) -> AttentionBackend:
    """The backend "cpu" or "triton" over a pool; windows: [num_layers] sliding window of each layer, empty: none."""
    if name == "cpu":
        return CpuAttention(kv_cache, num_heads=num_heads, windows=windows)
    # Loaded only when asked for: it needs triton.
    from worker.kernels.backend import TritonAttention

    return TritonAttention(
        kv_cache, num_heads=num_heads, windows=windows, row_invariant=kv_cache.key.device.type == "cpu"
    )
