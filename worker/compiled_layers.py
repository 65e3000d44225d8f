"""A whole step's layers in one call: what a model of tiles computes, without Python between its parts.

The same kernels in the same order as `worker.model.Layer` calls them one by one, so the same bits. A decode step of
a small model spends its time between products in calls otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from worker import cpu_kernels
from worker.attention import CpuAttention
from worker.operators import RMSNorm
from worker.products import TileLinear, configurations, scratch

PARTS = ("qkv", "output", "gate_up", "down")


class LayerParts:
    """One layer as its kernels need it."""

    def __init__(
        self,
        linears: Mapping[str, TileLinear],  # by PARTS
        input_norm: RMSNorm | None,  # None: its inputs are given
        mlp_norm: RMSNorm,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> None:
        self._held = linears, input_norm, mlp_norm, head_norms  # as long as their addresses are used
        self.kind = linears["qkv"].kind
        query_norm, key_norm = (norm.address for norm in head_norms) if head_norms else (0, 0)
        qkv, output, gate_up, down = (linears[name].addresses for name in PARTS)
        self.addresses = (
            input_norm.address if input_norm else 0, *qkv, query_norm, key_norm, *output, mlp_norm.address, *gate_up,
            *down,
        )  # fmt: skip


class LayerSizes(Protocol):
    """Numbers of a layer: of a target's, or of a draft head's."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class CompiledLayers:
    """The decoder layers of one model."""

    def __init__(self, layers: Sequence[LayerParts], config: LayerSizes, *, input_size: int | None = None) -> None:
        """input_size: of the first product's inputs, where they are given and not the norm of the residual."""
        self._layers, self._config = layers, config
        self._attention: CpuAttention | None = None  # whose pools the addresses are of
        self._addresses = np.empty((len(layers), cpu_kernels.NUM_ADDRESSES), np.int64)
        self._kind = layers[0].kind
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Elements of a row in each buffer: normed, qkv, attended, projected, gate_up, gated.
        self._widths = (
            config.hidden_size, queries + 2 * keys, queries, config.hidden_size, 2 * config.intermediate_size,
            config.intermediate_size,
        )  # fmt: skip
        self._rows = 0
        self._buffers: list[torch.Tensor] = []
        self._input_size = input_size or config.hidden_size
        widest = max(self._input_size, queries, config.intermediate_size)
        self._tile_bytes = cpu_kernels.tile_scratch(widest)

    def run(
        self,
        first: int,
        last: int,
        residual: torch.Tensor,  # [rows, hidden_size] float32, added to in place
        addend: torch.Tensor,  # [rows, hidden_size] bfloat16: left by the layer before, then by the last one
        cos: torch.Tensor,  # [rows, 1, head_dim] float32
        sin: torch.Tensor,  # same
        attention: CpuAttention,
        inputs: torch.Tensor | None = None,  # [rows, input_size] bfloat16, of layers without an input norm
    ) -> None:
        """Layers first..last - 1, after `attention.prepare(batch)`."""
        if attention is not self._attention:
            for index, layer in enumerate(self._layers):
                self._addresses[index] = (*layer.addresses, *attention.addresses(index))
            self._attention = attention
        config, plan = self._config, attention.plan
        num_rows, num_threads = len(residual), torch.get_num_threads()
        if num_rows > self._rows:
            self._rows = num_rows
            self._buffers = [torch.empty((num_rows, width), dtype=torch.bfloat16) for width in self._widths]
        cpu_kernels.run_layers(
            self._kind, self._addresses.ctypes.data, first, last, residual.data_ptr(), addend.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), num_rows, len(plan.slots), config.hidden_size, config.intermediate_size,
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, plan.items.ctypes.data,
            plan.parts.ctypes.data, len(plan.parts), plan.slots.data_ptr(), plan.block_table.data_ptr(),
            plan.block_table.shape[1], attention.kv_cache.block_size, attention.scale, attention.scratch.ctypes.data,
            plan.scratch_floats, plan.most_keys, configurations().ctypes.data, scratch(num_threads * self._tile_bytes),
            0 if inputs is None else inputs.data_ptr(), self._input_size,
            *(buffer.data_ptr() for buffer in self._buffers), num_threads,
        )  # fmt: skip
