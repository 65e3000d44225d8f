"""Sample the token of every position on the device, as worker.sampler does on the host.

The token at position t is `argmax(logits / temperature + gumbel(seed, t, token_id))` over the tokens that
min_p, top_k and top_p keep. The noise is the same Philox4x32-10 with the same counters and float64
arithmetic as the host's. Filters find their cut by bisecting the order of float32 numbers, without a sort;
ties at the cut, like ties of the argmax, go to the lowest token ids. Knows nothing of penalties, biases and
min_tokens: what reaches it are processed logits.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from scheduler.request import SamplingParams
from worker.kernels.tuning import COMPILE_OPTIONS
from worker.sampler import gumbel, kept_token_ids

FAILED = -1  # the token of a position whose logits are not finite or all masked
MAX_VOCAB_TILE = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingColumns:
    """Sampling parameters of permanent rows, [max_num_seqs] each."""

    temperature: torch.Tensor  # float64; 0 is greedy
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int32; 0 keeps every token
    seed: torch.Tensor  # int64, the bits of an unsigned seed

    @classmethod
    def empty(cls, max_num_seqs: int, device: torch.device | str) -> "SamplingColumns":
        """Greedy rows."""
        zeros, ones = torch.zeros(max_num_seqs, dtype=torch.float64), torch.ones(max_num_seqs, dtype=torch.float64)
        return cls(
            temperature=zeros.to(device),
            top_p=ones.to(device),
            min_p=zeros.to(device, copy=True),
            top_k=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            seed=torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
        )

    def write(self, row: int, sampling: SamplingParams) -> None:
        """Take over one request's parameters."""
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = int(np.uint64(sampling.seed).astype(np.int64))


@triton.jit
def _order(logits):
    """int32 keys in the order of float32 numbers; -0 and 0 share one."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(key):
    """The float32 number of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, vocab_size, cut, best, temperature, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Number (BY_COUNT) or weight, relative to the best token's, of the tokens above a cut: float64."""
    total = tl.zeros([1], dtype=tl.float64)
    for start in range(0, vocab_size, TILE):
        token_id = start + tl.arange(0, TILE)
        x = tl.load(logits + token_id, mask=token_id < vocab_size, other=float("-inf"))
        counted = (_order(x) > cut) & (token_id < vocab_size)
        weight = tl.full([TILE], 1.0, tl.float64) if BY_COUNT else tl.exp((x.to(tl.float64) / temperature) - best)
        total += tl.sum(tl.where(counted, weight, 0.0), 0)
    return tl.sum(total, 0)


