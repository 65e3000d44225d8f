"""How many drafts each row gets: as many as pay, none included.

In each step the drafts of all rows are ranked by the chance that they are accepted, from what was accepted
lately at each depth, and as many of them are made as give the most tokens per second, with the measured costs of
verifying more tokens and of drafting. Rows without drafts are probed now and then. A policy: it never changes
a stream, only when its tokens come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.drafter import VerifiedStep
from worker.mixture import MODEL
from worker.rows import RowState
from worker.step_costs import Float64Array, StepCosts

FORGET: Final = 0.96  # weight of what was seen at a depth one verification before
FORGET_UNTRIED: Final = 0.98  # the same in a step that drafts less deep, or from another source
WORKER_FORGET: Final = 0.998  # the same two of all rows together
WORKER_FORGET_UNTRIED: Final = 0.99
PRIOR_WEIGHT: Final = 2.0  # verifications that what is known of all rows counts for in one row
FIRST_GUESS: Final = (0.7, 0.6)  # chance of a first draft by lookup, by a model, before anything was seen
FIRST_WEIGHT: Final = 4.0
MOST_CHANCE: Final = 0.98  # that is ever concluded for a depth from those before it
KEEP: Final = 1.02  # a choice is changed for a gain of 2 %, not for noise
DECIDE_EVERY: Final = 4  # steps: deciding costs as much as a draft may bring
FIRST_PROBE: Final = 16  # steps without drafts before one is tried; doubled by every probe that fails
LAST_PROBE: Final = 512
NUM_SOURCES: Final = 2

IntArray = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class RowPlan:
    """What was decided for one epoch."""

    source: int = MODEL
    num_drafts: list[int] = field(default_factory=lambda: [0, 0])  # by source
    pending: int = MODEL  # source of the drafts to verify next
    idle_steps: int = 0  # without a draft to verify
    probe_after: int = FIRST_PROBE
    is_probed: bool = False  # the pending draft is a probe


class AdaptiveDrafts:
    """A `DraftPolicy` that weighs what drafts bring against what they cost."""

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self.costs = costs
        self._max_drafts = max_drafts
        self._depths = np.arange(max_drafts)
        self._tried = np.zeros((NUM_SOURCES, max_drafts))  # of all rows: verifications that came to this depth
        self._right = np.zeros((NUM_SOURCES, max_drafts))  # and accepted it
        self._forget_rows()
        self._num_tokens = 1  # of a step like the last one, drafts left out
        self._num_sampling = 1  # rows of it that return tokens

    def _forget_rows(self) -> None:
        shape = (0, NUM_SOURCES, self._max_drafts)
        self._row_tried, self._row_right = np.zeros(shape), np.zeros(shape)  # by permanent row
        self._plans: dict[int, RowPlan] = {}  # by epoch
        self._seen: list[tuple[int, int, int, int]] = []  # row, source, verified, accepted: not learned yet
        self._num_steps = 0  # since the last decision

    def begin_session(self) -> None:
        """Rows are forgotten; what they taught about drafts and costs is not."""
        self._forget_rows()

    def forget(self, epoch: int) -> None:
        """An epoch has left this worker."""
        self._plans.pop(epoch, None)

    # ---- what happened ----

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step's acceptances and from its time."""
        num_tokens = num_drafts = num_sampling = 0
        is_decode = True
        for frame in step.frames:
            count, num_verified = frame.stop - frame.start, len(frame.draft_token_ids)
            num_tokens += count
            # A prompt, or the last piece of one, which comes once.
            is_decode &= bool(frame.token_ids) and count == 1 + num_verified
            if frame.token_ids:
                num_drafts += count - 1
                num_sampling += 1
                plan = self._plans.get(frame.row.epoch)
                if plan is not None:
                    self._note(plan, frame.row.row, num_verified, len(frame.token_ids) - 1)
        if num_sampling:
            self._num_sampling = num_sampling
            self._num_tokens = num_tokens - num_drafts
            if is_decode:
                self.costs.verified(num_tokens, step.verify_ns)

    def _note(self, plan: RowPlan, row: int, num_verified: int, num_accepted: int) -> None:
        self._seen.append((row, plan.pending, num_verified, num_accepted))
        if num_verified == 0:
            plan.idle_steps += 1
            return
        plan.idle_steps = 0
        if num_accepted:
            plan.probe_after = FIRST_PROBE
        elif plan.is_probed:
            plan.probe_after = min(2 * plan.probe_after, LAST_PROBE)
        plan.is_probed = False

    def _learn(self) -> None:
        """Make statistics of what was seen since the last decision."""
        if not self._seen:
            return
        rows, source, num_verified, num_accepted = np.array(self._seen, np.int64).T
        self._seen.clear()
        tried = (num_verified[:, None] > self._depths) & (num_accepted[:, None] >= self._depths)
        right = num_accepted[:, None] > self._depths
        shape = self._row_tried.shape
        new_tried, new_right, steps = np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1, 1))
        reached = np.zeros(shape)  # how often a depth could have been tried and was drafted, or not even come to
        np.add.at(new_tried, (rows, source), tried)
        np.add.at(new_right, (rows, source), right)
        np.add.at(reached, (rows, source), num_verified[:, None] > self._depths)
        np.add.at(steps, rows, 1.0)
        # What is not tried any more is slowly forgotten, or a bad patch would be for ever.
        keep = FORGET**new_tried * FORGET_UNTRIED ** (steps - reached)
        self._row_tried = self._row_tried * keep + new_tried
        self._row_right = self._row_right * keep + new_right
        all_tried, num_steps = new_tried.sum(0), float(steps.max())
        keep = np.where(reached.sum(0) > 0, WORKER_FORGET**all_tried, WORKER_FORGET_UNTRIED**num_steps)
        self._tried = self._tried * keep + all_tried
        self._right = self._right * keep + new_right.sum(0)

    def drafted(self, num_drafts: Sequence[int], elapsed_ns: int) -> None:
        """The model took so long to draft so many tokens for each of its rows."""
        if num_drafts and max(num_drafts) > 0:
            self.costs.drafted(len(num_drafts), max(num_drafts), elapsed_ns)

    # ---- what to do ----

    def choose(self, rows: Sequence[RowState], available: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Per row (source, number of drafts)."""
        self._num_steps += 1
        strangers = [row for row in rows if row.epoch not in self._plans]
        if strangers or self._num_steps >= DECIDE_EVERY:
            self._welcome(strangers)
            self._decide(rows, available)
        return [self._choice(self._plans[row.epoch], options) for row, options in zip(rows, available, strict=True)]

    def _choice(self, plan: RowPlan, options: tuple[int, int]) -> tuple[int, int]:
        """What was decided, as far as it is there; or a probe."""
        source = plan.source if options[plan.source] else 1 - plan.source
        most = min(options[source], self._max_drafts)
        wanted = min(plan.num_drafts[source], most)
        if wanted == 0 and most > 0 and plan.idle_steps >= plan.probe_after:
            wanted = 1
            plan.is_probed = True
        plan.pending = source
        return source, wanted

    def _welcome(self, strangers: Sequence[RowState]) -> None:
        """Rows of new epochs. Their drafts are as good as the others' so far."""
        if not strangers:
            return
        self._learn()
        missing = 1 + max(row.row for row in strangers) - len(self._row_tried)
        if missing > 0:
            self._row_tried, self._row_right = (
                np.pad(column, ((0, missing), (0, 0), (0, 0))) for column in (self._row_tried, self._row_right)
            )
        for row in strangers:
            self._row_tried[row.row] = self._row_right[row.row] = 0.0
            self._plans[row.epoch] = RowPlan()

    def _decide(self, rows: Sequence[RowState], available: Sequence[tuple[int, int]]) -> None:
        """Plan the next steps of these rows."""
        self._num_steps = 0
        self._learn()
        if not rows:
            return
        plans = [self._plans[row.epoch] for row in rows]
        index = np.array([row.row for row in rows], np.int64)
        most = np.minimum(np.array(available, np.int64), self._max_drafts)
        if not most.any():
            return
        source, reached = self._sources(index, most)
        each = np.arange(len(rows))
        most = most[each, source]
        before = np.minimum(np.array([plan.num_drafts for plan in plans])[each, source], most)
        wanted = self._best(source, reached, most)
        if self._rate(wanted, source, reached) < KEEP * self._rate(before, source, reached):
            wanted = before
        for plan, kind, count, options in zip(plans, source.tolist(), wanted.tolist(), available, strict=True):
            plan.source = kind
            if options[kind]:
                plan.num_drafts[kind] = count

    def _chances(self, rows: IntArray) -> Float64Array:
        """[n, NUM_SOURCES, max_drafts] that a draft is accepted if those before it are.

        A depth of which little is known is taken to be like the one before it, in all rows as in one.
        """
        known = np.empty_like(self._tried)
        prior: Float64Array = np.array(FIRST_GUESS)
        for depth in range(known.shape[1]):
            prior = (self._right[:, depth] + FIRST_WEIGHT * prior) / (self._tried[:, depth] + FIRST_WEIGHT)
            known[:, depth] = prior
        right, tried = self._row_right[rows], self._row_tried[rows]
        first = (right[:, :, 0] + PRIOR_WEIGHT * known[:, 0]) / (tried[:, :, 0] + PRIOR_WEIGHT)
        # Of a row whose first drafts do better than others', better is expected of all.
        expected = known * (first / np.maximum(known[:, 0], 0.01))[:, :, None]
        return np.asarray((right + PRIOR_WEIGHT * np.minimum(expected, MOST_CHANCE)) / (tried + PRIOR_WEIGHT))

    def _sources(self, rows: IntArray, most: IntArray) -> tuple[IntArray, Float64Array]:
        """The better source of each row [n], and the chance that its drafts up to each are accepted [n, max_drafts]."""
        low, high = self.costs.verify_ns(np.array([float(self._num_tokens), self._num_tokens + 4.0]))
        # In tokens of this step: what verifying one more costs, and what drafting one more does.
        verify_cost = (high - low) / 4 / low * self._num_sampling
        draft_cost = self.costs.draft_ns(len(rows)) / low * self._num_sampling / len(rows)
        reached = self._chances(rows).cumprod(2)
        exists = self._depths < most[:, :, None]
        reached = np.where(exists, reached, 0.0)
        gains = np.where(exists, reached - verify_cost - np.array([0.0, draft_cost])[None, :, None], 0.0)
        value = np.maximum(gains.cumsum(2).max(2), 0.0)
        value[most == 0] = -1.0
        source = value.argmax(1)
        return source, reached[np.arange(len(rows)), source]

    def _best(self, source: IntArray, reached: Float64Array, most: IntArray) -> IntArray:
        """The number of drafts of each row that gives the most tokens per second in all."""
        row_of, depth_of = np.nonzero(self._depths < most[:, None])
        gain = reached[row_of, depth_of]
        # Chances fall with depth, so a row's drafts come in order; ties are broken by depth for the same end.
        order = np.lexsort((depth_of, -gain))
        row_of, depth_of, gain = row_of[order], depth_of[order], gain[order]
        by_model = source[row_of] == MODEL
        depth = np.maximum.accumulate(np.where(by_model, depth_of + 1, 0))
        num_model_rows = np.cumsum(by_model & (depth_of == 0))
        tokens = self._num_sampling + np.concatenate(([0.0], np.cumsum(gain)))
        elapsed = self.costs.verify_ns(self._num_tokens + np.arange(len(gain) + 1, dtype=np.float64))
        elapsed[1:] += depth * self._draft_ns(num_model_rows)
        kept = int((tokens / elapsed).argmax())
        return np.bincount(row_of[:kept], minlength=len(reached))

    def _draft_ns(self, num_rows: IntArray) -> Float64Array:
        """Of one draft for each of so many rows, [n]; 0 for none."""
        sizes = np.frexp(num_rows)[1]  # numbers of one length in binary cost the same
        by_size = [0.0, *(self.costs.draft_ns(1 << size) for size in range(int(sizes.max(initial=0))))]
        return np.array(by_size)[sizes]

    def _rate(self, wanted: IntArray, source: IntArray, reached: Float64Array) -> float:
        """Tokens per nanosecond with so many drafts for each row."""
        tokens = self._num_sampling + float(reached[self._depths < wanted[:, None]].sum())
        by_model = wanted[source == MODEL]
        elapsed = float(self.costs.verify_ns(np.array([float(self._num_tokens + wanted.sum())]))[0])
        if by_model.any():
            elapsed += int(by_model.max()) * self.costs.draft_ns(int((by_model > 0).sum()))
        return tokens / elapsed
