"""Draft steps on the device: K lookahead tokens per row by the same attention, without the host in between.

Step j feeds the last confirmed token (j = 0) or draft j - 1 of every row, at its true position, into slots the
scheduler reserved as lookahead, and appends what is sampled to the row's pending drafts. All K steps may stand
in one captured graph: `propose_drafts` runs no host code that depends on a value. Knows nothing of draft models
but that they turn a Batch into logits.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from worker.batch import Batch
from worker.kernels.rows import DeviceRows
from worker.kernels.sampling import sample
from worker.kernels.tuning import COMPILE_OPTIONS


@triton.jit(do_not_specialize=["num_reqs", "step"])
def gather_drafts_kernel(
    plan_rows,
    num_propose,
    row_token_ids,
    row_blocks,
    num_tokens,
    end,
    token_ids,
    positions,
    slot_mapping,
    cu_seqlens_q,
    seq_lens,
    sample_rows,
    sample_positions,
    num_reqs,
    step,
    tokens_stride,
    blocks_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK requests, one token each. Rows that draft no more get slot -1, length 0 and no sample."""
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = req < num_reqs
    row = tl.load(plan_rows + req, mask=inside, other=-1).to(tl.int64)
    exists = row >= 0
    length = tl.load(num_tokens + row, mask=exists, other=0)
    limit = tl.load(num_propose + req, mask=exists, other=0)
    limit = tl.minimum(limit, tl.load(end + row, mask=exists, other=0) - length - 1)
    drafts = exists & (step < limit)
    position = length - 1 + step
    token_id = tl.load(row_token_ids + row * tokens_stride + position, mask=drafts, other=0)
    block = tl.load(row_blocks + row * blocks_stride + position // BLOCK_SIZE, mask=drafts, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + req, token_id.to(tl.int64), mask=inside)
    tl.store(positions + req, tl.where(drafts, position, 0).to(tl.int64), mask=inside)
    tl.store(slot_mapping + req, tl.where(drafts, slot, -1), mask=inside)
    tl.store(cu_seqlens_q + req, req, mask=inside)
    tl.store(cu_seqlens_q + num_reqs, num_reqs)
    tl.store(seq_lens + req, tl.where(drafts, position + 1, 0), mask=inside)
    tl.store(sample_rows + req, tl.where(drafts, row, -1).to(tl.int32), mask=inside)
    tl.store(sample_positions + req, (position + 1).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_reqs", "step"])
def append_drafts_kernel(
    sample_rows,
    sampled,
    row_token_ids,
    num_tokens,
    num_drafts,
    num_reqs,
    step,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK requests. A draft that could not be sampled ends its row's drafts."""
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = req < num_reqs
    row = tl.load(sample_rows + req, mask=inside, other=-1).to(tl.int64)
    token_id = tl.load(sampled + req, mask=inside, other=-1)
    exists = row >= 0
    unbroken = tl.load(num_drafts + row, mask=exists, other=-1) == step
    drafted = exists & unbroken & (token_id >= 0)
    length = tl.load(num_tokens + row, mask=drafted, other=0)
    tl.store(row_token_ids + row * tokens_stride + length + step, token_id, mask=drafted)
    tl.store(num_drafts + row, (length * 0 + step + 1), mask=drafted)


def gather_drafts(
    state: DeviceRows, rows: torch.Tensor, num_propose: torch.Tensor, *, step: int
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """The batch of one draft step, one token per request, with its sample rows and positions.

    rows: [num_reqs] int32 permanent rows, -1 padding; num_propose: [num_reqs] int32.
    """
    num_reqs, device = rows.shape[0], rows.device
    int64 = torch.empty((4, num_reqs), dtype=torch.int64, device=device)
    int32 = torch.empty((2, num_reqs), dtype=torch.int32, device=device)
    batch = Batch(
        token_ids=int64[0],
        positions=int64[1],
        slot_mapping=int64[2],
        cu_seqlens_q=torch.empty(num_reqs + 1, dtype=torch.int32, device=device),
        seq_lens=int32[0],
        block_table=state.block_table.index_select(0, rows.clamp(min=0)),
        logits_indices=torch.arange(num_reqs, device=device),
    )
    block = min(triton.next_power_of_2(num_reqs), 128)
    gather_drafts_kernel[(triton.cdiv(num_reqs, block),)](
        rows, num_propose, state.token_ids, state.block_table, state.num_tokens, state.end,
        batch.token_ids, batch.positions, batch.slot_mapping, batch.cu_seqlens_q, batch.seq_lens,
        int32[1], int64[3], num_reqs, step, state.token_ids.stride(0), state.block_table.stride(0),
        BLOCK_SIZE=state.block_size, BLOCK=block, **COMPILE_OPTIONS,
    )  # fmt: skip
    return batch, int32[1], int64[3]


def append_drafts(state: DeviceRows, sample_rows: torch.Tensor, sampled: torch.Tensor, *, step: int) -> None:
    """Put `sampled` [num_reqs] int32 behind the drafts of their rows."""
    num_reqs = sample_rows.shape[0]
    block = min(triton.next_power_of_2(num_reqs), 128)
    append_drafts_kernel[(triton.cdiv(num_reqs, block),)](
        sample_rows, sampled, state.token_ids, state.num_tokens, state.num_drafts, num_reqs, step,
        state.token_ids.stride(0), BLOCK=block, **COMPILE_OPTIONS,
    )  # fmt: skip


def propose_drafts(
    state: DeviceRows,
    rows: torch.Tensor,  # [num_reqs] int32, -1 padding
    num_propose: torch.Tensor,  # [num_reqs] int32, at most
    *,
    max_drafts: int,
    logits_of: Callable[[Batch], torch.Tensor],  # a draft model: Batch -> [num_reqs, vocab_size] float32
) -> None:
    """Draft up to `max_drafts` tokens per row, sampled with the noise that will verify them."""
    for step in range(max_drafts):
        batch, sample_rows, sample_positions = gather_drafts(state, rows, num_propose, step=step)
        sampled = torch.empty(rows.shape, dtype=torch.int32, device=rows.device)
        sample(logits_of(batch), sample_rows, sample_positions, state.sampling, sampled)
        append_drafts(state, sample_rows, sampled, step=step)


def gather_drafts_reference(
    state: DeviceRows, rows: torch.Tensor, num_propose: torch.Tensor, *, step: int
) -> list[tuple[int, int, int] | None]:
    """Per request its (token id, position, slot) of one draft step, or None."""
    tokens: list[tuple[int, int, int] | None] = []
    for row, limit in zip(rows.tolist(), num_propose.tolist(), strict=True):
        length, end = (int(state.num_tokens[row]), int(state.end[row])) if row >= 0 else (0, 0)
        if row < 0 or step >= min(limit, end - length - 1):
            tokens.append(None)
            continue
        position = length - 1 + step
        block = int(state.block_table[row, position // state.block_size])
        slot = block * state.block_size + position % state.block_size
        tokens.append((int(state.token_ids[row, position]), position, slot))
    return tokens
