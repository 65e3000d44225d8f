"""The requests resident on a worker: true lengths, tokens, blocks and pending drafts, by permanent row.

The wide columns are kept in one table so that a step's batch is gathered with a handful of array
operations. Knows nothing about plans, models or what the scheduler believes.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler.step import Arrival, Int32Array
from worker.sampler import TokenSampler


class RowTable:
    """Wide columns over permanent rows. They grow with the longest request that arrives."""

    def __init__(self, max_num_seqs: int, block_size: int, num_tokens: int = 512) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, num_tokens), np.int32)  # confirmed tokens, then pending drafts
        self.block_table = np.zeros((max_num_seqs, -(-num_tokens // block_size)), np.int32)

    @property
    def max_num_seqs(self) -> int:
        """Permanent rows."""
        return len(self.token_ids)

    def hold(self, num_tokens: int) -> None:
        """Make every row long enough for this many tokens."""
        capacity = self.token_ids.shape[1]
        if num_tokens <= capacity:
            return
        capacity = max(num_tokens, 2 * capacity)
        self.token_ids = _widened(self.token_ids, capacity)
        self.block_table = _widened(self.block_table, -(-capacity // self.block_size))


def _widened(column: Int32Array, width: int) -> Int32Array:
    wider = np.zeros((len(column), width), np.int32)
    wider[:, : column.shape[1]] = column
    return wider


@dataclass(slots=True, kw_only=True, eq=False)
class RowState:
    """One epoch: one residence of a request on this worker. The authority on its positions."""

    table: RowTable
    row: int
    epoch: int
    request_id: str
    end: int  # no token at or past this position
    namespace: int
    num_prompt_tokens: int
    num_tokens: int  # confirmed: prompt and outputs
    num_computed_tokens: int  # KV written for true tokens
    sampler: TokenSampler | None  # None only when the arrival was refused
    num_blocks: int = 0
    draft_token_ids: list[int] = field(default_factory=list)  # pending, they extend the last confirmed token
    failure: str | None = None  # answered to every later frame of this epoch

    @classmethod
    def of(cls, arrival: Arrival, table: RowTable, vocab_size: int) -> "RowState":
        """Seat an arrival. What is wrong with it becomes the row's failure."""
        history = np.concatenate((arrival.prompt_token_ids, arrival.output_token_ids))
        state = cls(
            table=table,
            row=arrival.row,
            epoch=arrival.epoch,
            request_id=arrival.request_id,
            end=arrival.end,
            namespace=arrival.namespace,
            num_prompt_tokens=len(arrival.prompt_token_ids),
            num_tokens=len(history),
            num_computed_tokens=arrival.num_computed_tokens,
            sampler=None,
        )
        try:
            _check_arrival(history, arrival, vocab_size)
            state.sampler = TokenSampler(
                arrival.sampling, arrival.prompt_token_ids, arrival.output_token_ids, vocab_size
            )
        except ValueError as error:
            state.failure = f"request {arrival.request_id}: {error}"
            return state
        table.hold(max(arrival.end, len(history)))
        table.token_ids[state.row, : len(history)] = history
        table.block_table[state.row] = 0
        return state

    @property
    def token_ids(self) -> Int32Array:
        """Confirmed tokens, prompt and outputs: [num_tokens] int32, a view."""
        return self.table.token_ids[self.row, : self.num_tokens]

    @property
    def block_ids(self) -> Int32Array:
        """[num_blocks] int32, a view."""
        return self.table.block_table[self.row, : self.num_blocks]

    def append_blocks(self, block_ids: Int32Array) -> None:
        """Lengthen the block table. Raises ValueError past what the request can ever use."""
        num_blocks = self.num_blocks + len(block_ids)
        if num_blocks > self.table.block_table.shape[1]:
            raise ValueError(f"{num_blocks} blocks for a request that ends at position {self.end}")
        self.table.block_table[self.row, self.num_blocks : num_blocks] = block_ids
        self.num_blocks = num_blocks

    def append_tokens(self, token_ids: list[int]) -> None:
        """Confirm sampled tokens; pending drafts are used up."""
        stop = self.num_tokens + len(token_ids)
        self.table.token_ids[self.row, self.num_tokens : stop] = token_ids
        self.num_tokens = stop
        self.draft_token_ids = []

    def hold_drafts(self, token_ids: list[int]) -> None:
        """Keep these drafts behind the last confirmed token, for the next frame that samples."""
        stop = self.num_tokens + len(token_ids)
        assert stop < self.end, f"a draft at position {stop - 1} leaves no room before {self.end}"
        self.table.token_ids[self.row, self.num_tokens : stop] = token_ids
        self.draft_token_ids = token_ids


def _check_arrival(history: Int32Array, arrival: Arrival, vocab_size: int) -> None:
    if len(history) == 0:
        raise ValueError("no tokens")
    outside = np.flatnonzero((history < 0) | (history >= vocab_size))
    if len(outside):
        position = int(outside[0])
        raise ValueError(
            f"token id {history[position]} at position {position} is outside the vocabulary of {vocab_size}"
        )
    if not 0 <= arrival.num_computed_tokens < len(history):
        raise ValueError(f"{arrival.num_computed_tokens} computed tokens of {len(history)}")
