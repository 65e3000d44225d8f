"""When a request would end, told from those before it."""

import pytest

from scheduler.core import Scheduler
from scheduler.events import SchedulerConfig
from scheduler.pace import HALF_LIFE_S, Pace
from tests.builders import submitted

S = 1_000_000_000


def test_nothing_is_expected_before_a_queue_has_moved_and_a_request_has_ended() -> None:
    pace = Pace()
    pace.planned(100, 0, is_queue_left=False)
    pace.planned(100, S, is_queue_left=False)
    pace.ended(50, 2.0)
    assert pace.expected_s(1000, 50) is None  # the queue was always empty: how fast it moves is not known


def test_a_request_waits_for_those_ahead_and_then_runs() -> None:
    pace = Pace()
    for second in range(5):
        pace.planned(100, second * S, is_queue_left=True)
    pace.ended(50, 2.0)
    assert pace.expected_s(0, 50) == pytest.approx(2.0)
    assert pace.expected_s(300, 25) == pytest.approx(3.0 + 1.0)


def test_time_in_which_the_queue_was_empty_does_not_count() -> None:
    pace = Pace()
    pace.planned(100, 0, is_queue_left=True)
    pace.planned(100, S, is_queue_left=False)
    pace.planned(100, 100 * S, is_queue_left=True)
    pace.planned(100, 101 * S, is_queue_left=True)
    pace.ended(50, 1.0)
    assert pace.expected_s(100, 50) == pytest.approx(2.0)


def test_what_was_measured_lately_counts_for_more() -> None:
    pace = Pace()
    pace.planned(0, 0, is_queue_left=True)
    for second in range(1, 61):
        pace.planned(100 if second <= 30 else 200, second * S, is_queue_left=True)
    pace.ended(1, 0.0)
    expected_s = pace.expected_s(200, 1)
    assert expected_s is not None
    assert 1.0 < expected_s < 1.0 + 2 * 0.5 ** (30 / HALF_LIFE_S)


def test_what_is_ahead_of_a_request_is_what_would_be_seated_before_it() -> None:
    scheduler = Scheduler(SchedulerConfig(scheduling_policy="priority"))
    for number, tenant in enumerate(("many", "many", "many", "few")):
        scheduler.handle(submitted(f"r{number}", 8, max_tokens=92, tenant=tenant, priority=1))
    assert scheduler.num_tokens_ahead(submitted("r4", tenant="many", priority=1).request) == 400
    assert scheduler.num_tokens_ahead(submitted("r5", tenant="few", priority=1).request) == 300
    assert scheduler.num_tokens_ahead(submitted("r6", tenant="new", priority=1).request) == 200
    assert scheduler.num_tokens_ahead(submitted("r7", priority=0).request) == 0
