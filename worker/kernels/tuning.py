"""Tile sizes, warps and stages of the attention kernel, by head size, dtype and kind of work.

Chosen so that nothing spills up to head size 128 and shared memory fits on sm_80, sm_90, sm_100
and gfx942 (`python -m tests.bench.kernels --compile-only`); not yet by measured GPU time.
"""

from dataclasses import dataclass

import torch

# Part of the numbers of a deployment: partial results meet at multiples of this, whatever the batch.
SPLIT_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """How one launch of the attention kernel cuts its work."""

    block_m: int  # rows of a program: query tokens x query heads of one KV group
    tile: int  # KV tokens of one iteration; divides SPLIT_SIZE
    num_warps: int
    num_stages: int


def attention_tiles(
    *, head_dim: int, group: int, dtype: torch.dtype, long_queries: bool, is_hip: bool = False
) -> AttentionTiles:
    """Tiles for `group` query heads per KV head. `long_queries`: prefill chunks rather than decodes and verifies."""
    rows = _power_of_2(max(group, 64 if long_queries and dtype != torch.float32 else 16))
    if dtype == torch.float32:
        return AttentionTiles(block_m=rows, tile=32, num_warps=4, num_stages=2 if head_dim <= 128 else 1)
    if is_hip:
        return AttentionTiles(block_m=rows, tile=32, num_warps=4, num_stages=1)
    wide = head_dim > 128
    return AttentionTiles(
        block_m=rows,
        tile=32 if wide else 64,
        num_warps=8 if wide and rows >= 64 else 4,
        num_stages=2 if wide else 3,
    )


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
