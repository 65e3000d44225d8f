"""Paged attention: the KV pool, what a backend must do, and the CPU backend.

On the CPU a row's output is bitwise the same in any company: one compiled kernel walks each row's keys in
the order of their positions (worker.cpu_kernels), and rows are put together only to share what is read.
Knows nothing about requests.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from worker import cpu_kernels
from worker.batch import Batch
from worker.vectors import LANES

ITEM_WIDTH = 512  # elements of a key of all heads that are read together: memory likes long strides least
ITEM_ROWS = 24  # query rows of a KV head that share one reading of its keys
ITEM_SCORES = 1 << 19  # floats of one item's scores: 2 MB stay in a core's cache
THREAD_WORK = 1 << 12  # products of a row and a key for which one more thread pays


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

    @property
    def fingerprint(self) -> str:
        """What decides this backend's numbers, in words."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Index tensors of one step, made once before its layers."""
        ...

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


class CpuAttention:
    """The row-invariant `AttentionBackend` on CPU tensors."""

    fingerprint = f"cpu kernels {cpu_kernels.SOURCE_HASH}"

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        num_heads: int,
        scale: float | None = None,
        windows: Sequence[int | None] | None = None,  # [num_layers] sliding window of each layer
    ) -> None:
        cpu_kernels.start_threads()
        num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.key.shape
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if head_dim % LANES:
            raise ValueError(f"attention cpu: head size {head_dim} is not a multiple of {LANES}")
        self.kv_cache = kv_cache
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self._block_size = block_size
        self._kind = cpu_kernels.KINDS[kv_cache.key.dtype]
        self._windows = [window or 0 for window in windows or (None,) * num_layers]
        self._pools = [
            (key.data_ptr(), value.data_ptr()) for key, value in zip(kv_cache.key, kv_cache.value, strict=True)
        ]
        self._item_heads = min(max(ITEM_WIDTH // head_dim, 1), num_kv_heads)
        self.plan: Plan  # of the step at hand
        self.scratch = np.empty(0, np.float32)  # of all its parts

    def addresses(self, layer: int) -> tuple[int, int, int]:
        """Of a layer's keys and values; and its sliding window, 0 for none."""
        return *self._pools[layer], self._windows[layer]

    def prepare(self, batch: Batch) -> None:
        """Cut the step into items: a KV head and tokens of one request that share a reading of its keys."""
        self.plan = Plan(batch, self.group, self.num_kv_heads, self._item_heads, self.head_dim)
        if len(self.scratch) < self.plan.scratch_floats * len(self.plan.parts):
            self.scratch = np.empty(self.plan.scratch_floats * len(self.plan.parts), np.float32)

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim], each row's heads contiguous
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], likewise
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], likewise
        layer: int,
        batch: Batch,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Store this step's keys and values, then attend over the block tables."""
        plan = self.plan
        key_pool, value_pool, window = self.addresses(layer)
        cpu_kernels.store_kv(
            self._kind, key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0), plan.slots.data_ptr(),
            len(query), self.num_kv_heads * self.head_dim, key_pool, value_pool,
        )  # fmt: skip
        out = torch.empty(query.shape, dtype=query.dtype)
        cpu_kernels.attend_parts(
            self._kind, plan.items.ctypes.data, plan.parts.ctypes.data, len(plan.parts), query.data_ptr(),
            query.stride(0), key_pool, value_pool, plan.block_table.data_ptr(), plan.block_table.shape[1],
            out.data_ptr(), self._block_size, self.num_heads, self.num_kv_heads, self.head_dim, window, self.scale,
            self.scratch.ctypes.data, plan.scratch_floats, plan.most_keys,
        )  # fmt: skip
        return out


class Plan:
    """The work items of one step, as `worker.cpu_kernels.attend` reads them, and who does which."""

    def __init__(self, batch: Batch, group: int, num_kv_heads: int, item_heads: int, head_dim: int) -> None:
        self.slots, self.block_table = batch.slot_mapping.contiguous(), batch.block_table.contiguous()
        bounds, seq_lens = batch.cu_seqlens_q.numpy().astype(np.int64), batch.seq_lens.numpy().astype(np.int64)
        counts = np.diff(bounds)
        self.most_keys = -(-int(seq_lens.max()) // LANES) * LANES
        rows = min(ITEM_ROWS, ITEM_SCORES // (self.most_keys * item_heads))
        length = max(rows // group, 1)  # tokens of one item at most
        num_tiles = -(-counts // length)
        request = np.repeat(np.arange(len(counts)), num_tiles)
        tile = np.arange(len(request)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        num_tokens = np.minimum(counts[request] - tile * length, length)
        position = seq_lens[request] - counts[request] + tile * length
        # Few items: their heads are for several threads.
        item_heads = min(item_heads, -(-num_kv_heads * len(request) // torch.get_num_threads()))
        first_head = np.arange(0, num_kv_heads, item_heads)
        num_heads = np.minimum(num_kv_heads - first_head, item_heads)
        self.items: NDArray[np.int64] = np.empty((len(first_head), len(request), 6), np.int64)
        self.items[..., 0] = bounds[request] + tile * length
        self.items[..., 1], self.items[..., 2], self.items[..., 3] = num_tokens, request, position
        self.items[..., 4], self.items[..., 5] = first_head[:, None], num_heads[:, None]
        most_rows = int(num_tokens.max()) * group
        self.scratch_floats = cpu_kernels.scratch_size(item_heads, most_rows, self.most_keys, head_dim)  # of a part
        self.parts = shared((num_tokens * (position + num_tokens) * num_heads[:, None]).ravel() * group)


def shared(work: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each thread consecutive items of about the same work: [num_parts, 2], first and last + 1."""
    total = np.cumsum(work)
    num_parts = max(min(torch.get_num_threads(), int(total[-1]) // THREAD_WORK), 1)
    ends = np.searchsorted(total - work // 2, total[-1] * np.arange(1, num_parts) // num_parts).tolist()
    return np.array(list(zip([0, *ends], [*ends, len(work)], strict=True)), np.int64)
