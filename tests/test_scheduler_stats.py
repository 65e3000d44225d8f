"""Counters and gauges: what status pages and metrics are made of."""

from collections.abc import Mapping, Sequence

import pytest

from scheduler.blocks import root_digest
from scheduler.events import CacheReset, WorkerDown
from scheduler.request import RejectCode
from scheduler.stats import BOUNDS_S, DurationCounter
from tests.builders import Stage, cancelled, submitted


@pytest.mark.parametrize(
    ("num_drafts", "steps", "expected"),
    [
        (3, [{"r0": [1, 2, 3, 4]}], (1, 3, 3, (1, 1, 1))),
        (3, [{"r0": [1, 5]}], (1, 3, 1, (1, 0, 0))),
        (2, [{"r0": [1, 2, 5], "r1": [3, 4]}], (2, 3, 3, (2, 1))),
        (3, [{"r0": [1, 5]}, {"r0": [9]}, {"r0": [1, 2, 3, 4]}], (3, 9, 4, (2, 1, 1))),
    ],
    ids=["all", "one of three", "two rows", "three steps"],
)
def test_acceptance_counts_drafts_tokens_and_positions(
    num_drafts: int, steps: Sequence[Mapping[str, Sequence[int]]], expected: tuple[int, int, int, tuple[int, ...]]
) -> None:
    """Drafts, draft tokens, accepted, accepted per position."""
    names = list(steps[0])
    stage = Stage(max_drafts=num_drafts, max_steps_in_flight=1)
    for name in names:
        stage.handle(submitted(name, 8, max_tokens=60, max_drafts={"r0": num_drafts, "r1": 1}[name]))
    stage.up()
    stage.reply({name: [7] for name in names})
    for step in steps:
        stage.reply(step)
    stats = stage.scheduler.stats()
    assert expected == (
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.num_accepted_tokens_per_pos,
    )
    assert stats.mean_acceptance_length == 1 + expected[2] / expected[0]


def test_empty_result_of_planned_drafts_counts_nowhere() -> None:
    """No negative acceptance, no statistics: whether the row failed or broke the protocol."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 8, max_tokens=60), submitted("r1", 8, max_tokens=60))
    stage.up()
    stage.reply({"r0": [7], "r1": [7]})
    stage.reply({}, failed={"r1": "broken"})
    stats = stage.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0, 0)
    assert sum(stats.num_accepted_tokens_per_pos) == 0
    assert stats.mean_acceptance_length == 1
    assert stats.num_finished == {"error": 2}
    assert stage.finished["r0"].num_draft_tokens == stage.finished["r1"].num_draft_tokens == 0


def test_dropped_frames_count_no_acceptance() -> None:
    """Neither for the scheduler nor for the request."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 8, max_tokens=4))
    stage.up()
    stage.reply({"r0": [7]})
    stage.handle(CacheReset(reset_running=True))
    stage.reply({"r0": [1, 2, 3]})
    stats = stage.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (0, 0)
    assert stats.stale_tokens_dropped == {"reset": 3}


