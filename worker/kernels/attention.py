"""Paged attention for one variable-length batch of prefill chunks, decodes and verifies.

The query heads of one KV head are folded into rows, so that verifying K + 1 tokens reads KV once. KV is cut
into splits at multiples of a fixed size. Each split is reduced by an online softmax and the splits are folded
in order, either inside one program (long queries) or by `combine_splits_kernel` (short queries, whose splits
run in parallel). Both ways do the same arithmetic: a row's output does not depend on its batch.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.tuning import COMPILE_OPTIONS, SPLIT_SIZE, AttentionTiles

MAX_WORKSPACE_BYTES = 512 << 20
MAX_SPLIT_QUERY_LEN = 16  # requests with more query tokens than this fold their splits in one program


@triton.jit
def _request_of(q_block, cu_seqlens_q, num_reqs, BLOCK_Q: tl.constexpr):
    """The request that owns a query block: the last i with `cu_seqlens_q[i] // BLOCK_Q + i <= q_block`."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle
        if start <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_M, TILE] float32 logits in units of log 2."""
    if UPCAST:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        # tanh by an exponential that cannot overflow
        e = tl.exp2(tl.abs(s) * (-2.0 * 1.4426950408889634) / softcap)
        t = (1.0 - e) / (1.0 + e)
        s = softcap * tl.where(s < 0, -t, t)
    return s * 1.4426950408889634


@triton.jit
def _attend(
    q,
    positions,  # [BLOCK_M] true position of each row, -1 for rows that do not exist
    key_cache,
    value_cache,
    table,
    start,
    low,
    high,
    scale,
    softcap,
    cache_stride_block,
    cache_stride_token,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Unnormalized output, running maximum and sum over KV positions [low, high), in tiles from `start`."""
    column = tl.arange(0, HEAD_DIM_PADDED)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for tile in range(start, high, TILE):
        kv = tile + tl.arange(0, TILE)
        # Slots outside [low, high) are nobody's: never read, whatever they hold.
        present = (kv >= low) & (kv < high)
        block = tl.load(table + kv // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        slot = block * cache_stride_block + (kv % BLOCK_SIZE) * cache_stride_token
        offset = slot[:, None] + column[None, :]
        readable = present[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(key_cache + offset, mask=readable, other=0.0)
        s = _scores(q, k, scale, softcap, SOFTCAP, UPCAST, PRECISION)
        seen = present[None, :] & (kv[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (kv[None, :] > positions[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(s, 1))
        # A row that has seen nothing keeps -inf; 0 stands in, so that -inf - -inf never happens.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - pivot[:, None])
        decay = tl.exp2(row_max - pivot)
        row_sum = tl.fma(row_sum, decay, tl.sum(p, 1))
        row_max = new_max
        v = tl.load(value_cache + offset, mask=readable, other=0.0)
        p = p.to(v.dtype)
        if UPCAST:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(p, v, acc * decay[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _fold(total, total_max, total_sum, acc, row_max, row_sum):
    """Add one split to those before it. Explicit fma, so that both kernels that fold round alike."""
    new_max = tl.maximum(total_max, row_max)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    old = tl.exp2(total_max - pivot)
    new = tl.exp2(row_max - pivot)
    total = tl.fma(acc, tl.broadcast_to(new[:, None], acc.shape), total * old[:, None])
    return total, new_max, tl.fma(row_sum, new, total_sum * old)


@triton.jit(do_not_specialize=["num_reqs", "max_split_query_len", "table_stride"])
def paged_attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial_out,
    partial_max,
    partial_sum,
    cu_seqlens_q,
    seq_lens,
    block_table,
    num_reqs,
    max_split_query_len,  # longer queries fold their splits here; 0: all do
    scale,
    softcap,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    ONE_SPLIT: tl.constexpr,  # every request of the batch fits into the first split
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (query block, KV head, split). Row r of a block is token `r // GROUP`, query head `r % GROUP`."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    num_splits = tl.num_programs(2)

    req = _request_of(q_block, cu_seqlens_q, num_reqs, BLOCK_Q)
    token_start = tl.load(cu_seqlens_q + req)
    query_len = tl.load(cu_seqlens_q + req + 1) - token_start
    first = (q_block - (token_start // BLOCK_Q + req)) * BLOCK_Q
    if first >= query_len:
        return
    context = tl.load(seq_lens + req) - query_len

    # KV positions that some row of this block sees, and the splits this program reduces
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context + first - WINDOW + 1, 0)
    high = context + tl.minimum(first + BLOCK_Q, query_len)
    first_split = low // SPLIT
    last_split = (high - 1) // SPLIT
    parallel = (query_len <= max_split_query_len) & (num_splits > 1)
    idle = tl.where(parallel, (split < first_split) | (split > last_split), split > 0)
    if idle:
        return
    first_split = tl.where(parallel, split, first_split)
    last_split = tl.where(parallel, split, last_split)

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_DIM_PADDED)
    token_in_req = first + row // GROUP
    exists = (row < BLOCK_Q * GROUP) & (token_in_req < query_len)
    positions = tl.where(exists, context + token_in_req, -1)
    token = (token_start + token_in_req).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    in_head = exists[:, None] & (column < HEAD_DIM)[None, :]
    query_offset = token * query_stride_token + head * query_stride_head
    q = tl.load(query + query_offset[:, None] + column[None, :], mask=in_head, other=0.0)

    keys = key_cache + kv_head.to(tl.int64) * cache_stride_head
    values = value_cache + kv_head.to(tl.int64) * cache_stride_head
    table = block_table + req.to(tl.int64) * table_stride
    if ONE_SPLIT:
        total, total_max, total_sum = _attend(
            q, positions, keys, values, table, low // TILE * TILE, low, high, scale, softcap,
            cache_stride_block, cache_stride_token, BLOCK_M, TILE, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE,
            WINDOW, SOFTCAP, UPCAST, PRECISION,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
        total_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        for this in range(first_split, last_split + 1):
            split_low = tl.maximum(low, this * SPLIT)
            split_high = tl.minimum(high, this * SPLIT + SPLIT)
            acc, row_max, row_sum = _attend(
                q, positions, keys, values, table, split_low // TILE * TILE, split_low, split_high, scale, softcap,
                cache_stride_block, cache_stride_token, BLOCK_M, TILE, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE,
                WINDOW, SOFTCAP, UPCAST, PRECISION,
            )  # fmt: skip
            total, total_max, total_sum = _fold(total, total_max, total_sum, acc, row_max, row_sum)

    if parallel:
        slot = ((req * max_split_query_len + token_in_req).to(tl.int64) * num_heads + head) * num_splits + split
        tl.store(partial_out + slot[:, None] * HEAD_DIM + column[None, :], total, mask=in_head)
        tl.store(partial_max + slot, total_max, mask=exists)
        tl.store(partial_sum + slot, total_sum, mask=exists)
    else:
        # Rows that do not exist have a sum of 0; they are not stored.
        result = total / tl.where(total_sum > 0, total_sum, 1.0)[:, None]
        out_offset = (token * num_heads + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(out + out_offset, result.to(out.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize=["max_split_query_len", "num_splits"])
def combine_splits_kernel(
    partial_out,
    partial_max,
    partial_sum,
    out,
    cu_seqlens_q,
    seq_lens,
    max_split_query_len,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (request x token of it, head) folds the splits of one row, first to last."""
    slot_token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    req = slot_token // max_split_query_len
    token_in_req = slot_token % max_split_query_len
    token_start = tl.load(cu_seqlens_q + req)
    query_len = tl.load(cu_seqlens_q + req + 1) - token_start
    if (token_in_req >= query_len) | (query_len > max_split_query_len):
        return
    position = tl.load(seq_lens + req) - query_len + token_in_req
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(position - WINDOW + 1, 0) // SPLIT

    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    inside = column < HEAD_DIM
    total = tl.zeros([1, HEAD_DIM_PADDED], dtype=tl.float32)
    total_max = tl.full([1], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([1], dtype=tl.float32)
    first_slot = (slot_token.to(tl.int64) * num_heads + head) * num_splits
    for split in range(first_split, position // SPLIT + 1):
        slot = first_slot + split + tl.arange(0, 1)
        acc = tl.load(partial_out + slot[:, None] * HEAD_DIM + column, mask=inside, other=0.0)
        row_max = tl.load(partial_max + slot)
        row_sum = tl.load(partial_sum + slot)
        total, total_max, total_sum = _fold(total, total_max, total_sum, acc, row_max, row_sum)
    result = total / tl.where(total_sum > 0, total_sum, 1.0)[:, None]
    out_offset = ((token_start + token_in_req).to(tl.int64) * num_heads + head) * HEAD_DIM + column
    tl.store(out + out_offset, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionShape:
    """What stays the same from step to step. All of it decides numbers, so it belongs to the fingerprint."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    sliding_window: int | None = None  # a token sees itself and the `sliding_window - 1` before it
    softcap: float | None = None  # logits become `softcap * tanh(logits / softcap)`
    split_size: int = SPLIT_SIZE

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLaunch:
    """How one step's batch is cut. None of it changes a result."""

    tiles: AttentionTiles
    num_splits: int  # of the longest request that the block table could hold
    max_split_query_len: int  # requests of at most this many new tokens run their splits in parallel
    partial_out: torch.Tensor  # [num_reqs * max_split_query_len, num_heads, num_splits, head_dim] float32
    partial_max: torch.Tensor  # [num_reqs * max_split_query_len, num_heads, num_splits] float32
    partial_sum: torch.Tensor  # same shape


def plan_launch(
    shape: AttentionShape,
    *,
    tiles: AttentionTiles,
    num_tokens: int,
    num_reqs: int,
    max_seq_len: int,
    device: torch.device,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> AttentionLaunch:
    """Choose how many query tokens may run their splits in parallel, within the workspace. Host numbers only."""
    num_splits = triton.cdiv(max(max_seq_len, 1), shape.split_size)
    longest = num_tokens - num_reqs + 1  # every request has at least one token
    query_len = min(triton.next_power_of_2(max(longest, 1)), MAX_SPLIT_QUERY_LEN) if num_splits > 1 else 0
    bytes_per_token = num_reqs * shape.num_heads * num_splits * (shape.head_dim + 2) * 4
    while query_len * bytes_per_token > max_workspace_bytes:
        query_len //= 2
    rows = (num_reqs * query_len, shape.num_heads, num_splits)
    return AttentionLaunch(
        tiles=tiles,
        num_splits=num_splits,
        max_split_query_len=query_len,
        partial_out=torch.empty((*rows, shape.head_dim), dtype=torch.float32, device=device),
        partial_max=torch.empty(rows, dtype=torch.float32, device=device),
        partial_sum=torch.empty(rows, dtype=torch.float32, device=device),
    )


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], this step's keys included
    value_cache: torch.Tensor,  # same shape
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim] contiguous; every row of a request is written
    cu_seqlens_q: torch.Tensor,  # [num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [num_reqs] int32, this step's tokens included
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
    shape: AttentionShape,
    launch: AttentionLaunch,
) -> None:
    """Attend causally over the paged KV of every request. Rows past `cu_seqlens_q[-1]` are left as they are."""
    num_tokens, num_reqs = query.shape[0], seq_lens.shape[0]
    if num_reqs == 0 or num_tokens == 0:
        return
    assert query.stride(2) == 1
    assert out.is_contiguous()
    assert key_cache.stride() == value_cache.stride()
    tiles = launch.tiles
    num_q_blocks = num_tokens // (tiles.block_m // shape.group) + num_reqs
    parallel = launch.max_split_query_len > 0
    paged_attention_kernel[(num_q_blocks, shape.num_kv_heads, launch.num_splits if parallel else 1)](
        query, key_cache, value_cache, out, launch.partial_out, launch.partial_max, launch.partial_sum,
        cu_seqlens_q, seq_lens, block_table, num_reqs, launch.max_split_query_len,
        shape.scale, shape.softcap or 0.0,
        query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        block_table.stride(0),
        **attention_constants(shape, tiles, one_split=launch.num_splits == 1, interpreting=is_interpreting()),
        **tiles.options(is_hip=torch.version.hip is not None),
    )  # fmt: skip
    if not parallel:
        return
    combine_splits_kernel[(num_reqs * launch.max_split_query_len, shape.num_heads)](
        launch.partial_out, launch.partial_max, launch.partial_sum, out,
        cu_seqlens_q, seq_lens, launch.max_split_query_len, launch.num_splits,
        **combine_constants(shape), num_warps=1, num_stages=2, **COMPILE_OPTIONS,
    )  # fmt: skip


def is_interpreting() -> bool:
    """Whether the kernels of this process run on CPU tensors under Triton's interpreter."""
    return not isinstance(paged_attention_kernel, triton.runtime.JITFunction)


def attention_constants(
    shape: AttentionShape, tiles: AttentionTiles, *, one_split: bool, interpreting: bool
) -> dict[str, int | bool | str]:
    """Compile-time arguments of `paged_attention_kernel`."""
    return {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_PADDED": max(triton.next_power_of_2(shape.head_dim), 16),
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_M": tiles.block_m,
        "TILE": tiles.tile,
        "SPLIT": shape.split_size,
        "WINDOW": shape.sliding_window or 0,
        "SOFTCAP": shape.softcap is not None,
        "ONE_SPLIT": one_split,
        # The interpreter multiplies the raw bits of bfloat16.
        "UPCAST": interpreting and shape.dtype == torch.bfloat16,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
    }


def combine_constants(shape: AttentionShape) -> dict[str, int]:
    """Compile-time arguments of `combine_splits_kernel`."""
    return {
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_PADDED": max(triton.next_power_of_2(shape.head_dim), 16),
        "SPLIT": shape.split_size,
        "WINDOW": shape.sliding_window or 0,
    }


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """`paged_attention` in plain torch, in float64: [num_tokens, num_heads, head_dim]."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    bounds = cu_seqlens_q.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[req], bounds[req + 1])
        num_blocks = math.ceil(seq_len / shape.block_size)
        blocks = block_table[req, :num_blocks].long()
        # [num_heads, seq_len, head_dim]
        keys, values = (
            cache[blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(shape.group, 1).transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        logits = query[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * shape.scale
        if shape.softcap is not None:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        positions = torch.arange(seq_len - (bounds[req + 1] - bounds[req]), seq_len, device=query.device)[:, None]
        kv = torch.arange(seq_len, device=query.device)[None, :]
        seen = kv <= positions
        if shape.sliding_window is not None:
            seen &= kv > positions - shape.sliding_window
        weights = torch.softmax(logits.masked_fill(~seen, -math.inf), -1)
        # A masked slot may hold NaN (a freed block left behind by the window): 0 * NaN must not count.
        values = values.masked_fill(~seen.any(0)[None, :, None], 0.0)
        out[rows] = (weights @ values).transpose(0, 1)
    return out
