"""The Triton attention backend: one store and one attention launch per layer, planned once per step."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton

from worker.attention import KVCache
from worker.batch import Batch
from worker.kernels.attention import AttentionLaunch, AttentionShape, is_interpreting, paged_attention, plan_launch
from worker.kernels.store import store_kv
from worker.kernels.tuning import SPLIT_SIZE, AttentionTiles, attention_tiles

INVARIANT_QUERY_LEN = 4  # decodes and short verifies read KV once; long prefills pay for the smaller tiles


class TritonAttention:
    """An `AttentionBackend` on CUDA or ROCm, or on CPU tensors under Triton's interpreter.

    With `row_invariant` every batch uses the same tiles, so that a row's output is bitwise the same in any
    company on any GPU; without it the rows of a program follow the batch's query lengths.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        num_heads: int,
        scale: float | None = None,
        windows: Sequence[int | None] | None = None,  # [num_layers] sliding window of each layer
        softcap: float | None = None,
        row_invariant: bool = False,
        split_size: int = SPLIT_SIZE,
    ) -> None:
        num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.key.shape
        _check(kv_cache.key.device, num_heads, num_kv_heads, head_dim, block_size, split_size)
        self.kv_cache = kv_cache
        self.row_invariant = row_invariant
        self.shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=kv_cache.key.dtype,
            scale=head_dim**-0.5 if scale is None else scale,
            softcap=softcap,
            split_size=split_size,
        )
        self._layer_shapes = [replace(self.shape, sliding_window=w) for w in windows or (None,) * num_layers]
        assert len(self._layer_shapes) == num_layers, f"{len(self._layer_shapes)} windows for {num_layers} layers"
        self._launch: AttentionLaunch | None = None

    @property
    def fingerprint(self) -> str:
        """What decides this backend's numbers, in words."""
        tiles = self._tiles(INVARIANT_QUERY_LEN)
        rows = str(tiles.block_m) if self.row_invariant else "any"
        # The compiler and the chip choose instructions, and with them how sums are taken.
        device = "interpreted" if is_interpreting() else torch.cuda.get_device_name(self.kv_cache.key.device)
        return f"triton {triton.__version__} {device} split={self.shape.split_size} tile={tiles.tile} rows={rows}"

    def prepare(self, batch: Batch) -> None:
        """Choose how this step's batch is cut. Reads shapes only, so nothing waits for the device."""
        self._launch = self.launch_for(
            num_tokens=batch.token_ids.shape[0],
            num_reqs=batch.seq_lens.shape[0],
            max_seq_len=batch.block_table.shape[1] * self.shape.block_size,
        )

    def launch_for(self, *, num_tokens: int, num_reqs: int, max_seq_len: int) -> AttentionLaunch:
        """A launch with a workspace of its own, for any batch of these sizes."""
        mean_query_len = -(-num_tokens // max(num_reqs, 1))
        return plan_launch(
            self.shape,
            tiles=self._tiles(INVARIANT_QUERY_LEN if self.row_invariant else mean_query_len),
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_seq_len=max_seq_len,
            device=self.kv_cache.key.device,
        )

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], after RoPE
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        layer: int,
        batch: Batch,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Store this step's keys and values, then attend over the block tables."""
        assert self._launch is not None, "prepare(batch) comes first"
        key_cache, value_cache = self.kv_cache.key[layer], self.kv_cache.value[layer]
        store_kv(key, value, key_cache, value_cache, batch.slot_mapping)
        # Zeros, not garbage, in the rows of padded tokens: they go on through the model.
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        paged_attention(
            query, key_cache, value_cache, out, batch.cu_seqlens_q, batch.seq_lens, batch.block_table,
            self._layer_shapes[layer], self._launch,
        )  # fmt: skip
        return out

    def _tiles(self, query_len: int) -> AttentionTiles:
        return attention_tiles(
            head_dim=self.shape.head_dim,
            group=self.shape.group,
            query_len=query_len,
            dtype=self.shape.dtype,
            is_hip=torch.version.hip is not None,
        )


def _check(
    device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, split_size: int
) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"attention triton: head size {head_dim} is not a multiple of 16 of at most 256")
    if block_size & (block_size - 1):
        raise ValueError(f"attention triton: block size {block_size} is not a power of two")
    if split_size % 64:
        raise ValueError(f"attention triton: split size {split_size} is not a multiple of 64")
    if device.type == "cpu" and not is_interpreting():
        raise ValueError(
            "attention triton on the CPU runs under Triton's interpreter: set TRITON_INTERPRET=1 in the environment"
        )
