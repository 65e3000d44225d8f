"""The running requests of one worker as columns over its permanent rows.

The letters of the design: T `num_tokens`, C `num_computed`, PH `num_placeholders`, IF `num_in_flight`.
Between steps a decoding row obeys C - PH == T - 1. A row belongs to one epoch at a time (0: nobody).
Knows nothing about blocks' contents or the order of steps.
"""

from typing import Any

import numpy as np

from scheduler.state import RequestState
from scheduler.step import ONE, IndexArray, Int32Array


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
        self.kv_end = column()  # where the KV of rejected drafts ends that settled frames wrote
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
        self.block_size = block_size
        self.blocks_per_row = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_rows, self.blocks_per_row * block_size), np.int32)
        self.block_table = np.zeros((max_rows, self.blocks_per_row), np.int32)
        self.priority = column(np.int64)
        self.arrival = column(np.int64)
        self.states: list[RequestState | None] = [None] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._order: IndexArray | None = None
        self._num_with_stop: dict[int, int] = {}  # stop id -> running requests that end at it
        self._stop_ids = np.empty(0, np.int32)  # its keys, ascending

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
        return int(np.maximum(self.kv_end[rows] - self.num_computed[rows] + self.num_in_flight[rows], 0).sum())

    def order(self) -> IndexArray:
        """Running rows in (priority, arrival) order: [num_running]. The last is the first to go."""
        if self._order is None:
            rows = self.epoch.nonzero()[0]
            self._order = rows[np.lexsort((self.arrival[rows], self.priority[rows]))]
        return self._order

    def seat(self, state: RequestState, *, epoch: int, num_hit_tokens: int, namespace: int, front_end: int) -> int:
        """Give a request a row for a new epoch; its tokens move into the columns."""
        row = self._free_rows.pop()
        request = state.request
        self.states[row] = state
        self._order = None
        self.epoch[row] = epoch
        self.priority[row], self.arrival[row] = state.order_key[0], state.arrival
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
        if state.stop_ids:
            self._count_stops(state.stop_ids, 1)
        return row

    def vacate(self, row: int) -> list[int]:
        """Free a row; the request gets its tokens and statistics back. Returns its blocks, first to last."""
        state = self.states[row]
        assert state is not None
        state.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        state.num_tokens = int(self.num_tokens[row])
        state.num_draft_tokens += int(self.num_draft_tokens[row])
        state.num_accepted_tokens += int(self.num_accepted[row])
        if state.stop_ids:
            self._count_stops(state.stop_ids, -1)
        blocks: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        self.states[row] = None
        self.epoch[row] = 0
        self._free_rows.append(row)
        self._order = None
        return blocks

    def write_tokens(self, rows: IndexArray, starts: Int32Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """Write `counts[i]` tokens from `starts[i]` on into each row. What goes past a row is cut by its end anyway."""
        width = self.token_ids.shape[1]
        if np.count_nonzero(starts + counts > width):
            token_ids = token_ids[each_of(starts, counts) < width]
            counts = np.minimum(counts, width - starts)
        self.token_ids.reshape(-1)[each_of(rows * width + starts, counts)] = token_ids

    def blocks_with_tokens(self, rows: IndexArray, starts: Int32Array, counts: Int32Array) -> tuple[list[int], bytes]:
        """The `counts[i]` blocks from place `starts[i]` on of each row, and their int32 tokens."""
        places = each_of(rows * self.blocks_per_row + starts, counts)
        tokens = self.token_ids.reshape(-1, self.block_size).take(places, axis=0)
        blocks: list[int] = self.block_table.reshape(-1).take(places).tolist()
        return blocks, tokens.tobytes()

    def write_blocks(self, rows: IndexArray, counts: Int32Array, blocks: list[int]) -> None:
        """Lengthen the block tables of rows by `counts[i]` blocks each."""
        num_blocks = self.num_blocks[rows]
        places = each_of(rows * self.blocks_per_row + num_blocks, counts)
        self.block_table.reshape(-1)[places] = blocks
        self.num_blocks[rows] = num_blocks + counts

    def may_stop(self, token_ids: Int32Array) -> IndexArray:
        """Where a token is a stop id of some running request; whether of its own is for `first_stop` to say."""
        if not self._num_with_stop:
            return np.empty(0, np.intp)
        found = self._stop_ids[self._stop_ids[:-1].searchsorted(token_ids)]
        return np.flatnonzero(found == token_ids)

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        """Lengthen one row's block table."""
        start = int(self.num_blocks[row])
        self.block_table[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def _count_stops(self, stop_ids: tuple[int, ...], change: int) -> None:
        counts = self._num_with_stop
        num_before = len(counts)
        for stop_id in stop_ids:
            counts[stop_id] = counts.get(stop_id, 0) + change
            if counts[stop_id] == 0:
                del counts[stop_id]
        if len(counts) != num_before:
            self._stop_ids = np.array(sorted(counts), np.int32)


def each_of(starts: Int32Array | IndexArray, counts: Int32Array) -> IndexArray:
    """`starts[i], starts[i] + 1, ...`, so many of each: [sum(counts)]."""
    if np.count_nonzero(counts == ONE) == len(counts):
        return starts.astype(np.intp, copy=False)
    stops = np.add.accumulate(counts, dtype=np.int32)
    numbers: IndexArray = (starts - stops + counts).repeat(counts)
    return numbers + np.arange(len(numbers))
