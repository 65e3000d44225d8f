"""Paged attention: the KV pool, what a backend must do, and the row-invariant CPU backend."""

from typing import Protocol

import torch

from worker.batch import Batch


class KVCache:
    """The paged KV pool of all layers, zeroed once (a masked 0 * NaN would poison outputs)."""

    key: torch.Tensor  # [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    value: torch.Tensor  # same shape

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size


class AttentionBackend(Protocol):
    """Stores keys and values into their slots, then attends causally over the block tables."""

    def prepare(self, batch: Batch) -> None:
        """Index tensors of one step, made once before its layers."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], after RoPE
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        layer: int,
        batch: Batch,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Attention of one layer."""
        ...
