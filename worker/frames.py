"""The rows of one step by true positions, and the batch the model sees of them.

Knows nothing about plans, sampling or failures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from scheduler.step import Int64Array
from worker.batch import Batch
from worker.rows import RowState, RowTable
from worker.sampler import TokenLogprobs


@dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """One row of a step, by true positions: it computes tokens `start`..`stop - 1`, drafts last.

    Of a step launched before the one before has answered: by the highest positions that they can be.
    """

    index: int  # into the plan's rows
    row: RowState
    start: int
    stop: int
    draft_token_ids: list[int]  # verified in this frame
    samples: bool  # False: a prefill chunk
    num_propose: int
    token_ids: list[int] = field(default_factory=list)  # returned
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Positions that need logits."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


def gather_batch(frames: Sequence[Frame], table: RowTable, device: torch.device, *, ahead: int = 0) -> Batch:
    """The frames as the model sees them, gathered from the table by true positions.

    ahead: each position comes with the token that stands so many positions after it.
    """
    rows = np.array([frame.row.row for frame in frames], np.int64)  # [num_reqs] -> permanent row
    starts = np.array([frame.start for frame in frames], np.int64)
    stops = np.array([frame.stop for frame in frames], np.int64)
    num_samples = np.array([frame.num_samples for frame in frames], np.int64)
    cu_seqlens_q = np.concatenate((np.zeros(1, np.int64), np.cumsum(stops - starts)))
    token_rows = np.repeat(rows, stops - starts)
    positions = _ranges(starts, stops - starts)
    blocks = table.block_table[token_rows, positions // table.block_size].astype(np.int64)
    num_blocks = -(-stops // table.block_size)
    columns = np.arange(num_blocks.max())
    block_table = np.where(columns < num_blocks[:, None], table.block_table[rows, : len(columns)], np.int32(0))
    return Batch(
        token_ids=_on(device, table.token_ids[token_rows, positions + ahead].astype(np.int64)),
        positions=_on(device, positions),
        slot_mapping=_on(device, blocks * table.block_size + positions % table.block_size),
        cu_seqlens_q=_on(device, cu_seqlens_q.astype(np.int32)),
        seq_lens=_on(device, stops.astype(np.int32)),
        block_table=_on(device, block_table),
        logits_indices=_on(device, _ranges(cu_seqlens_q[1:] - num_samples, num_samples)),
    )


def _on(device: torch.device, column: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(column).to(device, non_blocking=True)


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """`starts[i]`..`starts[i] + lengths[i] - 1` for every i, one after the other: [sum(lengths)] int64."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
