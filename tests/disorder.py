"""A schedule of messages as a bad network would have it: delayed, reordered, repeated and lost, by seed."""

import random

from cluster.engine import Message


class Disorder:
    """A `cluster.engine.Schedule`. Lost plans and results are sent again after the scheduler's patience."""

    def __init__(self, seed: int, *, delay: float = 0.4, repeat: float = 0.1, lose: float = 0.05) -> None:
        self._rng = random.Random(seed)
        self._delay = delay
        self._repeat = repeat
        self._lose = lose

    def __call__(self, under_way: list[Message]) -> list[Message]:
        """Those that arrive now, in any order."""
        arriving: list[Message] = []
        staying: list[Message] = []
        for message in under_way:
            if self._rng.random() < self._delay:
                staying.append(message)
                continue
            if self._rng.random() < self._lose:
                continue
            arriving.append(message)
            if self._rng.random() < self._repeat:
                staying.append(message)
        self._rng.shuffle(arriving)
        under_way[:] = staying
        return arriving
