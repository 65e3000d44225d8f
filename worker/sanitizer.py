"""A shadow of the KV pool that knows which tokens every slot was computed from.

At every slot write it keeps a 64-bit hash of (namespace, tokens 0..position); once per step every slot
about to be read must hold what the request believes. It finds misplaced KV that equal output text would
hide: a block read after it was given away, a prefix hit on the wrong tokens, a rejected draft taken for
a confirmed one. Knows nothing about the KV's numbers.
"""

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.step import Int64Array
from worker.rows import RowState

UInt64Array = NDArray[np.uint64]

EMPTY = np.uint64(0)  # nothing was written to this slot


class KVViolation(AssertionError):
    """A request would read KV that was not computed from its own tokens."""


def is_wanted() -> bool:
    """Whether the environment asks for the sanitizer."""
    return os.environ.get("SLIPSTREAM_SANITIZE_KV", "") == "1"


def prefix_hashes(namespace: int, token_ids: NDArray[np.integer]) -> UInt64Array:
    """Hash of (namespace, tokens 0..i) for every i: [num_tokens] uint64, never EMPTY in practice."""
    return _extended(_mixed(np.array([namespace], np.uint64) + np.uint64(1))[0], token_ids, 0)


def _extended(before: np.uint64, token_ids: NDArray[np.integer], position: int) -> UInt64Array:
    """Hashes at positions `position`.. given the one before: a sum of mixed (token, position) pairs, so it is
    incremental and vectorised, and order counts."""
    positions = np.arange(position, position + len(token_ids), dtype=np.uint64)
    pairs = (positions << np.uint64(32)) | token_ids.astype(np.uint64)
    return np.cumsum(_mixed(pairs), dtype=np.uint64) + before


def _mixed(values: UInt64Array) -> UInt64Array:
    """The finalizer of SplitMix64: a bijection whose outputs look random."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Belief(NamedTuple):
    """What one epoch believes its slots hold."""

    hashes: UInt64Array  # [>= stop] of tokens 0..i, as of its last step
    num_confirmed: int  # leading hashes that are of confirmed tokens


class KVSanitizer:
    """The shadow of one worker's pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._shadow = np.full(num_blocks * block_size, EMPTY)
        self._believed: dict[int, Belief] = {}  # by epoch

    def reset(self) -> None:
        """The pool counts as empty and nobody is resident."""
        self._shadow[:] = EMPTY
        self._believed.clear()

    def forget(self, epoch: int) -> None:
        """An epoch was released; what its slots hold stays known."""
        self._believed.pop(epoch, None)

    def write(self, row: RowState, stop: int) -> None:
        """The row is about to write KV of positions `num_computed_tokens`..`stop - 1`, drafts included."""
        start = row.num_computed_tokens
        believed = self._believe(row, stop)
        self._shadow[self._slots(row, start, stop)] = believed[start:stop]

    def unwrite(self, row: RowState, stop: int) -> None:
        """The row failed before it wrote."""
        self._shadow[self._slots(row, row.num_computed_tokens, stop)] = EMPTY

    def check(self, row: RowState, stop: int) -> None:
        """Raises KVViolation unless every slot the row reads (positions below `stop`) holds its own tokens."""
        slots = self._slots(row, 0, stop)
        wrong = np.flatnonzero(self._shadow[slots] != self._believed[row.epoch].hashes[:stop])
        if len(wrong) == 0:
            return
        position = int(wrong[0])
        slot = int(slots[position])
        what = "nothing" if self._shadow[slot] == EMPTY else "KV of other tokens"
        raise KVViolation(
            f"request {row.request_id} (epoch {row.epoch}) would read position {position} from slot {slot} "
            f"(block {slot // self._block_size}), which holds {what}; {len(wrong)} of {stop} positions are wrong"
        )

    def _slots(self, row: RowState, start: int, stop: int) -> Int64Array:
        positions = np.arange(start, stop)
        blocks: Int64Array = row.table.block_table[row.row, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _believe(self, row: RowState, stop: int) -> UInt64Array:
        """Hashes of the row's tokens below `stop`. Only those of confirmed tokens are remembered: a draft's
        hash must not outlive the draft, or a rejected one taken for confirmed would go unnoticed."""
        token_ids = row.table.token_ids[row.row, :stop]
        known = self._believed.get(row.epoch)
        start = 0 if known is None else min(known.num_confirmed, stop)
        if known is None or start == 0:
            hashes = prefix_hashes(row.namespace, token_ids)
        else:
            hashes = known.hashes
            if len(hashes) < stop:
                hashes = np.concatenate((hashes, np.empty(stop, np.uint64)))
            hashes[start:stop] = _extended(hashes[start - 1], token_ids[start:], start)
        self._believed[row.epoch] = Belief(hashes, min(stop, row.num_tokens))
        return hashes
