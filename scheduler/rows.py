"""The running requests of one worker as columns over its permanent rows.

The letters of the design: T `num_tokens`, C `num_computed`, PH `num_placeholders`, IF `num_in_flight`.
Between steps a decoding row obeys C - PH == T - 1. A row belongs to one epoch at a time (0: nobody).
Knows nothing about blocks' contents or the order of steps.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.state import RequestState
from scheduler.step import Int32Array

NO_STOP = -1


class RowTable:
    """Columns `[max_rows]`; int32 unless noted."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        def column(dtype: type = np.int32) -> np.ndarray:
            return np.zeros(max_rows, dtype)

        self.max_rows = max_rows
        self.epoch = column(np.int64)
        self.num_tokens = column()  # T: confirmed, prompt and outputs
        self.num_prompt = column()
        self.end = column()  # no token at or past this position
        self.num_computed = column()  # C: KV written, or to be written by live frames; an upper bound
        self.num_placeholders = column()  # PH: tokens reserved by live frames
        self.num_in_flight = column()  # IF: scheduled tokens of live frames
        self.num_live = column()  # live frames that sample
        self.kv_end = column()  # KV written by settled frames, rejected drafts included
        self.prefilling = column(np.bool_)  # no sampling frame planned yet in this epoch
        self.max_drafts = column()  # K, at most
        self.num_proposed = column()  # drafts the last sampling frame may have left for the next one
        self.num_blocks = column()
        self.num_published = column()  # leading blocks offered to the prefix cache
        self.namespace = column()  # of the pool when the epoch began
        self.front_end = column()  # index into the scheduler's front ends
        self.stream = column(np.int64)
        self.attempt = column()
        self.num_draft_tokens = column()
        self.num_accepted = column()
        # Wide columns; untouched memory costs nothing.
        self.token_ids = np.zeros((max_rows, max_model_len), np.int32)
        self.block_table = np.zeros((max_rows, -(-max_model_len // block_size)), np.int32)
        self.stop_ids = np.full((1, max_rows), NO_STOP, np.int32)  # [most of any request, max_rows]
        self.priority = column(np.int64)
        self.arrival = column(np.int64)
        self.states: list[RequestState | None] = [None] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._order: Int32Array | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The wide columns only of rows that are taken: a snapshot is as large as what runs."""
        state = dict(self.__dict__)
        rows = np.flatnonzero(self.epoch)
        state["token_ids"] = (self.token_ids.shape, rows, self.token_ids[rows])
        state["block_table"] = (self.block_table.shape, rows, self.block_table[rows])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__`."""
        for name in ("token_ids", "block_table"):
            shape, rows, taken = state[name]
            state[name] = np.zeros(shape, np.int32)
            state[name][rows] = taken
        self.__dict__.update(state)

    @property
    def num_free_rows(self) -> int:
        """Rows that a request could take now."""
        return len(self._free_rows)

    @property
    def num_running(self) -> int:
        """Rows taken."""
        return self.max_rows - len(self._free_rows)

    def num_garbage_tokens(self) -> int:
        """KV of rejected drafts that is still in the cache, until a later step overwrites it."""
        rows = self.order()
        return int((self.kv_end[rows] - self.num_computed[rows] + self.num_in_flight[rows]).sum())

    def order(self) -> Int32Array:
        """Running rows in (priority, arrival) order: [num_running] int32. The last is the first to go."""
        if self._order is None:
            rows = np.flatnonzero(self.epoch).astype(np.int32)
            self._order = rows[np.lexsort((self.arrival[rows], self.priority[rows]))]
        return self._order

    def seat(self, state: RequestState, *, epoch: int, num_hit_tokens: int, namespace: int, front_end: int) -> int:
        """Give a request a row for a new epoch; its tokens move into the columns."""
        row = self._free_rows.pop()
        request = state.request
        self.states[row] = state
        self._order = None
        self.epoch[row] = epoch
        self.priority[row], self.arrival[row] = state.order_key
        self.num_tokens[row] = state.num_tokens
        self.num_prompt[row] = state.num_prompt
        self.end[row] = state.end
        self.num_computed[row] = self.kv_end[row] = num_hit_tokens
        for cleared in (self.num_placeholders, self.num_in_flight, self.num_live, self.num_proposed):
            cleared[row] = 0
        for counted in (self.num_blocks, self.num_published, self.num_draft_tokens, self.num_accepted):
            counted[row] = 0
        self.prefilling[row] = True
        self.max_drafts[row] = state.max_drafts
        self.namespace[row] = namespace
        self.front_end[row] = front_end
        self.stream[row] = request.stream
        self.attempt[row] = request.attempt
        self.token_ids[row, : state.num_tokens] = state.token_ids[: state.num_tokens]
        self._set_stop_ids(row, state.stop_ids)
        return row

    def vacate(self, row: int) -> list[int]:
        """Free a row; the request gets its tokens and statistics back. Returns its blocks, first to last."""
        state = self.states[row]
        assert state is not None
        state.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        state.num_tokens = int(self.num_tokens[row])
        state.num_draft_tokens += int(self.num_draft_tokens[row])
        state.num_accepted_tokens += int(self.num_accepted[row])
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        self.states[row] = None
        self.epoch[row] = 0
        self._free_rows.append(row)
        self._order = None
        return blocks

    def write_tokens(self, rows: Int32Array, positions: NDArray[np.signedinteger], token_ids: Int32Array) -> None:
        """Write tokens `[n]` at (row, position). A run that goes past the row is cut by its request's end."""
        width = self.token_ids.shape[1]
        if len(positions) and positions.max() >= width:
            inside = positions < width
            rows, positions, token_ids = rows[inside], positions[inside], token_ids[inside]
        self.token_ids[rows, positions] = token_ids

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        """Lengthen one row's block table."""
        start = int(self.num_blocks[row])
        self.block_table[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        most = len(self.stop_ids)
        if len(stop_ids) > most:
            more = np.full((len(stop_ids) - most, self.max_rows), NO_STOP, np.int32)
            self.stop_ids = np.concatenate((self.stop_ids, more))
        self.stop_ids[:, row] = NO_STOP
        self.stop_ids[: len(stop_ids), row] = stop_ids
