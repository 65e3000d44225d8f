"""Row state that stays on the device, so that a step needs nothing from the host that the step before produced.

Each permanent row keeps its tokens (confirmed ones, then pending drafts), true length, computed length and
blocks. A plan brings upper bounds only: `gather_frames` makes the batch from the true lengths, `accept_drafts`
takes the longest prefix of drafts that equals the samples and moves the row on. Batches have a fixed number of
tokens and samples; what the rows do not fill is padding (slot -1, row -1). A row that fails has no end any more:
steps that were launched since compute nothing for it. Same rules as worker.runner.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from scheduler.request import SamplingParams
from scheduler.step import Int32Array
from worker.attention import KVCache
from worker.batch import Batch
from worker.kernels.sampling import SamplingColumns
from worker.kernels.transfers import to_device
from worker.kernels.tuning import COMPILE_OPTIONS

TOKENS_PER_PROGRAM = 128
BROKEN_LOGITS, BROKEN_HIDDEN = 1, 2  # how a row can fail: what was not finite
_BROKEN_LOGITS, _BROKEN_HIDDEN = tl.constexpr(BROKEN_LOGITS), tl.constexpr(BROKEN_HIDDEN)
NUM_COUNTS = 5  # of an answer, beside its tokens and drafts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceRows:
    """State of permanent rows. The tensors are written in place by kernels, in step order."""

    token_ids: torch.Tensor  # [max_num_seqs, max_model_len] int32, confirmed tokens, then pending drafts
    block_table: torch.Tensor  # [max_num_seqs, max_blocks] int32
    num_tokens: torch.Tensor  # [max_num_seqs] int32, confirmed
    num_computed: torch.Tensor  # [max_num_seqs] int32, KV written for true tokens
    num_drafts: torch.Tensor  # [max_num_seqs] int32, pending
    end: torch.Tensor  # [max_num_seqs] int32, no token at or past this position; 0: nobody's, or a row that failed
    sampling: SamplingColumns
    block_size: int

    @classmethod
    def empty(
        cls, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device | str
    ) -> "DeviceRows":
        """Rows that nobody has."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            token_ids=zeros(max_num_seqs, max_model_len),
            block_table=zeros(max_num_seqs, -(-max_model_len // block_size)),
            num_tokens=zeros(max_num_seqs),
            num_computed=zeros(max_num_seqs),
            num_drafts=zeros(max_num_seqs),
            end=zeros(max_num_seqs),
            sampling=SamplingColumns.empty(max_num_seqs, device),
            block_size=block_size,
        )

    def seat(
        self, row: int, token_ids: Int32Array, *, num_computed: int, end: int, sampling: SamplingParams
    ) -> None:
        """A request with these confirmed tokens takes a row. Its blocks are written apart."""
        self.token_ids[row, : len(token_ids)].copy_(to_device(token_ids, self.token_ids.device))
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = num_computed
        self.num_drafts[row] = 0
        self.end[row] = end
        self.sampling.write(row, sampling)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanColumns:
    """A step's plan on the device, [num_reqs] int32 each; padded requests have row -1."""

    rows: torch.Tensor
    num_scheduled: torch.Tensor
    num_drafts: torch.Tensor
    reserved: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrameBatch:
    """The batch of one step and where its samples belong."""

    batch: Batch
    cu_samples: torch.Tensor  # [num_reqs + 1] int32, request -> range of samples
    sample_rows: torch.Tensor  # [num_samples] int32, permanent row; -1: padding
    sample_positions: torch.Tensor  # [num_samples] int64, absolute position of the token to sample


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """What a step answers, request by request. One stretch of memory, so that one copy takes it to the host."""

    values: torch.Tensor  # [num_reqs * (1 + 2 * max_drafts + NUM_COUNTS)] int32
    token_ids: torch.Tensor  # [num_reqs, 1 + max_drafts], the first num_tokens of each are valid
    draft_ids: torch.Tensor  # [num_reqs, max_drafts], the first num_drafts of each are pending now
    num_tokens: torch.Tensor  # [num_reqs], accepted + 1; 0: chunk, ended, padding or failed
    num_verified: torch.Tensor  # [num_reqs]
    failed: torch.Tensor  # [num_reqs], BROKEN_LOGITS of an accepted position, BROKEN_HIDDEN states, or 0
    failed_position: torch.Tensor  # [num_reqs], the first that broke
    num_drafts: torch.Tensor  # [num_reqs], proposed by the device for the next step

    @classmethod
    def of(cls, values: torch.Tensor, max_drafts: int) -> "Acceptance":
        """The parts of `values`, on the device or copied from there."""
        num_reqs = values.numel() // (1 + 2 * max_drafts + NUM_COUNTS)
        tokens, drafts, counts = values.split(
            (num_reqs * (1 + max_drafts), num_reqs * max_drafts, num_reqs * NUM_COUNTS)
        )
        return cls(
            values, tokens.view(num_reqs, -1), drafts.view(num_reqs, max_drafts), *counts.view(NUM_COUNTS, num_reqs)
        )

    @classmethod
    def zeros(cls, num_reqs: int, max_drafts: int, device: torch.device | str) -> "Acceptance":
        """Nothing accepted, nothing drafted."""
        size = num_reqs * (1 + 2 * max_drafts + NUM_COUNTS)
        return cls.of(torch.zeros(size, dtype=torch.int32, device=device), max_drafts)


@triton.jit
def _owner(index, bounds, num_reqs):
    """Per index the last request i with `bounds[i] <= index`, by bisection side by side."""
    low = index * 0
    high = low + num_reqs
    steps = 0
    # 2 ** 31 requests at most; requests are few, so this ends early
    while (1 << steps) <= num_reqs:
        middle = (low + high) // 2
        right = tl.load(bounds + middle) <= index
        low = tl.where(right & (low < high), middle + 1, low)
        high = tl.where(right, high, tl.where(low < high, middle, high))
        steps += 1
    return low - 1


@triton.jit(do_not_specialize=["num_reqs"])
def frame_lengths_kernel(
    plan_rows,
    plan_scheduled,
    plan_drafts,
    plan_reserved,
    num_tokens,
    num_computed,
    num_drafts,
    end,
    cu_seqlens_q,
    seq_lens,
    cu_samples,
    num_reqs,
    BLOCK: tl.constexpr,
):
    """One program: true lengths of every frame, and where its tokens and samples begin."""
    req = tl.arange(0, BLOCK)
    inside = req < num_reqs
    row = tl.load(plan_rows + req, mask=inside, other=-1)
    last = tl.load(end + row, mask=row >= 0, other=0)
    exists = (row >= 0) & (last > 0)
    length = tl.load(num_tokens + row, mask=exists, other=0)
    start = tl.load(num_computed + row, mask=exists, other=0)
    pending = tl.load(num_drafts + row, mask=exists, other=0)
    planned = tl.load(plan_drafts + req, mask=exists, other=0)
    samples = exists & (tl.load(plan_reserved + req, mask=exists, other=0) > 0)
    chunk = tl.load(plan_scheduled + req, mask=exists, other=0)

    drafts = tl.maximum(tl.minimum(tl.minimum(pending, planned), last - length - 1), 0)
    # More than was scheduled would not fit into the batch: such a row computes nothing, and the host sees it.
    lives = samples & (length < last) & (length + drafts - start <= chunk)
    query_len = tl.where(lives, length + drafts - start, tl.where(exists & (samples == 0), chunk, 0))
    num_samples = tl.where(lives, 1 + drafts, 0)
    tl.store(seq_lens + req, start + query_len, mask=inside)
    tl.store(cu_seqlens_q + req, tl.cumsum(query_len, 0) - query_len, mask=inside)
    tl.store(cu_samples + req, tl.cumsum(num_samples, 0) - num_samples, mask=inside)
    tl.store(cu_seqlens_q + num_reqs, tl.sum(query_len, 0))
    tl.store(cu_samples + num_reqs, tl.sum(num_samples, 0))


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def gather_tokens_kernel(
    plan_rows,
    row_token_ids,
    row_blocks,
    cu_seqlens_q,
    seq_lens,
    token_ids,
    positions,
    slot_mapping,
    num_reqs,
    num_tokens,
    tokens_stride,
    blocks_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK tokens of the batch, with the slots of their true positions."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    exists = inside & (token < tl.load(cu_seqlens_q + num_reqs))
    req = _owner(tl.where(exists, token, 0), cu_seqlens_q, num_reqs)
    row = tl.load(plan_rows + req, mask=exists, other=0).to(tl.int64)
    after = tl.load(cu_seqlens_q + req + 1, mask=exists, other=0) - token
    position = tl.load(seq_lens + req, mask=exists, other=0) - after
    token_id = tl.load(row_token_ids + row * tokens_stride + position, mask=exists, other=0)
    block = tl.load(row_blocks + row * blocks_stride + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + token, token_id.to(tl.int64), mask=inside)
    tl.store(positions + token, tl.where(exists, position, 0).to(tl.int64), mask=inside)
    tl.store(slot_mapping + token, tl.where(exists, slot, -1), mask=inside)


@triton.jit(do_not_specialize=["num_reqs", "num_samples"])
def gather_samples_kernel(
    plan_rows,
    num_tokens,
    cu_seqlens_q,
    cu_samples,
    logits_indices,
    sample_rows,
    sample_positions,
    num_reqs,
    num_samples,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK samples of the batch. The last `1 + drafts` tokens of a frame are sampled."""
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sample < num_samples
    exists = inside & (sample < tl.load(cu_samples + num_reqs))
    req = _owner(tl.where(exists, sample, 0), cu_samples, num_reqs)
    row = tl.load(plan_rows + req, mask=exists, other=-1)
    after = tl.load(cu_samples + req + 1, mask=exists, other=0) - sample
    index = tl.load(cu_seqlens_q + req + 1, mask=exists, other=0) - after
    first = tl.load(cu_samples + req, mask=exists, other=0)
    position = tl.load(num_tokens + row, mask=exists, other=0) + sample - first
    tl.store(logits_indices + sample, tl.where(exists, index, 0).to(tl.int64), mask=inside)
    tl.store(sample_rows + sample, tl.where(exists, row, -1), mask=inside)
    tl.store(sample_positions + sample, tl.where(exists, position, 0).to(tl.int64), mask=inside)


@triton.jit
def accept_kernel(
    plan_rows,
    finite,
    sampled,
    cu_seqlens_q,
    cu_samples,
    seq_lens,
    row_token_ids,
    num_tokens,
    num_computed,
    num_drafts,
    end,
    out_token_ids,
    out_num_tokens,
    out_num_verified,
    out_failed,
    out_position,
    tokens_stride,
    out_stride,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program: one request. Accepts the longest prefix of drafts that equals the samples, and one token more."""
    req = tl.program_id(0)
    row = tl.load(plan_rows + req)
    begin = tl.load(cu_seqlens_q + req)
    stop = tl.load(cu_seqlens_q + req + 1)
    broken = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(begin, stop, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_finite = tl.load(finite + token, mask=token < stop, other=1)
        broken = tl.minimum(broken, tl.min(tl.where(is_finite == 0, token, 0x7FFFFFFF), 0))
    seq_len = tl.load(seq_lens + req)
    first = tl.load(cu_samples + req)
    num_samples = tl.load(cu_samples + req + 1) - first

    # A chunk has no samples: it reads token 0 of no row, accepts nothing and moves on by what it computed.
    length = tl.load(num_tokens + row, mask=num_samples > 0, other=0)
    tokens = row_token_ids + tl.maximum(row, 0).to(tl.int64) * tokens_stride + length
    index = tl.arange(0, BLOCK)
    token_id = tl.load(sampled + first + index, mask=index < num_samples, other=-1)
    draft = tl.load(tokens + index, mask=index < num_samples - 1, other=-2)
    accepted = tl.min(tl.where(token_id == draft, BLOCK, index), 0)
    no_token = tl.max(((index <= accepted) & (index < num_samples) & (token_id < 0)).to(tl.int32), 0)
    failed = tl.where(broken < 0x7FFFFFFF, _BROKEN_HIDDEN, tl.where(no_token > 0, _BROKEN_LOGITS, 0))
    count = tl.where((failed > 0) | (num_samples == 0), 0, accepted + 1)
    kept = index < count
    tl.store(tokens + index, token_id, mask=kept)
    tl.store(out_token_ids + req * out_stride + index, tl.where(kept, token_id, -1), mask=index < out_stride)
    tl.store(out_num_tokens + req, count)
    tl.store(out_num_verified + req, tl.maximum(num_samples - 1, 0))
    tl.store(out_failed + req, failed)
    position = tl.where(failed == _BROKEN_HIDDEN, seq_len - stop + broken, length + accepted)
    tl.store(out_position + req, tl.where(failed > 0, position, -1))
    if row >= 0:
        if failed > 0:
            tl.store(end + row, 0)
        else:
            # the last returned token has no KV yet; a row past its end has computed nothing
            tl.store(num_computed + row, tl.where(num_samples > 0, length + count - 1, seq_len))
        if num_samples > 0:
            tl.store(num_tokens + row, length + count)
            tl.store(num_drafts + row, 0)


@triton.jit
def clear_broken_kernel(
    failed,
    cu_seqlens_q,
    slot_mapping,
    key_cache,
    value_cache,
    layer_stride,
    WIDTH: tl.constexpr,  # num_kv_heads * head_dim, contiguous
    BLOCK: tl.constexpr,
):
    """Program: one request and layer. Zeros in every slot that a request with broken hidden states wrote."""
    req = tl.program_id(0)
    if tl.load(failed + req) != _BROKEN_HIDDEN:
        return
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    zeros = tl.zeros([BLOCK], dtype=key_cache.dtype.element_ty)
    for token in range(tl.load(cu_seqlens_q + req), tl.load(cu_seqlens_q + req + 1)):
        slot = tl.load(slot_mapping + token)
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(key_cache + layer + slot * WIDTH + column, zeros, mask=column < WIDTH)
            tl.store(value_cache + layer + slot * WIDTH + column, zeros, mask=column < WIDTH)


def gather_frames(
    state: DeviceRows, plan: PlanColumns, *, num_tokens: int, num_samples: int, max_seq_len: int | None = None
) -> FrameBatch:
    """The batch of a plan, padded to `num_tokens` tokens and `num_samples` samples, which must hold it.

    max_seq_len: no row is longer; a narrower block table saves idle programs. None: any length.
    """
    num_reqs, device = plan.rows.shape[0], plan.rows.device
    width = state.block_table.shape[1] if max_seq_len is None else -(-max_seq_len // state.block_size)

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    frames = FrameBatch(
        batch=Batch(
            token_ids=empty(num_tokens, torch.int64),
            positions=empty(num_tokens, torch.int64),
            slot_mapping=empty(num_tokens, torch.int64),
            cu_seqlens_q=empty(num_reqs + 1, torch.int32),
            seq_lens=empty(num_reqs, torch.int32),
            block_table=state.block_table[:, :width].index_select(0, plan.rows.clamp(min=0)),
            logits_indices=empty(num_samples, torch.int64),
        ),
        cu_samples=empty(num_reqs + 1, torch.int32),
        sample_rows=empty(num_samples, torch.int32),
        sample_positions=empty(num_samples, torch.int64),
    )
    batch = frames.batch
    frame_lengths_kernel[(1,)](
        plan.rows, plan.num_scheduled, plan.num_drafts, plan.reserved,
        state.num_tokens, state.num_computed, state.num_drafts, state.end,
        batch.cu_seqlens_q, batch.seq_lens, frames.cu_samples, num_reqs, BLOCK=triton.next_power_of_2(num_reqs),
        **COMPILE_OPTIONS,
    )  # fmt: skip
    gather_tokens_kernel[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM),)](
        plan.rows, state.token_ids, state.block_table, batch.cu_seqlens_q, batch.seq_lens,
        batch.token_ids, batch.positions, batch.slot_mapping, num_reqs, num_tokens,
        state.token_ids.stride(0), state.block_table.stride(0),
        BLOCK_SIZE=state.block_size, BLOCK=TOKENS_PER_PROGRAM, **COMPILE_OPTIONS,
    )  # fmt: skip
    if num_samples:
        gather_samples_kernel[(triton.cdiv(num_samples, TOKENS_PER_PROGRAM),)](
            plan.rows, state.num_tokens, batch.cu_seqlens_q, frames.cu_samples,
            batch.logits_indices, frames.sample_rows, frames.sample_positions, num_reqs, num_samples,
            BLOCK=TOKENS_PER_PROGRAM, **COMPILE_OPTIONS,
        )  # fmt: skip
    return frames


def accept_drafts(
    state: DeviceRows,
    plan: PlanColumns,
    frames: FrameBatch,
    sampled: torch.Tensor,
    *,
    finite: torch.Tensor,
    max_drafts: int,
) -> Acceptance:
    """Verify every frame's drafts against `sampled` [num_samples] int32 and move its row on.

    finite: [num_tokens] int32, 0 where a token's hidden states are broken.
    """
    num_reqs = plan.rows.shape[0]
    acceptance = Acceptance.zeros(num_reqs, max_drafts, plan.rows.device)
    accept_kernel[(num_reqs,)](
        plan.rows, finite, sampled, frames.batch.cu_seqlens_q, frames.cu_samples, frames.batch.seq_lens,
        state.token_ids, state.num_tokens, state.num_computed, state.num_drafts, state.end,
        acceptance.token_ids, acceptance.num_tokens, acceptance.num_verified,
        acceptance.failed, acceptance.failed_position,
        state.token_ids.stride(0), 1 + max_drafts, BLOCK=triton.next_power_of_2(1 + max_drafts),
        TOKENS=TOKENS_PER_PROGRAM, num_warps=1, **COMPILE_OPTIONS,
    )  # fmt: skip
    return acceptance


def clear_broken(acceptance: Acceptance, batch: Batch, kv_cache: KVCache) -> None:
    """Leave no KV of requests with broken hidden states: whoever gets their blocks next must not find a NaN."""
    num_layers, _, _, num_kv_heads, head_dim = kv_cache.key.shape
    width = num_kv_heads * head_dim
    clear_broken_kernel[(acceptance.failed.shape[0], num_layers)](
        acceptance.failed, batch.cu_seqlens_q, batch.slot_mapping, kv_cache.key, kv_cache.value,
        kv_cache.key.stride(0), WIDTH=width, BLOCK=min(triton.next_power_of_2(width), 1024), **COMPILE_OPTIONS,
    )  # fmt: skip


def gather_frames_reference(state: DeviceRows, plan: PlanColumns) -> FrameBatch:
    """`gather_frames` in plain Python, without padding."""
    tokens: list[tuple[int, int, int]] = []  # (token id, position, slot)
    samples: list[tuple[int, int, int]] = []  # (index into tokens, permanent row, position)
    bounds, sample_bounds, seq_lens = [0], [0], []
    columns = (plan.rows, plan.num_scheduled, plan.num_drafts, plan.reserved)
    for row, num_scheduled, num_drafts, reserved in zip(*(column.tolist() for column in columns), strict=True):
        start, stop, num_samples = 0, 0, 0
        if row >= 0 and state.end[row] > 0:
            length, end = int(state.num_tokens[row]), int(state.end[row])
            start = stop = int(state.num_computed[row])
            if reserved == 0:
                stop = start + num_scheduled
            elif length < end:
                drafts = max(min(int(state.num_drafts[row]), num_drafts, end - length - 1), 0)
                if length + drafts - start <= num_scheduled:
                    stop, num_samples = length + drafts, 1 + drafts
        for position in range(start, stop):
            block = int(state.block_table[row, position // state.block_size])
            slot = block * state.block_size + position % state.block_size
            tokens.append((int(state.token_ids[row, position]), position, slot))
        for index in range(num_samples):
            samples.append((len(tokens) - num_samples + index, row, stop - num_samples + 1 + index))
        bounds.append(len(tokens))
        sample_bounds.append(len(samples))
        seq_lens.append(stop)
    token_columns = torch.tensor(tokens, dtype=torch.int64).reshape(-1, 3).T
    sample_columns = torch.tensor(samples, dtype=torch.int64).reshape(-1, 3).T
    return FrameBatch(
        batch=Batch(
            token_ids=token_columns[0],
            positions=token_columns[1],
            slot_mapping=token_columns[2],
            cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=state.block_table[plan.rows.clamp(min=0).long()],
            logits_indices=sample_columns[0],
        ),
        cu_samples=torch.tensor(sample_bounds, dtype=torch.int32),
        sample_rows=sample_columns[1].int(),
        sample_positions=sample_columns[2],
    )


def accept_drafts_reference(
    state: DeviceRows,
    plan: PlanColumns,
    frames: FrameBatch,
    sampled: torch.Tensor,
    *,
    finite: torch.Tensor,
    max_drafts: int,
) -> Acceptance:
    """`accept_drafts` in plain Python, in place on `state`."""
    num_reqs = plan.rows.shape[0]
    acceptance = Acceptance.zeros(num_reqs, max_drafts, "cpu")
    acceptance.token_ids.fill_(-1)
    acceptance.failed_position.fill_(-1)
    sample_bounds, bounds = frames.cu_samples.tolist(), frames.batch.cu_seqlens_q.tolist()
    for req, row in enumerate(plan.rows.tolist()):
        samples = sampled[sample_bounds[req] : sample_bounds[req + 1]].tolist()
        seq_len = int(frames.batch.seq_lens[req])
        length = int(state.num_tokens[row]) if samples else seq_len
        drafts = state.token_ids[row, length : length + len(samples) - 1].tolist() if samples else []
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == samples[accepted]:
            accepted += 1
        kept = samples[: accepted + 1]
        acceptance.num_verified[req] = len(drafts)
        if samples:
            state.num_drafts[row] = 0
        broken = (finite[bounds[req] : bounds[req + 1]] == 0).nonzero().flatten().tolist()
        if broken or min(kept, default=0) < 0:
            acceptance.failed[req] = BROKEN_HIDDEN if broken else BROKEN_LOGITS
            first = seq_len - (bounds[req + 1] - bounds[req])
            acceptance.failed_position[req] = first + broken[0] if broken else length + accepted
            state.end[row] = 0
            continue
        if row >= 0:
            state.num_computed[row] = length + len(kept) - 1 if samples else seq_len
        if samples:
            acceptance.num_tokens[req] = len(kept)
            acceptance.token_ids[req, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
            state.token_ids[row, length : length + len(kept)] = acceptance.token_ids[req, : len(kept)]
            state.num_tokens[row] = length + len(kept)
    return acceptance
