"""Faults on purpose between the scheduler and its workers: messages late, repeated, reordered, lost, or cut off.

For tests of a real deployment, over any transport; off by default and said in `status` when on. What is
lost is repaired by the session protocol: plans are sent again, results are answered again.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from cluster.errors import ConfigError
from scheduler.actor import WorkerPort, WorkerUnreachable
from scheduler.events import WorkerUp
from scheduler.step import StepPlan, StepResult

OVERTAKEN_S = 0.05  # a reordered message waits so long for others to pass it
DISTRIBUTIONS = {"exponential": 1, "fixed": 1, "uniform": 2}  # numbers of each


class Partition(NamedTuple):
    """A worker is cut off now and then: nothing passes either way."""

    every_s: float  # between the end of one and the beginning of the next, on average
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How bad the way between the scheduler and each worker is. Probabilities are of each message."""

    delay_ms: str | None = None  # MEAN, exponential:MEAN, fixed:MS or uniform:LOW:HIGH
    repeat: float = 0.0
    reorder: float = 0.0
    drop: float = 0.0
    partition: str | None = None  # EVERY_S:FOR_S
    seed: int = 0

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.delay_ms or self.repeat or self.reorder or self.drop or self.partition)

    def check(self) -> None:
        """ConfigError for the first value out of range."""
        for name in ("repeat", "reorder", "drop"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"--fault-{name} must be in [0, 1), got {getattr(self, name)}")
        self.parsed_delay()
        self.parsed_partition()

    def parsed_delay(self) -> tuple[str, list[float]] | None:
        """(distribution, its numbers in ms). Raises ConfigError."""
        if self.delay_ms is None:
            return None
        name, numbers = "exponential", self.delay_ms.split(":")
        if numbers[0] in DISTRIBUTIONS:
            name = numbers.pop(0)
        values = _numbers("--fault-delay-ms", self.delay_ms, numbers, DISTRIBUTIONS[name])
        return name, values

    def parsed_partition(self) -> Partition | None:
        """None without. Raises ConfigError."""
        if self.partition is None:
            return None
        every_s, for_s = _numbers("--fault-partition", self.partition, self.partition.split(":"), 2)
        if every_s <= 0:
            raise ConfigError(f"--fault-partition must be EVERY_S:FOR_S with EVERY_S above 0, got {self.partition!r}")
        return Partition(every_s, for_s)

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name in FLAGS if (value := getattr(self, name))]
        return f"faults on purpose between scheduler and workers: {', '.join(parts)}, seed {self.seed}"


FLAGS = ("delay_ms", "repeat", "reorder", "drop", "partition")


class FaultyWorkerPort:
    """A scheduler.actor.WorkerPort that loses, repeats and delays what another one carries."""

    def __init__(self, port: WorkerPort, faults: Faults, name: str) -> None:
        """`name`: of the worker; each has faults of its own."""
        self._port = port
        self._faults = faults
        self._rng = random.Random(f"{faults.seed} {name}")
        self._delay = faults.parsed_delay()
        self._cuts = _Cuts(faults.parsed_partition(), self._rng)
        self._late: list[StepResult] = []  # repeats, which arrive with a later answer

    async def register(self, session: int) -> WorkerUp:
        """As the other port, unless the worker is cut off."""
        await self._cuts.pass_or_raise()
        return await self._port.register(session)

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """The results that arrived: none for a plan or an answer that was lost."""
        answers = await asyncio.gather(*(self._exchange(plan) for _ in range(self._num_copies())))
        late, self._late = self._late, []
        results = [*chain.from_iterable(answers), *late]
        if self._rng.random() < self._faults.repeat:
            self._late.extend(results)
        return results

    async def health(self) -> int | None:
        """As the other port; while the worker is cut off there is no answer."""
        await self._cuts.over()
        return await self._port.health()

    async def restart(self) -> None:
        """As the other port."""
        await self._port.restart()

    async def prepare(self, weights: str) -> None:
        """As the other port."""
        await self._port.prepare(weights)

    async def weights(self) -> str | None:
        """As the other port."""
        return await self._port.weights()

    async def draft_blocks(self) -> tuple[int, int] | None:
        """As the other port."""
        return await self._port.draft_blocks()

    async def _exchange(self, plan: StepPlan) -> Sequence[StepResult]:
        await asyncio.sleep(self._way_s())
        if self._cuts.now():
            return ()
        results = await self._port.step(plan)
        await asyncio.sleep(self._way_s())
        return () if self._cuts.now() or self._rng.random() < self._faults.drop else results

    def _num_copies(self) -> int:
        """Of a plan that arrive."""
        if self._rng.random() < self._faults.drop:
            return 0
        return 1 + (self._rng.random() < self._faults.repeat)

    def _way_s(self) -> float:
        """How long a message is under way."""
        return self._delay_ms() / 1000.0 + OVERTAKEN_S * (self._rng.random() < self._faults.reorder)

    def _delay_ms(self) -> float:
        match self._delay:
            case ("exponential", [mean_ms]):
                return mean_ms * self._rng.expovariate(1.0)
            case ("fixed", [delay_ms]):
                return delay_ms
            case ("uniform", [low_ms, high_ms]):
                return self._rng.uniform(low_ms, high_ms)
            case _:
                return 0.0


class _Cuts:
    """When one worker is cut off."""

    def __init__(self, partition: Partition | None, rng: random.Random) -> None:
        self._partition = partition
        self._rng = rng
        self._begins_s: float | None = None  # of the next, or of the one there is

    def now(self) -> bool:
        """Whether it is."""
        return self._left_s() > 0.0

    async def over(self) -> None:
        """Returns when it is not."""
        await asyncio.sleep(self._left_s())

    async def pass_or_raise(self) -> None:
        """Raises WorkerUnreachable once a cut is over: that is when one hears of it."""
        if self.now():
            await self.over()
            raise WorkerUnreachable("the worker was cut off, on purpose")

    def _left_s(self) -> float:
        """Until it is over; 0 between two."""
        if self._partition is None:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        if self._begins_s is None:
            self._begins_s = now_s + self._gap_s(self._partition)
        while self._begins_s + self._partition.for_s <= now_s:
            self._begins_s += self._partition.for_s + self._gap_s(self._partition)
        return self._begins_s + self._partition.for_s - now_s if self._begins_s <= now_s else 0.0

    def _gap_s(self, partition: Partition) -> float:
        return self._rng.expovariate(1.0 / partition.every_s)


def _numbers(flag: str, text: str, parts: Sequence[str], count: int) -> list[float]:
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is not made of numbers and colons") from error
    if len(numbers) != count or not all(0.0 <= number < float("inf") for number in numbers):
        raise ConfigError(f"{flag}: {text!r} needs {count} numbers of at least 0, separated by colons")
    return numbers


def stress_faults(wished: Mapping[str, bool], seed: int) -> Faults:
    """Bad enough to show, not so bad that nothing gets through. A partition outlasts the patience with a worker."""
    return Faults(
        delay_ms="10" if wished["delay"] else None,
        repeat=0.1 if wished["repeat"] else 0.0,
        reorder=0.1 if wished["reorder"] else 0.0,
        drop=0.02 if wished["drop"] else 0.0,
        partition="20:4" if wished["partition"] else None,
        seed=seed,
    )
