"""Random paged batches for kernel tests and benchmarks: shuffled blocks, NaN in every slot that is nobody's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedBatch:
    """One layer's attention input. Row i is tokens `cu_seqlens_q[i]:cu_seqlens_q[i + 1]`."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim], a strided view like one of a fused projection
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor  # same shape
    cu_seqlens_q: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32, tail 0
    slot_mapping: torch.Tensor  # [num_tokens] int64

    def alone(self, req: int) -> "PagedBatch":
        """The same request in a batch of its own, over the same pool."""
        start, stop = self.cu_seqlens_q[req : req + 2].tolist()
        num_blocks = math.ceil(int(self.seq_lens[req]) / self.key_cache.shape[1])
        return PagedBatch(
            query=self.query[start:stop],
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32, device=self.query.device),
            seq_lens=self.seq_lens[req : req + 1],
            block_table=self.block_table[req : req + 1, :num_blocks].contiguous(),
            slot_mapping=self.slot_mapping[start:stop],
        )

    def last_tokens(self, req: int, count: int) -> "PagedBatch":
        """The last `count` tokens of a request alone, as if those before them had been computed earlier."""
        alone = self.alone(req)
        return PagedBatch(
            query=alone.query[-count:],
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=self.query.device),
            seq_lens=alone.seq_lens,
            block_table=alone.block_table,
            slot_mapping=alone.slot_mapping[-count:],
        )


def paged_batch(
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    window: int | None = None,  # blocks that the window has left behind are given up: NaN, and 0 in the table
    device: str = "cpu",
) -> PagedBatch:
    """A batch of requests with `context_lens` tokens of KV before their `query_lens` new ones."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    counts = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    # A generator of its own: other block sizes then get the same keys, values and queries. Block 0 is nobody's.
    pool = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    key_cache, value_cache = (
        torch.full((num_blocks, block_size, num_kv_heads, head_dim), math.nan, dtype=dtype) for _ in range(2)
    )
    block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots: list[torch.Tensor] = []
    for req, blocks in enumerate(pool[: sum(counts)].split(counts)):
        first_kept = max(context_lens[req] - window + 1, 0) // block_size if window else 0
        block_table[req, first_kept : counts[req]] = blocks[first_kept:].int()
        positions = torch.arange(first_kept * block_size, seq_lens[req])
        req_slots = blocks[positions // block_size] * block_size + positions % block_size
        for cache in (key_cache, value_cache):
            kv = torch.randn(len(positions), num_kv_heads, head_dim, generator=generator)
            cache.view(-1, num_kv_heads, head_dim)[req_slots] = kv.to(dtype)
        slots.append(req_slots[len(req_slots) - query_lens[req] :])
    fused = torch.randn(sum(query_lens), (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    query = fused.to(device)[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    return PagedBatch(
        query=query,
        key_cache=key_cache.to(device),
        value_cache=value_cache.to(device),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=block_table.to(device),
        slot_mapping=torch.cat(slots).to(device),
    )
