"""Several drafters behind one `propose`: prompt lookup where it finds a copy, a model otherwise.

Which of them drafts for a row, and how many tokens, is a policy's choice. Knows nothing about costs.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from worker.drafter import Drafter, Judge, VerifiedStep
from worker.rows import RowState

LOOKUP, MODEL = 0, 1  # sources of drafts


class DraftPolicy(Protocol):
    """Chooses the source and the number of each row's drafts."""

    def begin_session(self) -> None: ...

    def forget(self, epoch: int) -> None: ...

    def observe(self, step: VerifiedStep) -> None: ...

    def choose(
        self, rows: Sequence[RowState], available: Sequence[tuple[int, int]], match_lengths: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Per row (source, number of drafts), at most what is `available`: (found by lookup, left to the model).

        match_lengths: tokens that lookup found alike, 0 where it does not say.
        """
        ...

    @property
    def sleeps(self) -> Sequence[bool]:
        """By source: whether it is left alone in the next step. A model is then not shown states either."""
        ...

    @property
    def judge(self) -> Judge | None:
        """Cuts short what the model drafts for the rows it was chosen for; None: nobody does."""
        ...

    def drafted(self, num_drafts: Sequence[int], elapsed_ns: int) -> None:
        """The model took so long to draft so many tokens for each of its rows; none: to keep up with them."""
        ...


class PreferLookup:
    """As many drafts as are planned, the prompt's own words first."""

    def begin_session(self) -> None:
        """Nothing is kept."""

    def forget(self, epoch: int) -> None:
        """Nothing is kept."""

    def observe(self, step: VerifiedStep) -> None:
        """Nothing is learned."""

    judge: Judge | None = None
    sleeps: Sequence[bool] = (False, False)

    def choose(
        self, rows: Sequence[RowState], available: Sequence[tuple[int, int]], match_lengths: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Everything lookup found, or everything the model may draft."""
        return [(LOOKUP, found) if found else (MODEL, left) for found, left in available]

    def drafted(self, num_drafts: Sequence[int], elapsed_ns: int) -> None:
        """Costs do not matter."""


class MixedDrafter(Drafter):
    """Lookup, a model, or both."""

    def __init__(self, lookup: Drafter | None, model: Drafter | None, policy: DraftPolicy) -> None:
        drafters = [drafter for drafter in (lookup, model) if drafter is not None]
        if not drafters:
            raise ValueError("a mixture of no drafters")
        self.max_drafts = max(drafter.max_drafts for drafter in drafters)
        if model is not None:
            self.state_layers, self.drop_last_hit_block = model.state_layers, model.drop_last_hit_block
            model.judge = policy.judge
        self._drafters = drafters
        self._lookup, self._model, self._policy = lookup, model, policy

    @property
    def drafters(self) -> Sequence[Drafter]:
        """Those that are mixed."""
        return self._drafters

    def begin_session(self) -> None:
        """Forget every row."""
        self._policy.begin_session()
        for drafter in self._drafters:
            drafter.begin_session()

    def forget(self, epoch: int) -> None:
        """An epoch has left this worker."""
        self._policy.forget(epoch)
        for drafter in self._drafters:
            drafter.forget(epoch)

    def observe(self, step: VerifiedStep) -> None:
        """Look at a step that was verified."""
        self._policy.observe(step)
        for drafter in self._drafters:
            drafter.observe(step)

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        """Per row drafts of one source, as many as the policy wants."""
        sleeps = self._policy.sleeps
        lookup = None if sleeps[LOOKUP] else self._lookup
        model = None if sleeps[MODEL] else self._model
        drafts: list[list[int]] = [[] for _ in rows]
        lengths: Sequence[int] = [0] * len(rows)
        chosen: Sequence[tuple[int, int]] = [(MODEL, 0)] * len(rows)
        if lookup is not None:
            drafts = lookup.propose(rows, num_propose)
            lengths = lookup.match_lengths or lengths
        if lookup is not None or model is not None:
            left = [0 if model is None else min(wanted, model.max_drafts) for wanted in num_propose]
            chosen = self._policy.choose(rows, list(zip(map(len, drafts), left, strict=True)), lengths)
        asked = [index for index, (source, wanted) in enumerate(chosen) if source == MODEL and wanted > 0]
        for index, (source, wanted) in enumerate(chosen):
            drafts[index] = drafts[index][:wanted] if source == LOOKUP else []
        for index, proposed in zip(asked, self._ask(rows, asked, [chosen[i][1] for i in asked]), strict=True):
            drafts[index] = proposed
        if self._model is not None:
            self.state_layers = () if sleeps[MODEL] else self._model.state_layers
        return drafts

    def _ask(self, rows: Sequence[RowState], asked: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
        """The model's drafts. It is asked in every step, perhaps for no row: it may have KV to write."""
        if self._model is None:
            return []
        started_ns = time.perf_counter_ns()
        proposed = self._model.propose([rows[index] for index in asked], wanted)
        self._policy.drafted([len(drafts) for drafts in proposed], time.perf_counter_ns() - started_ns)
        return proposed
