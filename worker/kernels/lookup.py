"""Prompt lookup on the device: what followed a row's last tokens the last time they stood in it.

The drafts of `worker.drafter.NgramDrafter`, written behind the confirmed tokens without a word from the host.
"""

import torch
import triton
import triton.language as tl

from worker.drafter import latest_match
from worker.kernels.rows import Acceptance, DeviceRows
from worker.kernels.tuning import COMPILE_OPTIONS

TILE = 1024  # positions compared at once


@triton.jit
def lookup_kernel(
    plan_rows,
    num_propose,
    num_returned,
    row_token_ids,
    num_tokens,
    num_drafts,
    end,
    out_draft_ids,
    out_num_drafts,
    shortest,
    longest,
    max_drafts,
    tokens_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program: one request. Only a row that returned tokens in this step drafts."""
    req = tl.program_id(0)
    row = tl.load(plan_rows + req)
    returned = tl.load(num_returned + req) > 0
    length = tl.load(num_tokens + row, mask=returned, other=0)
    room = tl.load(end + row, mask=returned, other=0) - length - 1
    limit = tl.minimum(tl.minimum(tl.load(num_propose + req), max_drafts), room)
    tokens = row_token_ids + tl.maximum(row, 0).to(tl.int64) * tokens_stride
    stop = tl.where(returned & (limit > 0), length - 1, 0)
    best = tl.full([TILE], -1, dtype=tl.int64)  # length of a copy, then its last position
    for start in range(0, stop, TILE):
        position = start + tl.arange(0, TILE)
        alike = position < stop
        run = tl.zeros([TILE], dtype=tl.int32)
        for back in range(0, longest):
            alike = alike & (position >= back)
            mine = tl.load(tokens + length - 1 - back, mask=back < length, other=-1)
            alike = alike & (tl.load(tokens + position - back, mask=alike, other=-2) == mine)
            run += alike.to(tl.int32)
        best = tl.maximum(best, tl.where(run >= shortest, (run.to(tl.int64) << 32) | position.to(tl.int64), -1))
    found = tl.max(best, 0)
    count = tl.where(found >= 0, limit, 0)
    first = (found & 0xFFFFFFFF).to(tl.int32) + 1
    index = tl.arange(0, BLOCK)
    kept = index < count
    # A match that runs into the end goes on with its own period.
    draft = tl.load(tokens + first + index % tl.maximum(length - first, 1), mask=kept, other=-1)
    tl.store(tokens + length + index, draft, mask=kept)
    tl.store(num_drafts + row, count, mask=returned)
    tl.store(out_draft_ids + req * max_drafts + index, draft, mask=index < max_drafts)
    tl.store(out_num_drafts + req, tl.maximum(count, 0))


def look_up(
    state: DeviceRows,
    rows: torch.Tensor,  # [num_reqs] int32, -1 padding
    num_propose: torch.Tensor,  # [num_reqs] int32, at most
    acceptance: Acceptance,  # of this step; its drafts are written
    *,
    shortest: int,
    longest: int,
) -> None:
    """Draft for every row that returned tokens, behind its confirmed ones."""
    max_drafts = acceptance.draft_ids.shape[1]
    lookup_kernel[(rows.shape[0],)](
        rows, num_propose, acceptance.num_tokens, state.token_ids, state.num_tokens, state.num_drafts, state.end,
        acceptance.draft_ids, acceptance.num_drafts, shortest, longest, max_drafts, state.token_ids.stride(0),
        BLOCK=triton.next_power_of_2(max_drafts), TILE=TILE, **COMPILE_OPTIONS,
    )  # fmt: skip


def look_up_reference(
    state: DeviceRows,
    rows: torch.Tensor,
    num_propose: torch.Tensor,
    acceptance: Acceptance,
    *,
    shortest: int,
    longest: int,
) -> None:
    """`look_up` by the host's search, in place on `state` and `acceptance`."""
    acceptance.num_drafts.zero_()
    acceptance.draft_ids.fill_(-1)
    for req, row in enumerate(rows.tolist()):
        if acceptance.num_tokens[req] == 0:
            continue
        length = int(state.num_tokens[row])
        limit = min(int(num_propose[req]), acceptance.draft_ids.shape[1], int(state.end[row]) - length - 1)
        confirmed = state.token_ids[row, :length].numpy()
        first = latest_match(confirmed, shortest, longest)[0] if limit > 0 else 0
        count = limit if first else 0
        for index in range(count):
            draft = int(confirmed[first + index % (length - first)])
            state.token_ids[row, length + index] = acceptance.draft_ids[req, index] = draft
        state.num_drafts[row] = acceptance.num_drafts[req] = count
