"""The chance that a draft is accepted: from what was accepted lately at its depth, and from its drafter's own word.

By source and depth, for one row and for all of them; a drafter's word (the length of a match, the certainty of a
model) counts by how drafts of the same word did beside what their depth let expect. Knows nothing about costs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORGET: Final = 0.96  # weight of what was seen at a depth one verification before
FORGET_UNTRIED: Final = 0.97  # the same in a step that drafts less deep, or from another source
MOST_IDLE: Final = 16  # such steps of a row that are counted before they are looked at
WORKER_FORGET: Final = 0.995  # the same two of all rows together
WORKER_FORGET_UNTRIED: Final = 0.99
PRIOR_WEIGHT: Final = 10.0  # verifications that what is known of all rows counts for in one row
FIRST_GUESS: Final = (0.7, 0.6)  # chance of a first draft by lookup, by a model, before anything was seen
FIRST_WEIGHT: Final = 4.0
LEAST_CHANCE: Final = 0.005  # that is ever concluded
MOST_CHANCE: Final = 0.98
NUM_SOURCES: Final = 2
WORD_WEIGHT: Final = 4.0  # drafts of one word that the guess that it means nothing counts for
LENGTHS: Final = (3, 4, 8, 16)  # of matches, where another word begins
CERTAINTIES: Final = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
NUM_WORDS: Final = 2 + max(len(LENGTHS), len(CERTAINTIES))
NO_WORD: Final = 0

Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]


def word_of_match(length: int) -> int:
    """Of prompt lookup, which found so many tokens alike; 0: it does not say."""
    return 1 + bisect_right(LENGTHS, length) if length else NO_WORD


def word_of_certainty(probability: float) -> int:
    """Of a model whose likeliest token has this probability."""
    return 1 + bisect_right(CERTAINTIES, probability)


class Outcome(NamedTuple):
    """One verification of one row."""

    row: int
    source: int
    words: Sequence[int]  # of each draft; shorter: the others have none
    num_verified: int
    num_accepted: int
    dropped: float | None  # chance of a further draft that was made and found not worth verifying


class DraftChances:
    """Learns from outcomes; by permanent row."""

    def __init__(self, max_drafts: int) -> None:
        self._depths = np.arange(max_drafts)
        self._tried = np.zeros((NUM_SOURCES, max_drafts))  # of all rows: verifications that came to this depth
        self._right = np.zeros((NUM_SOURCES, max_drafts))  # and accepted it
        # Drafts of each word: right, wrong; and as their depths let expect.
        self._words = np.zeros((4, NUM_SOURCES, NUM_WORDS))
        self.lifts = np.zeros((NUM_SOURCES, NUM_WORDS))  # log odds that a word adds
        self.forget_rows()

    def forget_rows(self) -> None:
        """What they taught of all rows is kept."""
        shape = (0, NUM_SOURCES, len(self._depths))
        self._row_tried, self._row_right = np.zeros(shape), np.zeros(shape)
        self.chances = np.zeros(shape)  # by row: that a draft is accepted if those before it are
        self.log_odds = np.zeros(shape)  # of the same
        self._seen: list[Outcome] = []
        self._idle = np.zeros(0)  # by row: verifications without a draft since it last learned

    def seat(self, rows: Sequence[int]) -> None:
        """Requests that are new in these rows: their drafts are as good as the others' so far."""
        missing = 1 + max(rows) - len(self._row_tried)
        self.learn()
        if missing > 0:
            pad = ((0, missing), (0, 0), (0, 0))
            self._row_tried, self._row_right = np.pad(self._row_tried, pad), np.pad(self._row_right, pad)
            self._idle = np.pad(self._idle, pad[0])
        self._row_tried[rows] = self._row_right[rows] = 0.0
        self._idle[rows] = 0.0
        self._conclude()

    def note(self, outcome: Outcome) -> None:
        """Something to learn from."""
        if outcome.num_verified or outcome.dropped is not None:
            self._seen.append(outcome)
        else:
            self._idle[outcome.row] += 1.0

    def learn(self) -> None:
        """Make chances of what was noted."""
        if not self._seen and not (self._idle >= MOST_IDLE).any():
            return
        known = np.array([seen[:2] + seen[3:5] for seen in self._seen], np.int64)
        rows, source, num_verified, num_accepted = known.reshape(-1, 4).T
        verified = num_verified[:, None] > self._depths
        tried = (verified & (num_accepted[:, None] >= self._depths)).astype(float)
        right = (num_accepted[:, None] > self._depths).astype(float)
        self._learn_words(rows, source, tried, right)
        of_all = np.zeros((2, NUM_SOURCES, len(self._depths)))
        for seen in self._seen:
            # Left out, drafts that look bad would make those of their depth look good. Of a row they say nothing.
            if seen.dropped is not None and seen.num_accepted == seen.num_verified < len(self._depths):
                of_all[:, seen.source, seen.num_verified] += (1.0, seen.dropped)
        self._seen.clear()
        shape = self._row_tried.shape
        new_tried, new_right, reached, steps = (np.zeros(shape) for _ in range(4))
        np.add.at(new_tried, (rows, source), tried)
        np.add.at(new_right, (rows, source), right)
        np.add.at(reached, (rows, source), verified)
        np.add.at(steps, rows, 1.0)
        steps += self._idle[:, None, None]
        self._idle[:] = 0.0
        # What is not tried any more is slowly forgotten in a row, and taken to be like the others'.
        keep = FORGET**new_tried * FORGET_UNTRIED ** (steps - reached)
        self._row_tried = self._row_tried * keep + new_tried
        self._row_right = self._row_right * keep + new_right
        of_all += (new_tried.sum(0), new_right.sum(0))
        self._learn_of_all(of_all[0], of_all[1], float(steps.max()))
        self._conclude()

    def _learn_of_all(self, tried: Float64Array, right: Float64Array, num_steps: float) -> None:
        # Depths that a source in use does not come to are forgotten; of a source that is not in use probes tell.
        untried = WORKER_FORGET_UNTRIED**num_steps
        in_use = tried[:, :1] > 0
        keep = np.where(tried > 0, WORKER_FORGET**tried, np.where(in_use, untried, 1.0))
        self._tried = self._tried * keep + tried
        self._right = self._right * keep + right

    def _learn_words(self, rows: IntArray, source: IntArray, tried: Float64Array, right: Float64Array) -> None:
        words = np.zeros(tried.shape, np.int64)
        for index, seen in enumerate(self._seen):
            said = seen.words[: seen.num_verified]
            words[index, : len(said)] = said
        expected = self.chances[rows, source]
        parts = np.stack((right * tried, (1.0 - right) * tried, expected * tried, (1.0 - expected) * tried))
        new = np.zeros_like(self._words)
        for kind in range(len(parts)):
            np.add.at(new[kind], (source[:, None], words), parts[kind])
        self._words = self._words * WORKER_FORGET ** (new[0] + new[1]) + new
        # Beside all words together: where drafts just do better or worse than before, depths learn that.
        together = self._words.sum(2, keepdims=True) + 1.0
        total = np.repeat(together.reshape(2, 2, NUM_SOURCES, 1).sum(1), 2, axis=0)
        self.lifts = _log_odds_ratio(self._words + WORD_WEIGHT * together / total) - _log_odds_ratio(together)
        self.lifts[:, NO_WORD] = 0.0

    def _conclude(self) -> None:
        """A depth of which little is known is taken to be like the one before it, in all rows as in one."""
        known = np.empty_like(self._tried)
        prior: Float64Array = np.array(FIRST_GUESS)
        for depth in range(known.shape[1]):
            prior = (self._right[:, depth] + FIRST_WEIGHT * prior) / (self._tried[:, depth] + FIRST_WEIGHT)
            known[:, depth] = prior
        right, tried = self._row_right, self._row_tried
        first = (right[:, :, 0] + PRIOR_WEIGHT * known[:, 0]) / (tried[:, :, 0] + PRIOR_WEIGHT)
        # Of a row whose first drafts do better than others', better is expected of all.
        expected = known * (first / np.maximum(known[:, 0], 0.01))[:, :, None]
        chances = (right + PRIOR_WEIGHT * np.minimum(expected, MOST_CHANCE)) / (tried + PRIOR_WEIGHT)
        self.chances = chances.clip(LEAST_CHANCE, MOST_CHANCE)
        self.log_odds = np.log(self.chances / (1.0 - self.chances))


def _log_odds_ratio(counts: Float64Array) -> Float64Array:
    """Of what was right or wrong over what was expected to be."""
    was_right, was_wrong, as_right, as_wrong = counts
    return np.asarray(np.log(was_right / was_wrong * as_wrong / as_right))
