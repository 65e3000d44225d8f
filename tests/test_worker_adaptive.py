"""Adaptive K against machines and drafters of known cost and quality."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from tests.draft_worlds import FLAT, MIDDLE, NO_BATCH, STEEP, Source, World, always, nothing, rates
from tests.test_worker_drafter import row_of
from tests.worlds import with_pool
from worker.adaptive import AdaptiveDrafts
from worker.draft_chances import DraftChances, Outcome, word_of_certainty, word_of_match
from worker.drafter import VerifiedStep
from worker.frames import Frame
from worker.mixture import LOOKUP, MODEL
from worker.model import ModelConfig, random_model
from worker.rest import Rest
from worker.rows import RowState
from worker.step_costs import StepCosts, measure_costs

GOOD, FAIR, BAD, COPY = (0.9,), (0.57, 0.5, 0.5, 0.4), (0.05, 0.0), (0.95,)


pytestmark = pytest.mark.usefixtures("one_thread")


def chat(costs: dict[int, float], num_rows: int, *, model: Source = nothing) -> World:
    """Answers in which lookup finds little, and that late."""
    return World(
        costs=costs, num_rows=num_rows, lookup=always((0.3, 0.5)), model=model, request_tokens=96, copies_from=10,
        found_share=0.3,
    )  # fmt: skip


def copies(costs: dict[int, float], num_rows: int, *, model: Source = nothing) -> World:
    """Answers that repeat their prompt."""
    return World(
        costs=costs, num_rows=num_rows, lookup=always(COPY), model=model, request_tokens=96, copies_from=3,
        found_share=0.9,
    )  # fmt: skip


def jumps(step: int) -> float:
    """Somebody else's work makes everything take twice as long, every other while."""
    return 2.0 if step // 80 % 2 else 1.0


