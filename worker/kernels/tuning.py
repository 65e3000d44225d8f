"""Tile sizes, warps and stages of the attention kernel, by head size, dtype and kind of work.

Chosen so that nothing spills up to head size 128 and shared memory fits on sm_80, sm_90, sm_100
and gfx942 (`python -m tests.bench.kernels --compile-only`); not yet by measured GPU time.
"""

from dataclasses import dataclass

import torch

# Part of the numbers of a deployment: partial results meet at multiples of this, whatever the batch.
SPLIT_SIZE = 512

# Said explicitly: Triton's default differs between versions, and it decides how sums of products round.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """How one launch of the attention kernel cuts its work."""

    block_m: int  # rows of a program: query tokens x query heads of one KV group
    tile: int  # KV tokens of one iteration; divides SPLIT_SIZE
    num_warps: int
    num_stages: int
    max_registers: int = 255  # per thread; left alone, ptxas spills a few bytes to fit one program more

    def options(self, *, is_hip: bool) -> dict[str, int | bool]:
        """Launch and compile options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **COMPILE_OPTIONS}
        return options if is_hip else options | {"maxnreg": self.max_registers}


def attention_tiles(
    *, head_dim: int, group: int, query_len: int, dtype: torch.dtype, is_hip: bool = False
) -> AttentionTiles:
    """Tiles for `group` query heads per KV head and requests of about `query_len` new tokens.

    The KV tile, which decides in what order a row's sums are taken, depends on head size and dtype only.
    """
    small, wide = head_dim <= 64, head_dim > 128
    most_rows = 32 if wide else 64  # more would spill
    rows = max(min(max(_power_of_2(group * query_len), 16), most_rows), _power_of_2(group))
    if dtype == torch.float32:
        # Plain float32 products need many registers: few rows, whatever the query length.
        return AttentionTiles(
            block_m=max(16, _power_of_2(group)),
            tile=16 if wide else 32,
            num_warps=8 if small else 4,
            num_stages=2 if small else 1,
        )
    if is_hip:
        return AttentionTiles(block_m=rows, tile=32, num_warps=8 if wide else 4, num_stages=1)
    is_decode = rows == 16 and not small and not wide
    return AttentionTiles(
        block_m=rows,
        tile=32 if wide else 64,
        num_warps=8 if is_decode or wide or rows > 32 else 4,
        num_stages=2,
        max_registers=128 if is_decode else 255,  # 128: two programs of eight warps on one multiprocessor
    )


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
