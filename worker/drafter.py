"""Drafters propose tokens for the next frame of a row. Any proposal is safe: verification alone decides.

Drafters see confirmed tokens only, by true length. Knows nothing about plans or how tokens are verified.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from scheduler.step import Int32Array, Int64Array
from worker import cpu_kernels
from worker.batch import Batch
from worker.frames import Frame
from worker.rows import RowState

LONGEST_MATCH = 16  # tokens by which matches are told apart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifiedStep:
    """One forward of the target and what came of it. Rows know their new tokens already."""

    frames: Sequence[Frame]  # in the batch's order, those that failed included
    batch: Batch
    states: torch.Tensor  # [num_tokens, len(state_layers) * hidden_size] of the batch's tokens
    verify_ns: int  # the forward and sampling


class Judge(Protocol):
    """Asked by a model that drafts, of each row's newest draft."""

    def __call__(self, rows: Sequence[RowState], certainties: Sequence[float]) -> Sequence[tuple[bool, bool]]:
        """Per row (worth verifying, worth one more); certainties: the model's probability of its likeliest token."""
        ...


class Drafter(ABC):
    """Proposes the next tokens of many rows at once. In each step: `observe`, then `propose`, perhaps for no row."""

    max_drafts: int  # the most it can propose for one row
    state_layers: tuple[int, ...] = ()  # of the target: what enters them in the next step is shown to `observe`
    drop_last_hit_block: bool = False  # its KV at the end of a block depends on the token after it
    match_lengths: Sequence[int] = ()  # of the last proposal, per row, by a drafter that looks up
    judge: Judge | None = None  # whoever may cut the drafts of a model short; None: nobody
    _max_model_len: int | None = None  # no drafts at or past this position

    def _limit_drafts(self, max_drafts: int, max_model_len: int | None) -> None:
        """ValueError when it could draft nothing."""
        if max_drafts < 1:
            raise ValueError(f"num_speculative_tokens is {max_drafts}, must be at least 1")
        self.max_drafts, self._max_model_len = max_drafts, max_model_len

    def _most_drafts(self, num_tokens: int, wanted: int) -> int:
        """Of the wanted ones after so many confirmed tokens; 0 or less: none."""
        limit = min(wanted, self.max_drafts)
        return limit if self._max_model_len is None else min(limit, self._max_model_len - num_tokens)

    def _verdicts(self, rows: Sequence[RowState], logits: torch.Tensor) -> Sequence[tuple[bool, bool]]:
        """Per row whether its newest draft, made of these logits, is kept, and whether it may get one more."""
        if self.judge is None:
            return [(True, True)] * len(rows)
        certainties = (logits.max(dim=1).values - logits.logsumexp(dim=1)).exp()
        return self.judge(rows, certainties.tolist())

    def begin_session(self) -> None:  # noqa: B027  (most keep nothing)
        """Forget every row."""

    def forget(self, epoch: int) -> None:  # noqa: B027
        """An epoch has left this worker."""

    def observe(self, step: VerifiedStep) -> None:  # noqa: B027
        """Look at a step that was verified."""

    @abstractmethod
    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        """Per row at most `num_propose` tokens that may follow its confirmed ones; empty: no idea."""


def draft_tokens(
    rows: Sequence[RowState], logits: torch.Tensor, positions: Sequence[int], token_ids: Int64Array | None
) -> list[int]:
    """Each row's guess at the token of its position, by the noise that will verify it; -1 where there is none.

    logits: [len(rows), n] float32 for `token_ids` [n], or for the whole vocabulary.
    """
    host = logits.cpu().numpy()
    best = host.argmax(axis=1)
    guesses: list[int] = []
    for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
        assert row.sampler is not None
        if not row.sampler.is_plain:
            guesses.append(row.sampler.draft(host[index], position, token_ids))
        elif not np.isfinite(host[index, best[index]]):
            guesses.append(-1)
        else:
            guesses.append(int(best[index] if token_ids is None else token_ids[best[index]]))
    return guesses


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the last tokens the last time they stood in this request."""

    def __init__(
        self,
        *,
        max_drafts: int,
        prompt_lookup_min: int = 2,
        prompt_lookup_max: int = 4,
        max_model_len: int | None = None,
    ) -> None:
        """max_model_len: no drafts at or past this position. Raises ValueError naming the wrong limit."""
        self._limit_drafts(max_drafts, max_model_len)
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {prompt_lookup_min} must be in [1, prompt_lookup_max {prompt_lookup_max}]"
            )
        self.match_lengths: list[int] = []
        self._min = prompt_lookup_min
        self._max = prompt_lookup_max

    @property
    def lengths(self) -> tuple[int, int]:
        """Of the shortest and the longest copy that it looks for."""
        return self._min, self._max

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        """Per row at most `num_propose` tokens."""
        self.match_lengths = []
        return [self._propose(row.token_ids, wanted) for row, wanted in zip(rows, num_propose, strict=True)]

    def _propose(self, token_ids: Int32Array, wanted: int) -> list[int]:
        wanted = self._most_drafts(len(token_ids), wanted)
        start, length = latest_match(token_ids, self._min, self._max) if wanted > 0 else (0, 0)
        self.match_lengths.append(length)
        if not start:
            return []
        drafts: list[int] = token_ids[start : start + wanted].tolist()
        while len(drafts) < wanted:
            # A match that runs into the end goes on with its own period, as a copy in LZ77 does.
            drafts += drafts[: wanted - len(drafts)]
        return drafts


def latest_match(token_ids: Int32Array, shortest: int, longest: int) -> tuple[int, int]:
    """Where the continuation of the longest, then latest, earlier copy of the last tokens begins; and its length.

    A copy is at least `shortest` and at most `longest` tokens long and may overlap the last tokens: (0, 0) if there is
    none. The length is that of all that is alike before it, as far as LONGEST_MATCH.
    """
    start, length = cpu_kernels.latest_match(token_ids, longest, LONGEST_MATCH)
    return (start, length) if length >= shortest else (0, 0)
