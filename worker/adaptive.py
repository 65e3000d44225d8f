"""How many drafts each row gets: as many as pay, none included.

In each step the drafts of all rows are ranked by the chance that they are accepted, and as many are made as
bring more tokens than their time is worth, at the rate at which tokens come now. While a model drafts, it is asked
to stop where its certainty says so. What is not drafted is probed from a budget: a share of the time, and what
probes bring. A source that brings next to nothing sleeps for a while (worker.rest), so that nobody pays for asking.
A policy: it never changes a stream, only when its tokens come.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from worker.draft_chances import (
    NUM_SOURCES,
    DraftChances,
    Float64Array,
    IntArray,
    Outcome,
    word_of_certainty,
    word_of_match,
)
from worker.drafter import VerifiedStep
from worker.mixture import LOOKUP, MODEL
from worker.rest import Rest
from worker.rows import RowState
from worker.step_costs import StepCosts

LEARN_EVERY: Final = 4  # steps
MORE: Final = 0.02  # more drafts are made for a gain of 2 %, not for noise
LESS: Final = 0.004  # fewer for this one: what is lost to drafts is lost to someone who could do without
RATE_FORGET: Final = 0.97  # of what one step says of tokens per time
PROBE_SHARE: Final = 0.006  # of the time
UNDECIDED: Final = -1
PROBE_AFTER: Final = 8  # steps without a draft of a source before one is tried


@dataclass(slots=True, eq=False)
class RowPlan:
    """What was decided for one epoch."""

    num_drafts: list[int] = field(default_factory=lambda: [UNDECIDED] * NUM_SOURCES)  # by source
    idle_steps: list[int] = field(default_factory=lambda: [0] * NUM_SOURCES)  # since a draft of it was verified
    source: int = MODEL  # of the drafts to verify next
    words: list[int] = field(default_factory=list)  # what was said of each of them
    reach: float = 1.0  # chance that all of them are accepted
    dropped: float | None = None  # chance of one more, which was not worth it
    is_probe: bool = False


class AdaptiveDrafts:
    """A `DraftPolicy` that weighs what drafts bring against what they cost."""

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self.costs = costs
        self._max_drafts = max_drafts
        self._depths = np.arange(max_drafts)
        self._chances = DraftChances(max_drafts)
        self._plans: dict[int, RowPlan] = {}  # by epoch
        self._num_steps = 0  # since it last learned
        self._num_tokens = 1  # of a step like the last one, drafts left out
        self._num_sampling = 1  # rows of it that return tokens
        self._tokens, self._elapsed_ns = 0.0, 0.0  # of the last steps that only decoded
        self._probe_ns = 0.0  # budget
        self._rests = (
            # LOOKUP: what it takes to look is not charged; a copy may begin at any time.
            Rest(least_gain=0.01, first_trial=64, trial=64, first_sleep=64, most_sleep=128),
            # MODEL: after a gap it must see states before it can draft.
            Rest(least_gain=0.0, first_trial=256, trial=32, first_sleep=96, most_sleep=768),
        )
        self._more: list[float] = [0.0]  # tokens that so many more to verify in the next step are worth
        self._num_judged = 0  # depths that a model was judged at in this step

    def begin_session(self) -> None:
        """Rows are forgotten; what they taught about drafts and costs is not."""
        self._plans.clear()
        self._chances.forget_rows()

    def forget(self, epoch: int) -> None:
        """An epoch has left this worker."""
        self._plans.pop(epoch, None)

    @property
    def sleeps(self) -> tuple[bool, ...]:
        """By source: whether it is left alone in the next step."""
        return tuple(rest.is_asleep for rest in self._rests)

    # ---- what happened ----

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step's acceptances and from its time."""
        num_tokens = num_once = num_sampling = num_outputs = 0
        num_drafts, num_accepted = [0] * NUM_SOURCES, [0] * NUM_SOURCES
        is_decode, rests = True, all(self.sleeps)
        for frame in step.frames:
            count, num_verified = frame.stop - frame.start, len(frame.draft_token_ids)
            num_tokens += count
            # Else a prompt, or the last piece of one.
            is_decode &= bool(frame.token_ids) and count == 1 + num_verified
            if frame.token_ids:
                num_once += count - 1
                num_sampling += 1
                num_outputs += len(frame.token_ids)
                plan = None if rests and not num_verified else self._plans.get(frame.row.epoch)
                if plan is not None:
                    self._note(plan, frame.row.row, num_verified, len(frame.token_ids) - 1)
                    num_drafts[plan.source] += num_verified
                    num_accepted[plan.source] += len(frame.token_ids) - 1
        if num_sampling:
            self._num_sampling = num_sampling
            self._num_tokens = num_tokens - num_once
            if is_decode:
                self.costs.verified(num_tokens, step.verify_ns)
                self._tokens = RATE_FORGET * self._tokens + num_outputs
                self._elapsed_ns = RATE_FORGET * self._elapsed_ns + step.verify_ns
                self._probe_ns = min(self._probe_ns + PROBE_SHARE * step.verify_ns, step.verify_ns)
                self._charge(num_drafts, num_accepted)
                for rest in self._rests:
                    rest.step(num_sampling, num_outputs)

    def _charge(self, num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None:
        """What each source brought, for its share of the time that verifying drafts took."""
        if not any(num_drafts):
            return
        bare, full = self.costs.verify_ns(self._num_tokens + np.array([0.0, float(sum(num_drafts))])).tolist()
        each = self._rate() * (full - bare) / sum(num_drafts)
        for rest, drafted, accepted in zip(self._rests, num_drafts, num_accepted, strict=True):
            rest.brought(accepted - each * drafted)

    def _note(self, plan: RowPlan, row: int, num_verified: int, num_accepted: int) -> None:
        dropped = plan.dropped if num_verified == len(plan.words) else None
        self._chances.note(Outcome(row, plan.source, plan.words, num_verified, num_accepted, dropped))
        for source in range(NUM_SOURCES):
            plan.idle_steps[source] += 1
        if num_verified:
            plan.idle_steps[plan.source] = 0
            if plan.is_probe:
                self._probe_ns += num_accepted / self._rate()
        plan.is_probe = False

    def drafted(self, num_drafts: Sequence[int], elapsed_ns: int) -> None:
        """The model took so long to draft so many tokens for each of its rows; none: to keep up with them."""
        self._rests[MODEL].brought(-self._rate() * elapsed_ns)
        depth = max(self._num_judged, *num_drafts) if num_drafts else 0
        if depth > 0:
            self.costs.drafted(len(num_drafts), depth, elapsed_ns)
            self._elapsed_ns += elapsed_ns

    def _rate(self) -> float:
        """Tokens per nanosecond: what time is worth."""
        if self._elapsed_ns:
            return self._tokens / self._elapsed_ns
        return self._num_sampling / float(self.costs.verify_ns(np.array([float(self._num_tokens)]))[0])

    # ---- what to do ----

    def choose(
        self, rows: Sequence[RowState], available: Sequence[tuple[int, int]], match_lengths: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Per row (source, number of drafts)."""
        self._num_judged = 0
        self._welcome(rows)
        self._num_steps += 1
        if self._num_steps >= LEARN_EVERY:
            self._num_steps = 0
            self._chances.learn()
        plans = [self._plans[row.epoch] for row in rows]
        words = [word_of_match(length) for length in match_lengths]
        chosen = self._decide(rows, plans, available, words) if any(map(any, available)) else [(MODEL, 0)] * len(rows)
        for plan, word, (source, count) in zip(plans, words, chosen, strict=True):
            plan.source, plan.reach, plan.dropped = source, 1.0, None
            plan.words = [word] * count if source == LOOKUP else []
        return chosen

    def _welcome(self, rows: Sequence[RowState]) -> None:
        strangers = [row for row in rows if row.epoch not in self._plans]
        if strangers:
            self._chances.seat([row.row for row in strangers])
            for row in strangers:
                self._plans[row.epoch] = RowPlan()

    def _decide(
        self, rows: Sequence[RowState], plans: Sequence[RowPlan], available: Sequence[tuple[int, int]],
        words: Sequence[int],
    ) -> list[tuple[int, int]]:  # fmt: skip
        offered = [index for index, most in enumerate(available) if any(most)]
        chosen = [(MODEL, 0)] * len(rows)
        index, each = np.array([rows[i].row for i in offered], np.int64), np.arange(len(offered))
        options = np.minimum(np.array([available[i] for i in offered], np.int64), self._max_drafts)  # [n, NUM_SOURCES]
        log_odds = self._chances.log_odds[index]
        log_odds[:, LOOKUP] += self._chances.lifts[LOOKUP, [words[i] for i in offered]][:, None]
        reached = (1.0 / (1.0 + np.exp(-log_odds))).cumprod(2)
        reached[self._depths >= options[:, :, None]] = 0.0
        rate = self._rate()
        sizes = self._num_tokens + np.arange(1.0 + len(rows) * self._max_drafts)
        verify_ns = self.costs.verify_ns(sizes)
        worth: Float64Array = rate * (verify_ns - verify_ns[0])
        self._more = worth.tolist()
        values = self._values(reached, options, rate)
        source = values.argmax(1)
        reached = reached[each, source]
        most = options[each, source]
        wanted = self._best(source, reached, most, worth, rate)
        before = np.array([plans[i].num_drafts for i in offered])[each, source]
        before = np.where(before == UNDECIDED, wanted, np.minimum(before, most))
        gain = self._value(wanted, source, reached, worth, rate) - self._value(before, source, reached, worth, rate)
        if gain < (MORE if wanted.sum() > before.sum() else LESS) * np.count_nonzero(wanted != before):
            wanted = before
        for i, kind, count in zip(offered, source.tolist(), wanted.tolist(), strict=True):
            chosen[i] = kind, count
            plans[i].num_drafts[kind] = count
        self._probe(plans, available, chosen, dict(zip(offered, values.tolist(), strict=True)), rate)
        return chosen

    def _values(self, reached: Float64Array, options: IntArray, rate: float) -> Float64Array:
        """Tokens that the best number of drafts of each source is worth to a row, on average: [n, NUM_SOURCES]."""
        num_rows = len(reached)
        verify_cost = self._more[num_rows * self._max_drafts] / (num_rows * self._max_drafts)
        draft_cost = rate * self.costs.draft_ns(num_rows) / num_rows
        gains = reached - verify_cost - np.array([0.0, draft_cost])[:, None]
        values = np.maximum(gains.cumsum(2).max(2), 0.0)
        values[options == 0] = -1.0
        return np.asarray(values)

    def _best(
        self, source: IntArray, reached: Float64Array, most: IntArray, worth: Float64Array, rate: float
    ) -> IntArray:
        """The number of drafts of each row that brings the most tokens beyond what its time is worth."""
        row_of, depth_of = np.nonzero(self._depths < most[:, None])
        gain = reached[row_of, depth_of]
        # Chances fall with depth, so a row's drafts come in order; ties are broken by depth for the same end.
        order = np.lexsort((depth_of, -gain))
        row_of, depth_of, gain = row_of[order], depth_of[order], gain[order]
        value = np.concatenate(([0.0], np.cumsum(gain))) - worth[: len(gain) + 1]
        by_model = source[row_of] == MODEL
        if by_model.any():
            depth = np.maximum.accumulate(np.where(by_model, depth_of + 1, 0))
            num_model_rows = np.cumsum(by_model & (depth_of == 0))
            value[1:] -= rate * depth * self._draft_ns(num_model_rows)
        return np.bincount(row_of[: int(value.argmax())], minlength=len(reached))

    def _draft_ns(self, num_rows: IntArray) -> Float64Array:
        """Of one draft for each of so many rows, [n]; 0 for none."""
        sizes = np.frexp(num_rows)[1]  # numbers of one length in binary cost the same
        by_size = [0.0, *(self.costs.draft_ns(1 << size >> 1) for size in range(1, 1 + int(sizes.max(initial=0))))]
        return np.array(by_size)[sizes]

    def _value(
        self, wanted: IntArray, source: IntArray, reached: Float64Array, worth: Float64Array, rate: float
    ) -> float:
        """Tokens that so many drafts bring beyond what their time is worth."""
        value = float(reached[self._depths < wanted[:, None]].sum() - worth[int(wanted.sum())])
        by_model = wanted[source == MODEL]
        if by_model.any():
            value -= rate * int(by_model.max()) * self.costs.draft_ns(int((by_model > 0).sum()))
        return value

    def _probe(
        self, plans: Sequence[RowPlan], available: Sequence[tuple[int, int]], chosen: list[tuple[int, int]],
        values: Mapping[int, Sequence[float]], rate: float,
    ) -> None:  # fmt: skip
        """Try one draft of what was not tried for longest, if the budget has what that is expected to cost."""
        untried = [
            (plan.idle_steps[kind], index, kind)
            for index, (plan, (source, count)) in enumerate(zip(plans, chosen, strict=True))
            for kind in range(NUM_SOURCES)
            if available[index][kind] and not (kind == source and count)
        ]
        tried, index, source = max(untried, default=(0, 0, 0))
        if tried < PROBE_AFTER:
            return
        cost = self._more[1] / rate + (self.costs.draft_ns(1) if source == MODEL else 0.0)
        if chosen[index][1]:
            cost += max(values[index][chosen[index][0]], 0.0) / rate
        if cost <= self._probe_ns:
            self._probe_ns -= cost
            chosen[index] = (source, 1)
            plans[index].is_probe = True

    # ---- while a model drafts ----

    def judge(self, rows: Sequence[RowState], certainties: Sequence[float]) -> list[tuple[bool, bool]]:
        """Of each row's newest draft: whether it is worth verifying, and whether one more is worth drafting."""
        depth, num_rows = self._num_judged, len(rows)
        self._num_judged += 1
        draft_cost = self._rate() * self.costs.draft_ns(num_rows)
        last = len(self._more) - 1
        verify = [self._more[min(num_rows * more, last)] / num_rows for more in range(depth, 1 + self._max_drafts)]
        costs = [
            verify[more] - verify[0] + max(more - 2, 0) * draft_cost / num_rows
            for more in range(1, 1 + self._max_drafts - depth)
        ]
        worth = [self._worth(row, depth, certainty, costs) for row, certainty in zip(rows, certainties, strict=True)]
        # One more draft of all rows takes as long as one of one row, nearly.
        goes_on = sum(max(more, 0.0) for _, more in worth) > draft_cost
        return [(keep, goes_on and more > 0.0) for keep, more in worth]

    def _worth(self, row: RowState, depth: int, certainty: float, costs: Sequence[float]) -> tuple[bool, float]:
        """Whether a row's newest draft is worth verifying, and tokens that those behind it are worth.

        costs: in tokens, of verifying it and none, one, ... behind it, and of drafting those past the first.
        """
        plan, word = self._plans[row.epoch], word_of_certainty(certainty)
        log_odds = self._chances.log_odds[row.row, MODEL, depth] + self._chances.lifts[MODEL, word]
        chance = 1.0 / (1.0 + math.exp(-log_odds))
        brought = following = reach = plan.reach * chance
        best = -math.inf
        for cost, next_chance in zip(costs[1:], self._chances.chances[row.row, MODEL, depth + 1 :], strict=True):
            following *= float(next_chance)
            brought += following
            best = max(best, brought - cost)
        first = reach - costs[0]
        if max(first, best) <= 0.0 and not plan.is_probe:
            plan.dropped = chance
            return False, 0.0
        plan.reach = reach
        plan.words.append(word)
        return True, best - max(first, 0.0)