def test_reserved_tokens_come_back_as_output_or_are_rolled_back() -> None:
    """Every placeholder of an undisturbed request is accounted for."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1, num_accepted=lambda _r, outputs, drafts: outputs % (drafts + 1))
    stage.handle(submitted("r0", 30, max_tokens=40), submitted("r1", 30, max_tokens=40))
    stage.up()
    stage.run()
    stats = stage.scheduler.stats()
    assert stats.num_generation_tokens == 80
    assert stats.tokens_rolled_back > 0
    assert stats.tokens_reserved == stats.num_generation_tokens + stats.tokens_rolled_back
    assert stats.placeholders == 0


def test_gauges_are_of_now() -> None:
    """Running, waiting, placeholders, blocks and steps of each worker."""
    stage = Stage(max_drafts=3, max_steps_in_flight=2)
    stage.handle(submitted("r0", 20, max_tokens=40), submitted("r1", 20, max_tokens=40), submitted("r2", 20))
    stage.up(max_num_seqs=2, num_blocks=40, fingerprint="f")
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.placeholders == 2 * (1 + 4)
    [worker] = stats.workers
    assert (worker.worker_id, worker.session, worker.fingerprint, worker.draining) == ("a", 1, "f", False)
    assert (worker.num_running, worker.num_steps_in_flight) == (2, 2)
    assert worker.num_blocks - worker.num_free_blocks == sum(len(stage.block_table(name)) for name in ("r0", "r1"))
    stage.handle(WorkerDown(worker_id="a", session=1))
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.placeholders, stats.workers) == (0, 3, 0, ())


def test_ends_rejections_and_prefix_hits_are_counted() -> None:
    """By reason where there are several."""
    stage = Stage(max_drafts=0, max_model_len=64)
    stage.up()
    stage.handle(submitted("r0", 40, max_tokens=2))
    stage.run()
    stage.handle(submitted("r0", 40, max_tokens=2, stream=9))
    stage.handle(submitted("r1", 8), cancelled("r1"), submitted("r2", 60))  # all steps are in flight: r1 never ran
    stage.run()
    stats = stage.scheduler.stats()
    assert stats.num_finished == {"length": 2, "abort": 1}
    assert stats.num_rejected == 1
    assert stage.rejected[0].code is RejectCode.INVALID_ARGUMENT
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40 + 40, 32)
    assert stats.num_prompt_tokens == 88
    assert stats.num_generation_tokens == 4
    assert stage.finished["r0"].num_cached_tokens == 32


def test_worker_times_and_steps_add_up() -> None:
    """Applied results only."""
    stage = Stage(max_drafts=0)
    stage.up()
    stage.handle(submitted("r0", 8, max_tokens=5))
    stage.run()
    stats = stage.scheduler.stats()
    assert stats.num_steps == len(stage.plans)
    assert (stats.worker_verify_ns, stats.worker_draft_ns, stats.worker_idle_ns) == (0, 0, 0)


def test_kv_of_rejected_drafts_is_garbage_until_the_next_step_writes_over_it() -> None:
    """A drafter that had fewer drafts than planned left less of it."""
    stage = Stage(max_drafts=3, max_steps_in_flight=1)
    stage.handle(submitted("r0", 8, max_tokens=60))
    stage.up()
    seen = []
    for tokens, verified in (([7], 0), ([1], 3), ([1, 2, 3, 4], 3), ([1, 2], 2), ([9], 0)):
        stage.reply({"r0": tokens}, num_verified={"r0": verified})
        seen.append(stage.scheduler.stats().garbage_kv_tokens)
    assert seen == [0, 3, 0, 1, 0]
    stage.reply({"r0": [1]})
    assert stage.scheduler.stats().garbage_kv_tokens == 3
    stage.handle(cancelled("r0"))
    assert stage.scheduler.stats().garbage_kv_tokens == 0


def test_durations_are_counted_by_upper_bound_and_beyond_all() -> None:
    counter = DurationCounter()
    for duration_s in (0.0, BOUNDS_S[0], 0.0002, 0.3, 1e6):
        counter.add(duration_s)
    counter.add(0.5, times=2)
    durations = counter.snapshot()
    assert [durations.counts[index] for index in (0, 1, BOUNDS_S.index(0.5), -1)] == [2, 1, 3, 1]
    assert sum(durations.counts) == 7
    assert durations.sum_s == pytest.approx(1e6 + 1.3003)
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_tenants_share_no_prefix_with_each_other_whatever_their_salts() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("1:a:", ""), ("", "1:a:"), (":", "a"), ("a:", "")]
    assert len({root_digest(salt, tenant) for salt, tenant in pairs}) == len(pairs)
    stage = Stage(max_steps_in_flight=1)
    stage.up()
    hits = []
    for name, tenant in (("r0", "east"), ("r1", "west"), ("r2", "east")):
        stage.handle(submitted(name, list(range(40)), max_tokens=1, tenant=tenant))
        while name not in stage.finished:
            stage.answer()
        hits.append(stage.finished[name].num_cached_tokens)
    assert hits == [0, 0, 32]
