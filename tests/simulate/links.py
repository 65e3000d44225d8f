"""What the network does to messages: delay, repeat, reorder, lose. Knows nothing about what they say."""

import random
from collections import Counter
from typing import NamedTuple

from tests.simulate.clock import Clock
from tests.simulate.weather import MS, Link


class Fate(NamedTuple):
    """What became of one message: the delays of the copies that arrive, and the names of what went wrong."""

    delays: list[int]
    names: tuple[str, ...]


class Links:
    """Every direction between two parties, by (what travels, with whom)."""

    def __init__(self, clock: Clock, rng: random.Random, met: Counter[str]) -> None:
        self.is_clear = False  # nothing is lost, late, repeated or reordered any more
        self._clock = clock
        self._rng = rng
        self._met = met
        self._last_delivery: dict[tuple[str, str], int] = {}

    def send(self, link: Link, name: tuple[str, str]) -> Fate:
        """Draw the fate of one message."""
        rng, now_ns = self._rng, self._clock.now_ns
        if self.is_clear:
            link = Link(mean_ns=link.mean_ns)
        if link.lost and rng.random() < link.lost:
            return self._told(name, [], ["lost"])
        names = []
        delays = [int(rng.expovariate(1.0) * link.mean_ns) + 1]
        if link.straggles and rng.random() < link.straggles:
            names.append("late")
            delays[0] += rng.randint(20, 150) * MS
        if link.repeated and rng.random() < link.repeated:
            names.append("repeated")
            delays.append(delays[0] + rng.randint(0, 60) * MS)
        last_ns = self._last_delivery.get(name, 0)
        if now_ns + delays[0] <= last_ns:
            if link.ordered:
                delays[0] = last_ns + 1 - now_ns
            else:
                names.append("reordered")
        self._last_delivery[name] = max(last_ns, now_ns + delays[0])
        return self._told(name, delays, names)

    def _told(self, name: tuple[str, str], delays: list[int], names: list[str]) -> Fate:
        if not names:
            return Fate(delays, ())
        what = tuple(f"{name[0]} {fate}" for fate in names)
        for fate in what:
            self._met[fate] += 1
        return Fate(delays, what)
