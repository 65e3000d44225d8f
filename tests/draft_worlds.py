"""Machines of known costs, drafters of known quality, requests that come and go: what a choice of K is worth on them.

Everything follows from a seed; time is what the world says a step takes, never a clock's.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.test_worker_drafter import row_of
from worker.adaptive import AdaptiveDrafts
from worker.batch import Batch
from worker.drafter import VerifiedStep
from worker.fingerprint import make_batch
from worker.frames import Frame
from worker.mixture import LOOKUP, MODEL
from worker.rows import RowState
from worker.step_costs import StepCosts

NO_BATCH: Batch = make_batch([([0], 0, [0])], 16)
# Milliseconds by tokens: a small model on a CPU, a machine on which every token counts, and one between them.
FLAT = {1: 15.8, 4: 16.0, 5: 18.0, 8: 19.1, 16: 22.8, 64: 47.7, 128: 85.0, 512: 315.0}
STEEP = {1: 10.0, 4: 30.0, 8: 55.0, 16: 105.0, 64: 405.0, 128: 805.0, 512: 3205.0}
MIDDLE = {1: 10.0, 8: 20.0, 64: 110.0, 512: 830.0}
HEAD = 1.0  # milliseconds of one draft of each row
SURE, LOST = 0.97, 0.1  # chances of the drafts of a drafter that knows which of its drafts are good

Quality = tuple[float, ...]  # chance at each depth if those before were right; deeper: the last
Source = Callable[[int], Quality | None]  # by step; None: no drafts
Choice = list[tuple[int, int]]


def always(quality: Quality) -> Source:
    """The same in every step."""
    return lambda step: quality


def nothing(step: int) -> None:
    """No drafts."""


def steady(step: int) -> float:
    """A machine that nobody else uses."""
    return 1.0


@dataclass(slots=True, eq=False)
class Seat:
    """One row and the request in it."""

    row: RowState
    num_outputs: int = 0
    pending: list[float] = field(default_factory=list)  # chances of the drafts to verify
    found: list[float] = field(default_factory=list)  # chances of what lookup finds now
    length: int = 2  # of its match


@dataclass(slots=True, eq=False)
class World:
    """Rows that decode for ever, or requests of some length one after the other."""

    costs: dict[int, float]
    num_rows: int
    lookup: Source = nothing
    model: Source = nothing
    request_tokens: int = 1 << 30  # outputs of one request
    copies_from: int = 0  # output from which lookup finds anything
    found_share: float = 1.0  # of the steps from then on
    tells: bool = False  # match lengths and certainties say which drafts are good
    slowness: Callable[[int], float] = steady  # of everything, by step
    noise: float = 0.05
    max_drafts: int = 8
    seed: int = 0
    ms: float = 0.0
    tokens: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    asleep: list[bool] = field(default_factory=list)  # the model, by step
    lookup_asleep: list[bool] = field(default_factory=list)

    def run(self, fixed: tuple[int, int] | None, num_steps: int = 1000) -> "World":
        """fixed: source and K of every row and step; None: adaptive. Lookup comes first in a fixed mixture (2, K)."""
        rng = random.Random(self.seed)
        policy = AdaptiveDrafts(StepCosts({n: 1e6 * ms for n, ms in self.costs.items()}), self.max_drafts)
        seats = [Seat(dataclasses.replace(row_of(1, 2, 3), row=i, epoch=1 + i)) for i in range(self.num_rows)]
        self.ms, self.tokens = 0.0, 0.0
        self.choices, self.asleep, self.lookup_asleep = [], [], []
        for step in range(num_steps):
            verified = self._verify(rng, seats, step)
            if fixed is None:
                policy.observe(verified)
            self._begin_anew(policy, seats)
            for seat in seats:
                self._look_up(rng, seat, step)
                if fixed is None and policy.sleeps[LOOKUP]:
                    seat.found = []
            self._draft(rng, policy, seats, step, fixed)
        return self

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms

    def _verify(self, rng: random.Random, seats: Sequence[Seat], step: int) -> VerifiedStep:
        frames = []
        for seat in seats:
            count = len(seat.pending)
            accepted = next((i for i, chance in enumerate(seat.pending) if rng.random() >= chance), count)
            seat.num_outputs += 1 + accepted
            self.tokens += 1 + accepted
            frame = Frame(
                index=0, row=seat.row, start=0, stop=1 + count, draft_token_ids=[0] * count, samples=True,
                num_propose=self.max_drafts,
            )  # fmt: skip
            frame.token_ids = [0] * (1 + accepted)
            frames.append(frame)
        num_tokens = len(seats) + sum(len(seat.pending) for seat in seats)
        ms = float(np.interp(num_tokens, [*self.costs], [*self.costs.values()])) * self._slow(rng, step)
        self.ms += ms
        return VerifiedStep(frames=frames, batch=NO_BATCH, states=torch.empty(0), verify_ns=int(ms * 1e6))

    def _slow(self, rng: random.Random, step: int) -> float:
        return self.slowness(step) * rng.lognormvariate(0.0, self.noise)

    def _begin_anew(self, policy: AdaptiveDrafts, seats: Sequence[Seat]) -> None:
        for seat in seats:
            if seat.num_outputs >= self.request_tokens:
                policy.forget(seat.row.epoch)
                seat.row = dataclasses.replace(seat.row, epoch=seat.row.epoch + self.num_rows)
                seat.num_outputs = 0

    def _look_up(self, rng: random.Random, seat: Seat, step: int) -> None:
        quality = self.lookup(step)
        seat.found = []
        if quality is None or seat.num_outputs < self.copies_from or rng.random() >= self.found_share:
            return
        seat.found = self._chances(rng, quality, one_draw=True)
        seat.length = 20 if seat.found[0] == SURE else 2

    def _chances(self, rng: random.Random, quality: Quality, *, one_draw: bool) -> list[float]:
        """Of drafts: their quality, or for a drafter that knows it, sure or lost with the same mean."""
        mean = [quality[min(depth, len(quality) - 1)] for depth in range(self.max_drafts)]
        if not self.tells:
            return mean
        draws = [rng.random()] * self.max_drafts if one_draw else [rng.random() for _ in mean]
        return [SURE if draw < (m - LOST) / (SURE - LOST) else LOST for draw, m in zip(draws, mean, strict=True)]

    def _draft(
        self, rng: random.Random, policy: AdaptiveDrafts, seats: Sequence[Seat], step: int,
        fixed: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        quality = self.model(step)
        self.asleep.append(policy.sleeps[MODEL])
        self.lookup_asleep.append(policy.sleeps[LOOKUP])
        if fixed is None and policy.sleeps[MODEL]:
            quality = None
        available = [(len(seat.found), 0 if quality is None else self.max_drafts) for seat in seats]
        if fixed is None and all(policy.sleeps):
            choice = [(MODEL, 0)] * len(seats)
        elif fixed is None:
            rows = [seat.row for seat in seats]
            choice = policy.choose(rows, available, [seat.length if seat.found else 0 for seat in seats])
        else:
            choice = [_fixed(fixed, options) for options in available]
        self.choices.append(choice)
        asked = []
        for seat, (source, count) in zip(seats, choice, strict=True):
            seat.pending = seat.found[:count] if source == LOOKUP else []
            if source == MODEL and count and quality is not None:
                asked.append((seat, count, self._chances(rng, quality, one_draw=False)))
        if asked:
            deepest = self._ask(policy, asked, judged=fixed is None)
            ms = deepest * HEAD * self._slow(rng, step)
            self.ms += ms
            if fixed is None:
                policy.drafted([len(seat.pending) for seat, _, _ in asked], int(ms * 1e6))

    def _ask(self, policy: AdaptiveDrafts, asked: list[tuple[Seat, int, list[float]]], *, judged: bool) -> int:
        """Draft depth by depth as a head does; the number of depths."""
        depth = 0
        while asked:
            certainties = [chances[depth] if self.tells else 0.5 for _, _, chances in asked]
            rows = [seat.row for seat, _, _ in asked]
            verdicts = policy.judge(rows, certainties) if judged else [(True, True)] * len(asked)
            following = []
            for one, (keep, go_on) in zip(asked, verdicts, strict=True):
                seat, count, chances = one
                if keep:
                    seat.pending.append(chances[depth])
                if keep and go_on and len(seat.pending) < count:
                    following.append(one)
            asked = following
            depth += 1
        return depth


def _fixed(fixed: tuple[int, int], options: tuple[int, int]) -> tuple[int, int]:
    kind, count = fixed
    source = (LOOKUP if options[LOOKUP] else MODEL) if kind == 2 else kind
    return source, min(count, options[source])


def rates(world: World, num_steps: int = 300) -> tuple[float, float, float]:
    """Adaptive; without drafts; of the best fixed drafter and K, none included."""
    adaptive = world.run(None, num_steps).rate
    none = world.run((LOOKUP, 0), num_steps).rate
    kinds = [LOOKUP] if world.lookup(0) is not None else []
    kinds += [MODEL] if world.model(0) is not None else []
    kinds += [2] if len(kinds) == 2 else []
    fixed = [world.run((kind, k), num_steps).rate for kind in kinds for k in (1, 2, 4, 8)]
    return adaptive, none, max(fixed, default=none)