@triton.jit
def _lowest_cut(logits, vocab_size, low, high, target, best, temperature, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """The lowest key in [low, high] above which the tokens number, or weigh, less than target."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        above = _above(logits, vocab_size, middle.to(tl.int32), best, temperature, BY_COUNT, TILE)
        if above < target:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def _at(logits, vocab_size, cut, TILE: tl.constexpr):
    """Number of tokens exactly at a cut."""
    total = tl.zeros([1], dtype=tl.int32)
    for start in range(0, vocab_size, TILE):
        token_id = start + tl.arange(0, TILE)
        x = tl.load(logits + token_id, mask=token_id < vocab_size, other=float("-inf"))
        total += tl.sum(((_order(x) == cut) & (token_id < vocab_size)).to(tl.int32), 0)
    return tl.sum(total, 0)


@triton.jit
def _best(logits, vocab_size, TILE: tl.constexpr):
    """The largest logit, its lowest token id, and whether some logit is NaN."""
    best = tl.full([1], float("-inf"), dtype=tl.float32)
    best_id = tl.zeros([1], dtype=tl.int32)
    num_nan = tl.zeros([1], dtype=tl.int32)
    for start in range(0, vocab_size, TILE):
        token_id = start + tl.arange(0, TILE)
        x = tl.load(logits + token_id, mask=token_id < vocab_size, other=float("-inf"))
        num_nan += tl.sum((x != x).to(tl.int32), 0)
        x = tl.where(x == x, x, float("-inf"))
        tile_best = tl.max(x, 0)
        tile_id = tl.min(tl.where(x == tile_best, token_id, 0x7FFFFFFF), 0)
        best_id = tl.where(tile_best > best, tile_id, best_id)
        best = tl.maximum(best, tile_best)
    return tl.max(best, 0), tl.max(best_id, 0), tl.max(num_nan, 0)


@triton.jit
def _floor_key(logits, vocab_size, floor, temperature, TILE: tl.constexpr):
    """The lowest key among tokens whose scaled logit reaches a floor, and how many do."""
    lowest = tl.full([1], 0x7FFFFFFF, dtype=tl.int32)
    count = tl.zeros([1], dtype=tl.int32)
    for start in range(0, vocab_size, TILE):
        token_id = start + tl.arange(0, TILE)
        x = tl.load(logits + token_id, mask=token_id < vocab_size, other=float("-inf"))
        reaches = ((x.to(tl.float64) / temperature) >= floor) & (token_id < vocab_size)
        lowest = tl.minimum(lowest, tl.min(tl.where(reaches, _order(x), 0x7FFFFFFF), 0))
        count += tl.sum(reaches.to(tl.int32), 0)
    return tl.min(lowest, 0), tl.max(count, 0)


@triton.jit
def _gumbel(seed, position, start, TILE: tl.constexpr):
    """Noise of tokens start..start + TILE at one position: float64 [TILE]."""
    group = (start // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position.to(tl.uint32), zero, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return -tl.log(-tl.log(uniform))


@triton.jit
def sample_kernel(
    logits,
    sample_rows,
    sample_positions,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    sampled,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """Program: one position. A row below 0 is padding."""
    sample = tl.program_id(0)
    row = tl.load(sample_rows + sample)
    if row < 0:
        tl.store(sampled + sample, -1)
        return
    logits += sample.to(tl.int64) * logits_stride
    best_logit, best_id, num_nan = _best(logits, vocab_size, TILE)
    finite = (tl.abs(best_logit) < float("inf")) & (num_nan == 0)
    t = tl.load(temperature + row)
    if (t == 0.0) | (finite == 0):
        tl.store(sampled + sample, tl.where(finite, best_id, -1))
        return

    best = best_logit.to(tl.float64) / t
    high = _order(best_logit)
    # Kept are the tokens above `cut` and the first `ties` of those at it.
    cut = tl.full([], -2147483648, dtype=tl.int32)
    ties = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    count = tl.full([], 0, dtype=tl.int32) + vocab_size
    p = tl.load(min_p + row)
    if p > 0.0:
        # exact where min_p is 1: log(1) is 0
        cut, count = _floor_key(logits, vocab_size, best + tl.maximum(tl.log(p), -26.1), t, TILE)
    k = tl.load(top_k + row)
    if (k > 0) & (k < count):
        cut = _lowest_cut(logits, vocab_size, cut, high, k.to(tl.float64), best, t, True, TILE)
        ties = k - _above(logits, vocab_size, cut, best, t, True, TILE).to(tl.int32)
    p = tl.load(top_p + row)
    if p < 1.0:
        at_cut = tl.minimum(ties, _at(logits, vocab_size, cut, TILE))
        weight = tl.exp((_number(cut).to(tl.float64) / t) - best)
        tied = tl.where(at_cut > 0, at_cut.to(tl.float64) * weight, 0.0)
        target = p * (_above(logits, vocab_size, cut, best, t, False, TILE) + tied)
        nucleus = _lowest_cut(logits, vocab_size, cut, high, target, best, t, False, TILE)
        missing = target - _above(logits, vocab_size, nucleus, best, t, False, TILE)
        weight = tl.exp((_number(nucleus).to(tl.float64) / t) - best)
        needed = tl.minimum(tl.ceil(missing / weight), 2147483647.0).to(tl.int32)
        ties = tl.where(nucleus == cut, tl.minimum(ties, needed), needed)
        cut = nucleus

    random = tl.load(seed + row).to(tl.uint64, bitcast=True)
    position = tl.load(sample_positions + sample)
    winner = tl.full([1], float("-inf"), dtype=tl.float64)
    winner_id = tl.zeros([1], dtype=tl.int32)
    num_tied = tl.zeros([1], dtype=tl.int32)
    for start in range(0, vocab_size, TILE):
        token_id = start + tl.arange(0, TILE)
        inside = token_id < vocab_size
        x = tl.load(logits + token_id, mask=inside, other=float("-inf"))
        key = _order(x)
        at = ((key == cut) & inside).to(tl.int32)
        rank = num_tied + tl.cumsum(at, 0) - at
        kept = inside & ((key > cut) | ((key == cut) & (rank < ties)))
        score = (x.to(tl.float64) / t) + _gumbel(random, position, start, TILE)
        score = tl.where(kept, score, float("-inf"))
        tile_best = tl.max(score, 0)
        tile_id = tl.min(tl.where(score == tile_best, token_id, 0x7FFFFFFF), 0)
        winner_id = tl.where(tile_best > winner, tile_id, winner_id)
        winner = tl.maximum(winner, tile_best)
        num_tied += tl.sum(at, 0)
    tl.store(sampled + sample, tl.max(winner_id, 0))


def sample(
    logits: torch.Tensor,  # [num_samples, vocab_size] float32, contiguous in the vocabulary
    sample_rows: torch.Tensor,  # [num_samples] int32 permanent row; below 0: padding
    sample_positions: torch.Tensor,  # [num_samples] int64 absolute position of the token to sample
    columns: SamplingColumns,
    sampled: torch.Tensor,  # [num_samples] int32, written: the token id, or FAILED
) -> None:
    """Sample every position."""
    num_samples, vocab_size = logits.shape
    if num_samples == 0:
        return
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    tile = min(triton.next_power_of_2(vocab_size), MAX_VOCAB_TILE)
    sample_kernel[(num_samples,)](
        logits, sample_rows, sample_positions,
        columns.temperature, columns.top_p, columns.min_p, columns.top_k, columns.seed,
        sampled, vocab_size, logits.stride(0), TILE=tile, num_warps=8, **COMPILE_OPTIONS,
    )  # fmt: skip


def sample_reference(
    logits: torch.Tensor, sample_rows: torch.Tensor, sample_positions: torch.Tensor, columns: SamplingColumns
) -> torch.Tensor:
    """`sample` by the host's own functions: [num_samples] int32."""
    sampled = torch.full(sample_rows.shape, FAILED, dtype=torch.int32)
    for index, (row, position) in enumerate(zip(sample_rows.tolist(), sample_positions.tolist(), strict=True)):
        values = logits[index].double().cpu().numpy()
        if row < 0 or not np.isfinite(values.max()):
            continue
        sampling = SamplingParams(
            temperature=columns.temperature[row].item(),
            top_p=columns.top_p[row].item(),
            min_p=columns.min_p[row].item(),
            top_k=int(columns.top_k[row]),
            seed=int(columns.seed[row]) & 0xFFFFFFFFFFFFFFFF,
        )
        if sampling.temperature == 0.0:
            sampled[index] = int(values.argmax())
            continue
        scaled = values / sampling.temperature
        token_ids = kept_token_ids(scaled, sampling)
        scores = scaled[token_ids] + gumbel(sampling.seed, position, token_ids)
        sampled[index] = int(token_ids[scores.argmax()])
    return sampled
