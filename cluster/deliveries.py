"""Puts the numbered deliveries of one scheduler life in order.

Calls of one sender to an asynchronous actor may start in any order; each carries a number that
counts from 0. Knows nothing about what is delivered.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

Delivery = TypeVar("Delivery")


class InOrder(Generic[Delivery]):
    """Holds early deliveries until those before them came; drops repeats."""

    def __init__(self) -> None:
        self._next_seq = 0
        self._early: dict[int, Delivery] = {}

    @property
    def waits(self) -> bool:
        """Something came whose predecessor did not."""
        return bool(self._early)

    def accept(self, seq: int, delivery: Delivery) -> Iterator[Delivery]:
        """Everything that is next in line now. Exhaust it before the next call."""
        if seq >= self._next_seq:
            self._early.setdefault(seq, delivery)
        return self._ready()

    def skip_gap(self) -> Iterator[Delivery]:
        """Gives up on what is missing before the earliest delivery held."""
        if self._early:
            self._next_seq = min(self._early)
        return self._ready()

    def _ready(self) -> Iterator[Delivery]:
        while self._next_seq in self._early:
            self._next_seq += 1
            yield self._early.pop(self._next_seq - 1)
