"""Adaptive K against machines and drafters of known cost and quality."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.test_worker_drafter import row_of
from tests.worlds import with_pool
from worker.adaptive import AdaptiveDrafts
from worker.batch import Batch
from worker.drafter import VerifiedStep
from worker.fingerprint import make_batch
from worker.frames import Frame
from worker.mixture import LOOKUP, MODEL
from worker.model import ModelConfig, random_model
from worker.step_costs import StepCosts, measure_costs


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NO_BATCH: Batch = make_batch([([0], 0, [0])], 16)
# Milliseconds by tokens: a small model on a CPU, and a machine on which every token counts.
FLAT = {1: 15.8, 4: 16.0, 5: 18.0, 8: 19.1, 16: 22.8, 64: 47.7, 128: 85.0, 512: 315.0}
STEEP = {1: 10.0, 4: 30.0, 8: 55.0, 16: 105.0, 64: 405.0, 128: 805.0, 512: 3205.0}
MIDDLE = {1: 10.0, 8: 20.0, 64: 110.0, 512: 830.0}
HEAD = 1.0  # milliseconds of one draft of each row
GOOD, FAIR, BAD = (0.9, 0.9, 0.9, 0.9), (0.57, 0.5, 0.5, 0.4), (0.05, 0.0, 0.0, 0.0)

Quality = Sequence[float]  # chance at each depth, if those before were right


@dataclass(slots=True, eq=False)
class World:
    """Rows that decode for ever on a machine of known costs."""

    costs: dict[int, float]
    num_rows: int
    lookup: Callable[[int], Quality | None]  # by step; None: finds nothing
    model: Callable[[int], Quality]
    noise: float = 0.05
    seed: int = 0
    ms: float = 0.0
    tokens: float = 0.0
    choices: list[list[tuple[int, int]]] = field(default_factory=list)

    def run(self, choose: Callable[[int], list[tuple[int, int]]] | None, num_steps: int = 300) -> "World":
        """choose: fixed choices by step; None: adaptive."""
        rng = random.Random(self.seed)
        rows = [dataclasses.replace(row_of(1, 2, 3), row=index, epoch=1 + index) for index in range(self.num_rows)]
        policy = AdaptiveDrafts(StepCosts({n: 1e6 * ms for n, ms in self.costs.items()}), 4)
        pending: list[tuple[int, int]] = [(LOOKUP, 0)] * self.num_rows
        self.ms = self.tokens = 0.0
        self.choices = []
        sizes, costs = np.array([*self.costs]), np.array([*self.costs.values()])
        for step in range(num_steps):
            frames = []
            num_tokens = sum(1 + count for _, count in pending)
            for row, (source, count) in zip(rows, pending, strict=True):
                accepted = self._accepted(rng, source, count, step)
                self.tokens += 1 + accepted
                frame = Frame(
                    index=0, row=row, start=0, stop=1 + count, draft_token_ids=[0] * count, samples=True, num_propose=4
                )
                frame.token_ids = [0] * (1 + accepted)
                frames.append(frame)
            ms = float(np.interp(num_tokens, sizes, costs)) * rng.lognormvariate(0.0, self.noise)
            self.ms += ms
            policy.observe(VerifiedStep(frames=frames, batch=NO_BATCH, states=torch.empty(0), verify_ns=int(ms * 1e6)))
            found = 0 if self.lookup(step) is None else 4
            pending = policy.choose(rows, [(found, 4)] * self.num_rows) if choose is None else choose(step)
            self.choices.append(pending)
            drafts = [count for source, count in pending if source == MODEL and count]
            if drafts:
                self.ms += max(drafts) * HEAD
                policy.drafted(drafts, int(max(drafts) * HEAD * 1e6))
        return self

    def _accepted(self, rng: random.Random, source: int, count: int, step: int) -> int:
        quality = (self.lookup(step) if source == LOOKUP else self.model(step)) or BAD
        accepted = 0
        while accepted < count and rng.random() < quality[accepted]:
            accepted += 1
        return accepted

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def rates(world: World) -> tuple[float, float, float]:
    """Adaptive; without drafts; of the best fixed source and K."""
    adaptive = world.run(None).rate
    none = world.run(lambda step: [(LOOKUP, 0)] * world.num_rows).rate
    fixed = [
        world.run(lambda step, source=source, k=k: [(source, k)] * world.num_rows).rate  # type: ignore[misc]
        for source in ((MODEL,) if world.lookup(0) is None else (LOOKUP, MODEL))
        for k in (1, 2, 4)
    ]
    return adaptive, none, max(fixed)


@pytest.mark.parametrize("num_rows", [1, 4, 32])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("model", [GOOD, FAIR, BAD], ids=["good", "fair", "bad"])
def test_never_slower_than_without_drafts_and_close_to_the_best_fixed_choice(
    num_rows: int, costs: dict[int, float], model: Quality
) -> None:
    world = World(costs=costs, num_rows=num_rows, lookup=lambda step: None, model=lambda step: model)
    adaptive, none, best = rates(world)
    assert adaptive > 0.98 * none
    assert adaptive > 0.95 * max(best, none)


def test_the_better_source_drafts() -> None:
    copies = World(costs=FLAT, num_rows=2, lookup=lambda step: GOOD, model=lambda step: FAIR).run(None)
    assert sum(source == LOOKUP for choice in copies.choices[50:] for source, _ in choice) > 400
    chat = World(costs=FLAT, num_rows=2, lookup=lambda step: BAD, model=lambda step: FAIR).run(None)
    assert sum(source == MODEL for choice in chat.choices[50:] for source, _ in choice) > 400


def test_a_bad_patch_is_not_for_ever() -> None:
    world = World(
        costs=MIDDLE,
        num_rows=1,
        lookup=lambda step: None,
        model=lambda step: GOOD if step < 60 or step >= 300 else BAD,
    ).run(None, 500)
    counts = [choice[0][1] for choice in world.choices]
    assert np.mean(counts[20:60]) >= 2
    assert np.mean(counts[150:300]) < 0.2
    assert np.mean(counts[440:]) >= 2


def test_where_drafts_neither_help_nor_hurt_the_choice_does_not_flap() -> None:
    even = (0.22, 0.1, 0.1, 0.1)
    world = World(costs=FLAT, num_rows=8, lookup=lambda step: None, model=lambda step: even).run(None, 600)
    totals = [sum(count for _, count in choice) > 8 for choice in world.choices[100:]]
    assert sum(a != b for a, b in itertools.pairwise(totals)) < 25


def test_probes_are_rare() -> None:
    world = World(costs=STEEP, num_rows=1, lookup=lambda step: None, model=lambda step: BAD).run(None, 1000)
    assert 1 <= sum(choice[0][1] for choice in world.choices[200:]) <= 8


def test_each_row_gets_what_its_own_drafts_are_worth() -> None:
    policy = AdaptiveDrafts(StepCosts({n: 1e6 * ms for n, ms in FLAT.items()}), 4)
    rows = [dataclasses.replace(row_of(1, 2, 3), row=index, epoch=1 + index) for index in range(2)]
    chosen = policy.choose(rows, [(0, 4), (0, 4)])
    for _ in range(60):
        frames = []
        for row, (_, count), is_good in zip(rows, chosen, (True, False), strict=True):
            frame = Frame(
                index=0, row=row, start=0, stop=1 + count, draft_token_ids=[0] * count, samples=True, num_propose=4
            )
            frame.token_ids = [0] * (1 + count * is_good)
            frames.append(frame)
        policy.observe(VerifiedStep(frames=frames, batch=NO_BATCH, states=torch.empty(0), verify_ns=18_000_000))
        chosen = policy.choose(rows, [(0, 4), (0, 4)])
    assert chosen[0][1] == 4
    assert chosen[1][1] <= 2  # what is known of all rows leaves it some hope


# ---- costs ----


def test_costs_are_measured_on_the_model_and_leave_the_pool_empty() -> None:
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32
    )
    model = with_pool(random_model(config, seed=0, dtype=torch.float32, num_blocks=1, block_size=16), 16, 8)
    costs = measure_costs(model, 64)
    assert list(costs) == [1, 4, 5, 8]
    assert all(cost > 0 for cost in costs.values())
    assert not model.kv_cache.key.any()
    assert not model.kv_cache.value.any()


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts({1: 100.0, 8: 120.0, 16: 150.0})
    assert costs.verify_ns(np.array([1.0, 12.0, 32.0])).tolist() == [100.0, 135.0, 210.0]
    for _ in range(200):  # everything takes twice as long today, and 8 tokens three times
        costs.verified(1, 200)
        costs.verified(8, 360)
    one, eight = costs.verify_ns(np.array([1.0, 8.0]))
    assert one == pytest.approx(200, rel=0.1)
    assert eight == pytest.approx(360, rel=0.1)


def test_drafting_costs_are_those_of_the_nearest_number_of_rows() -> None:
    costs = StepCosts({1: 1000.0})
    assert costs.draft_ns(4) == 100.0
    costs.drafted(1, 4, 400)
    costs.drafted(16, 2, 600)
    assert (costs.draft_ns(1), costs.draft_ns(2), costs.draft_ns(30)) == (100.0, 100.0, 300.0)
