"""Random worlds around the scheduler core, by the thousand: what `make simulate` runs, bounded for CI.

SLIPSTREAM_SIM_SEEDS sets how many (2,000 by default); SLIPSTREAM_SIM_JOBS the processes.
"""

import os

import pytest

from tests.simulate.fates import FATES
from tests.simulate.world import World
from tests.simulation import FRAME_TABLE, KINDS, MIN_SEEDS_FOR_COVERAGE, Outcome, main, outcomes, run_seed

NUM_SEEDS = int(os.environ.get("SLIPSTREAM_SIM_SEEDS", "2000"))
NUM_JOBS = int(os.environ.get("SLIPSTREAM_SIM_JOBS", "2"))

# Worlds that found something once, by what it was. A change of the weather gives their numbers to other worlds; what
# they found is then still a named test of tests/test_scheduler_*.py.
REGRESSIONS = {
    "a deadline of an earlier life of an id ended a later one": (10, 23, 36),
    "admissions to a worker too small for the one who waits were counted as overtaking it": (9035,),
    "a lower attempt than that of an earlier life of the id, which lived on, was ignored for ever": (20004,),
    "a row's failure was believed before the results ahead of it were applied": (9745,),
}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """All seeds, in processes of their own."""
    total = Outcome()
    for part in outcomes(range(NUM_SEEDS), NUM_JOBS):
        total.add(part)
    return total


@pytest.mark.timeout(1800)
def test_no_world_sees_a_broken_promise(outcome: Outcome) -> None:
    failures = sorted(outcome.failures, key=lambda failure: failure.seed)
    assert not failures, f"seeds {[failure.seed for failure in failures]}\n{failures[0].report}"


@pytest.mark.timeout(1800)
def test_every_world_handles_at_least_300_events(outcome: Outcome) -> None:
    assert outcome.fewest_events >= 300


@pytest.mark.timeout(1800)
@pytest.mark.skipif(NUM_SEEDS < MIN_SEEDS_FOR_COVERAGE, reason="too few seeds to meet everything")
def test_every_row_of_the_frame_table_meets_every_kind_of_frame(outcome: Outcome) -> None:
    assert outcome.zeros() == []


@pytest.mark.timeout(1800)
@pytest.mark.skipif(NUM_SEEDS < MIN_SEEDS_FOR_COVERAGE, reason="too few seeds to meet everything")
def test_everything_that_may_happen_happens_often(outcome: Outcome) -> None:
    others = ("stops inside accepted runs", "id used again", "drafts fewer than asked", "step failed", "pools unequal")
    rare = {name: outcome.seeds_that_met[name] for name in (*FATES, *others)}
    assert min(rare.values()) >= outcome.num_seeds / 10, rare
    assert outcome.met["drafts accepted"] > outcome.num_seeds
    assert outcome.met["drafts rejected"] > outcome.num_seeds
    assert outcome.met["prefix hit tokens"] > outcome.num_seeds


@pytest.mark.parametrize("seed", [seed for seeds in REGRESSIONS.values() for seed in seeds])
def test_a_world_that_once_found_something_holds(seed: int) -> None:
    assert [failure.report for failure in run_seed(seed).failures] == []


@pytest.mark.parametrize("seed", range(3))
def test_64_workers(seed: int) -> None:
    outcome = run_seed(seed, num_workers=64, horizon=1500)
    assert [failure.report for failure in outcome.failures] == []
    assert outcome.met["clients"] > 64


def test_a_world_is_a_function_of_its_seed() -> None:
    def live(seed: int) -> list[object]:
        world = World(seed)
        world.run()
        return [
            world.num_handled,
            world.clock.now_ns,
            world.coverage,
            world.met,
            [c.token_ids for c in world.fronts.clients],
        ]

    assert live(7) == live(7)
    assert live(7) != live(8)


def test_the_command_line_prints_the_table_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "4 seeds, 0 failed" in printed
    assert all(kind in printed for kind in KINDS)
    assert all(row.split()[0] in printed for row in FRAME_TABLE)


def test_the_command_line_tells_the_story_of_a_failing_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.plan.lookahead", lambda num_propose: num_propose * 0)
    monkeypatch.setattr("scheduler.admit.lookahead", lambda num_propose: num_propose * 0)
    assert main(["--seeds", "8", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "story of" in printed
    assert "seated: worker" in printed
    assert "last events:" in printed