WORLDS = {
    "good model, flat": World(costs=FLAT, num_rows=1, model=always(GOOD)),
    "fair model, flat, 4 rows": World(costs=FLAT, num_rows=4, model=always(FAIR)),
    "fair model, middle, 4 rows": World(costs=MIDDLE, num_rows=4, model=always(FAIR)),
    "bad model, flat": World(costs=FLAT, num_rows=1, model=always(BAD)),
    "bad model, steep, 32 rows": World(costs=STEEP, num_rows=32, model=always(BAD)),
    "good model, steep, 4 rows": World(costs=STEEP, num_rows=4, model=always(GOOD)),
    "copies, flat": copies(FLAT, 1),
    "copies, flat, 8 rows": copies(FLAT, 8),
    "copies, steep, 4 rows": copies(STEEP, 4),
    "copies beside a fair model, flat": copies(FLAT, 1, model=always(FAIR)),
    "chat, lookup alone, steep, 4 rows": chat(STEEP, 4),
    "chat beside a fair model, flat": chat(FLAT, 1, model=always(FAIR)),
    "a load that jumps, middle, 4 rows": World(
        costs=MIDDLE, num_rows=4, lookup=always((0.7,)), slowness=jumps, noise=0.15, request_tokens=96
    ),
    "a model that turns good, flat": World(
        costs=FLAT, num_rows=2, model=lambda step: GOOD if step >= 100 else BAD, request_tokens=96
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_never_slower_than_without_drafts_and_close_to_the_best_fixed_choice(name: str) -> None:
    adaptive, none, best = rates(WORLDS[name])
    assert adaptive > 0.98 * none
    assert adaptive > 0.95 * best


@pytest.mark.parametrize("source", ["lookup", "model"])
def test_a_drafter_that_knows_its_good_drafts_is_worth_more_than_any_fixed_choice(source: str) -> None:
    world = World(costs=FLAT, num_rows=4, tells=True)
    setattr(world, source, always((0.55,)))
    adaptive, _, best = rates(world)
    assert adaptive > 1.04 * best


def test_a_copy_is_drafted_from_its_first_match_on() -> None:
    """Whatever was decided where there was nothing to copy."""
    policy = AdaptiveDrafts(StepCosts({n: 1e6 * ms for n, ms in FLAT.items()}), 8)
    row = row_of(1, 2, 3)
    assert policy.choose([row], [(0, 0)], [0])[0][1] == 0
    source, count = policy.choose([row], [(8, 0)], [4])[0]
    assert source == LOOKUP
    assert count >= 3


def test_the_better_source_drafts() -> None:
    copies = World(costs=FLAT, num_rows=2, lookup=always(GOOD), model=always(FAIR)).run(None, 300)
    assert sum(source == LOOKUP for choice in copies.choices[50:] for source, _ in choice) > 400
    chat = World(costs=FLAT, num_rows=2, lookup=always(BAD), model=always(FAIR)).run(None, 300)
    assert sum(source == MODEL for choice in chat.choices[50:] for source, _ in choice) > 400


def test_a_bad_patch_is_not_for_ever() -> None:
    world = World(
        costs=MIDDLE, num_rows=1, model=lambda step: GOOD if step < 60 or step >= 300 else BAD
    ).run(None, 500)  # fmt: skip
    counts = [choice[0][1] for choice in world.choices]
    assert np.mean(counts[20:60]) >= 2
    assert np.mean(counts[150:300]) < 0.2
    assert np.mean(counts[440:]) >= 2


def test_a_model_that_brings_nothing_sleeps_longer_and_longer_and_is_tried_again() -> None:
    world = World(costs=STEEP, num_rows=8, model=always(BAD)).run(None, 1500)
    asleep = world.asleep
    sleeps = [len(list(run)) for is_asleep, run in itertools.groupby(asleep) if is_asleep]
    assert len(sleeps) >= 4
    assert sleeps[0] < sleeps[1] < sleeps[2]
    assert np.mean(asleep[300:]) > 0.75


def test_a_model_that_pays_never_sleeps_and_a_load_that_halves_wakes_one() -> None:
    assert not any(World(costs=FLAT, num_rows=2, model=always(GOOD)).run(None, 600).asleep)
    policy = AdaptiveDrafts(StepCosts({n: 1e6 * ms for n, ms in FLAT.items()}), 8)
    rows = [dataclasses.replace(row_of(1, 2, 3), row=i, epoch=1 + i) for i in range(8)]
    policy.choose(rows, [(0, 8)] * 8, [0] * 8)
    while not policy.sleeps[MODEL]:
        policy.observe(decoded([(row, 0, 0) for row in rows], 20.0))
    policy.observe(decoded([(row, 0, 0) for row in rows[:5]], 18.0))
    assert policy.sleeps[MODEL]
    policy.observe(decoded([(row, 0, 0) for row in rows[:4]], 16.0))
    assert not policy.sleeps[MODEL]


def test_lookup_that_brings_nothing_is_left_alone_most_of_the_time_and_finds_a_copy_soon() -> None:
    world = World(
        costs=STEEP, num_rows=16, lookup=lambda step: BAD if step < 600 else COPY, found_share=0.5
    ).run(None, 900)  # fmt: skip
    assert np.mean(world.lookup_asleep[200:600]) > 0.5
    drafts = [sum(count for _, count in choice) for choice in world.choices]
    costs_nothing = World(costs=FLAT, num_rows=16, lookup=always(COPY), found_share=0.5).run(None, 300)
    assert not any(costs_nothing.lookup_asleep)
    assert np.mean(drafts[200:600]) < 0.2


def test_a_source_rests_when_what_it_brought_was_not_worth_what_it_cost() -> None:
    rest = Rest(least_gain=0.02, first_trial=8, trial=4, first_sleep=10, most_sleep=20)

    def run(num_steps: int, num_rows: int, gain: float) -> list[bool]:
        asleep = []
        for _ in range(num_steps):
            rest.brought(gain)
            rest.step(num_rows, num_rows)
            asleep.append(rest.is_asleep)
        return asleep

    assert run(8, 1, 0.1) == [False] * 8  # a tenth of the tokens
    assert run(8, 1, 0.0) == [False] * 7 + [True]
    assert run(10, 1, 0.0) == [True] * 9 + [False]
    assert run(4, 1, 0.0) == [False] * 3 + [True]  # later trials are shorter, sleeps longer
    assert run(15, 1, 0.0) == [True] * 14 + [False]
    assert run(4, 1, 0.1) == [False] * 4  # it pays again
    assert run(8, 1, -1.0) == [False] * 7 + [True]  # from the beginning
    assert run(9, 1, 0.0) == [True] * 9


def test_where_drafts_neither_help_nor_hurt_the_choice_does_not_flap() -> None:
    world = World(costs=FLAT, num_rows=8, model=always((0.22, 0.1))).run(None, 600)
    totals = [sum(count for _, count in choice) > 8 for choice in world.choices[100:]]
    assert sum(a != b for a, b in itertools.pairwise(totals)) < 25


@pytest.mark.parametrize("num_rows", [1, 32])
def test_probes_take_less_than_a_hundredth_of_the_time(num_rows: int) -> None:
    world = World(costs=STEEP, num_rows=num_rows, model=always(BAD), request_tokens=64).run(None, 400)
    probes = sum(count for choice in world.choices[100:] for _, count in choice)
    assert probes >= 1
    marginal_ms = 6.4
    assert probes * marginal_ms < 0.01 * world.ms


def decoded(row_counts: list[tuple[RowState, int, int]], ms: float) -> VerifiedStep:
    """A step of rows with so many drafts and so many accepted."""
    frames = []
    for row, count, accepted in row_counts:
        frame = Frame(
            index=0, row=row, start=0, stop=1 + count, draft_token_ids=[0] * count, samples=True, num_propose=4
        )  # fmt: skip
        frame.token_ids = [0] * (1 + accepted)
        frames.append(frame)
    return VerifiedStep(frames=frames, batch=NO_BATCH, states=torch.empty(0), verify_ns=int(ms * 1e6))


def test_each_row_gets_what_its_own_drafts_are_worth() -> None:
    policy = AdaptiveDrafts(StepCosts({n: 1e6 * ms for n, ms in FLAT.items()}), 4)
    rows = [dataclasses.replace(row_of(1, 2, 3), row=index, epoch=1 + index) for index in range(2)]
    chosen = policy.choose(rows, [(0, 4), (0, 4)], [0, 0])
    for _ in range(60):
        counts = [count for _, count in chosen]
        policy.observe(decoded([(rows[0], counts[0], counts[0]), (rows[1], counts[1], 0)], 18.0))
        chosen = policy.choose(rows, [(0, 4), (0, 4)], [0, 0])
    assert chosen[0][1] == 4
    assert chosen[1][1] <= 2  # what is known of all rows leaves it some hope


# ---- chances ----


def test_a_word_counts_by_how_its_drafts_did_beside_the_others() -> None:
    chances = DraftChances(4)
    chances.seat([0])
    sure, unsure = word_of_certainty(0.9), word_of_certainty(0.3)
    assert word_of_match(0) == 0 < word_of_match(2) < word_of_match(3) < word_of_match(16)
    for step in range(200):
        is_sure = step % 2 == 0
        chances.note(Outcome(0, MODEL, [sure if is_sure else unsure], 1, int(is_sure), None))
        if step % 4 == 3:
            chances.learn()
    assert chances.chances[0, MODEL, 0] == pytest.approx(0.5, abs=0.1)
    assert chances.lifts[MODEL, sure] > 1.5
    assert chances.lifts[MODEL, unsure] < -1.5
    assert not chances.lifts[LOOKUP].any()
    assert chances.lifts[MODEL, 0] == 0.0


def test_where_all_drafts_get_better_no_word_is_praised() -> None:
    chances = DraftChances(4)
    chances.seat([0])
    word = word_of_certainty(0.5)
    for step in range(200):
        chances.note(Outcome(0, MODEL, [word], 1, int(step > 100), None))
        chances.learn()
    assert chances.lifts[MODEL, word] == pytest.approx(0.0, abs=0.05)


def test_drafts_that_were_dropped_do_not_make_the_kept_ones_look_typical() -> None:
    kept_only, with_dropped = DraftChances(4), DraftChances(4)
    for chances in (kept_only, with_dropped):
        chances.seat([0])
    for _ in range(100):
        kept_only.note(Outcome(0, MODEL, [1], 1, 1, None))
        with_dropped.note(Outcome(0, MODEL, [1], 1, 1, None))
        with_dropped.note(Outcome(0, MODEL, [], 0, 0, 0.1))
    for chances in (kept_only, with_dropped):
        chances.seat([1])  # which knows nothing but what is known of all
    assert kept_only.chances[1, MODEL, 0] > 0.9
    assert with_dropped.chances[1, MODEL, 0] < 0.7


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
    for _ in range(200):  # everything takes twice as long today, and 8 tokens nearly three times
        costs.verified(1, 200)
        costs.verified(8, 330)
    one, eight = costs.verify_ns(np.array([1.0, 8.0]))
    assert one == pytest.approx(200, rel=0.1)
    assert eight == pytest.approx(330, rel=0.1)


def test_a_machine_that_slows_down_is_not_blamed_on_the_size_in_use() -> None:
    costs = StepCosts({1: 100.0, 8: 120.0, 16: 150.0})
    for _ in range(20):
        costs.verified(1, 100)
        costs.verified(8, 120)
    for _ in range(100):
        costs.verified(8, 240)
    one, eight = costs.verify_ns(np.array([1.0, 8.0]))
    assert eight / one == pytest.approx(1.2, rel=0.06)


def test_drafting_costs_are_those_of_the_nearest_number_of_rows() -> None:
    costs = StepCosts({1: 1000.0})
    assert costs.draft_ns(4) == 100.0
    costs.drafted(1, 1, 50_000)
    assert costs.draft_ns(4) == 100.0  # the first of all warms up
    costs.drafted(1, 4, 400)
    costs.drafted(16, 2, 600)
    assert (costs.draft_ns(1), costs.draft_ns(2), costs.draft_ns(30)) == (100.0, 100.0, 300.0)


def test_a_first_draft_that_took_long_is_not_believed_for_long() -> None:
    costs = StepCosts({1: 1000.0})
    costs.drafted(1, 1, 100)
    for took in (5000, 400, 100, 100):
        costs.drafted(1, 1, took)
    assert costs.draft_ns(1) == 100.0
    costs.drafted(1, 1, 5000)  # disturbed by something else
    assert costs.draft_ns(1) < 110.0
    for _ in range(60):
        costs.drafted(1, 1, 200)
    assert costs.draft_ns(1) == pytest.approx(200, rel=0.05)
