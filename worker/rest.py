"""When a source of drafts is left alone for a while: what its last trial brought was not worth what it cost.

Knows nothing about why.
"""

from typing import Final

MANY_ROWS: Final = 2  # of so many rows half the steps say as much


class Rest:
    """One source's turns: a trial of some steps, then sleep if it brought too little, longer every time."""

    def __init__(
        self, *, least_gain: float, first_trial: int, trial: int, first_sleep: int, most_sleep: int
    ) -> None:  # fmt: skip
        """least_gain: of all tokens, for what is not charged. Steps, of trials with one row: the first trial and,
        after a sleep, the others; the first sleep and the longest."""
        self.is_asleep = False
        self._least_gain = least_gain
        self._first_trial, self._short_trial = first_trial, trial
        self._first_sleep, self._most_sleep = first_sleep, most_sleep
        self._trial, self._sleep = first_trial, first_sleep
        self._rows_at_sleep = 0
        self._begin()

    def _begin(self) -> None:
        self._num_steps = self._num_tokens = 0
        self._gain = 0.0

    def brought(self, gain: float) -> None:
        """So many tokens, less those that its time was worth."""
        self._gain += gain

    def step(self, num_rows: int, num_tokens: int) -> None:
        """One step of so many rows that brought so many tokens in all. A load that halves wakes: what did not pay
        then may now."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        if self.is_asleep:
            if self._num_steps < self._sleep and 2 * num_rows > self._rows_at_sleep:
                return
            self.is_asleep = False
            self._sleep = min(self._sleep * 3 // 2, self._most_sleep)
        elif self._num_steps * min(num_rows, MANY_ROWS) < self._trial:
            return
        elif self._gain > self._least_gain * self._num_tokens:
            self._trial, self._sleep = self._first_trial, self._first_sleep
        else:
            self.is_asleep, self._rows_at_sleep = True, num_rows
            self._trial = self._short_trial
        self._begin()
