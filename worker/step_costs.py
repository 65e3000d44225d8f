"""What a step costs on this machine: measured at load, corrected while it serves.

Durations only; what they are worth is worker.adaptive's business.
"""

import time
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from worker.fingerprint import make_batch
from worker.model import Model

Float64Array = NDArray[np.float64]

# Steps become dearer by tiles of 16 rows: the last row of one and the first of the next, or that one would look cheap.
MEASURED_TOKENS = (1, 4, 5, 8, 16, 17, 32, 33, 64, 65, 128)
ROUNDS = 3  # the first warms up
DRIFT_RATE = 0.3  # of the load of the whole machine, which all steps share: fast, or one size is blamed for it
SHAPE_RATE = 0.02  # of what one size of step costs beside the others; more while little is known of it
FIRST_SHAPE_RATE = 0.3
MOST_CHANGE = 1.5  # a longer step was disturbed by something else
MOST_SHAPE = 1.5
SHAPE_FORGET = 0.998  # a size that looks worse than it is must not be shunned for ever
DRAFT_RATE = 0.1  # of what a draft costs
FIRST_DRAFTS = 3  # of one size: the quickest of them counts, as the first may warm up
DRAFT_SHARE = 0.1  # of the cheapest step, for one draft of all rows, until one was seen


def measure_costs(model: Model, max_tokens: int) -> dict[int, float]:
    """Nanoseconds of a forward with logits by its number of tokens, each of another request, in an empty pool.

    Uses the first blocks of the pool and zeroes them again: a second or less.
    """
    pool = model.kv_cache
    sizes = [size for size in MEASURED_TOKENS if size <= min(max_tokens, pool.num_blocks)]
    batches = {
        size: make_batch([([index % 7], 0, [index]) for index in range(size)], pool.block_size, model.device)
        for size in sizes
    }
    costs = dict.fromkeys(sizes, float("inf"))
    # Round after round, so that whatever else the machine does for a while disturbs all sizes alike.
    for attempt in range(ROUNDS):
        for size, batch in batches.items():
            started_ns = time.perf_counter_ns()
            model.logits(model.forward(batch)).cpu()
            if attempt:
                costs[size] = min(costs[size], float(time.perf_counter_ns() - started_ns))
    for part in (pool.key, pool.value):
        part[:, : max(sizes)] = 0
    return costs


class StepCosts:
    """Nanoseconds of verifying and of drafting, by size."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """measured: number of tokens -> nanoseconds, at least one."""
        sizes = np.array(sorted(measured), np.float64)
        # More tokens never cost less: what says so is noise.
        self._sizes = sizes
        self._size_list: list[float] = sizes.tolist()
        self._measured = np.maximum.accumulate(np.array([measured[int(size)] for size in sizes]))
        self._drift = 1.0  # of all steps against what was measured
        self._shape = np.ones(len(sizes))  # of steps of one size against all
        self._seen = np.zeros(len(sizes), np.int64)  # steps of each size
        self._like = np.arange(len(sizes))  # the nearest size that was seen
        self._draft_ns: dict[int, float] = {}  # number of rows, in powers of two -> one draft, undrifted
        self._drafts_seen: Counter[int] = Counter()  # by the same
        self._has_drafted = False

    def verify_ns(self, num_tokens: Float64Array) -> Float64Array:
        """Of steps of so many tokens."""
        costs = self._measured * self._drift * self._shape
        inside = np.interp(num_tokens, self._sizes, costs)
        if len(self._sizes) == 1:
            return inside
        slope = max((costs[-1] - costs[-2]) / (self._sizes[-1] - self._sizes[-2]), 0.0)
        return np.asarray(inside + slope * np.maximum(num_tokens - self._sizes[-1], 0.0))

    def draft_ns(self, num_rows: int) -> float:
        """Of one draft for each of so many rows."""
        if not self._draft_ns:
            return DRAFT_SHARE * float(self._measured[0]) * self._drift
        bucket = num_rows.bit_length()
        return self._drift * self._draft_ns[min(self._draft_ns, key=lambda known: abs(known - bucket))]

    def verified(self, num_tokens: int, elapsed_ns: int) -> None:
        """A step of so many tokens took so long."""
        nearest = min(range(len(self._sizes)), key=lambda i: abs(self._size_list[i] - num_tokens))
        if self._size_list[nearest] == num_tokens:
            expected = float(self._measured[nearest] * self._drift * self._shape[nearest])
        else:
            expected = float(self.verify_ns(np.array([float(num_tokens)]))[0])
        ratio = min(max(elapsed_ns / expected, 1.0 / MOST_CHANGE), MOST_CHANGE)
        self._drift *= ratio**DRIFT_RATE
        self._seen[nearest] += 1
        if self._seen[nearest] == 1:
            # What was measured leaves out sampling: sizes never seen are like the nearest one that was.
            seen = np.flatnonzero(self._seen)
            self._like = seen[np.abs(self._sizes[:, None] - self._sizes[seen]).argmin(1)]
            if len(seen) == 1:
                return  # nothing to compare it with
        rate = max(SHAPE_RATE, FIRST_SHAPE_RATE / float(self._seen[nearest]))
        self._shape **= SHAPE_FORGET
        shape = float(self._shape[nearest]) * ratio**rate
        self._shape[nearest] = min(max(shape, 1.0 / MOST_SHAPE), MOST_SHAPE)
        self._shape = self._shape[self._like]

    def drafted(self, num_rows: int, num_drafts: int, elapsed_ns: int) -> None:
        """So many drafts for each of so many rows took so long."""
        if not self._has_drafted:
            self._has_drafted = True  # the first of all warms up: believed, it would be the last
            return
        each, bucket = elapsed_ns / num_drafts / self._drift, num_rows.bit_length()
        known = self._draft_ns.get(bucket, each)
        self._drafts_seen[bucket] += 1
        if self._drafts_seen[bucket] <= FIRST_DRAFTS:
            self._draft_ns[bucket] = min(known, each)
        else:
            self._draft_ns[bucket] = known * min(each / known, MOST_CHANGE) ** DRAFT_RATE
