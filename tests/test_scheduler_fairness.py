"""Tenants that wait are served in proportion to their weights; the requests of one keep their order."""

from collections import Counter

from scheduler.events import SchedulerConfig
from scheduler.fairness import MAX_TENANTS, FairShare
from tests.builders import Stage, submitted

TENANT_OF: dict[str, str] = {}  # request -> tenant, of the test at hand


def stage_of(**weights: int) -> Stage:
    """One request at a time, so that the order of service is the order of seats."""
    stage = Stage(max_drafts=0, max_steps_in_flight=1, tenant_weights=tuple(weights.items()))
    stage.up(num_blocks=64, max_num_seqs=1)
    return stage


def served(stage: Stage) -> list[str]:
    """The tenant of each request, in the order of their seats."""
    stage.run()
    stage.assert_settled()
    return [TENANT_OF[arrival.request_id] for arrival in stage.arrivals]


def submit(stage: Stage, tenant: str, first: int, count: int, max_tokens: int = 4) -> None:
    for number in range(first, first + count):
        TENANT_OF[f"r{number}"] = tenant
        stage.handle(submitted(f"r{number}", 8, max_tokens=max_tokens, tenant=tenant))


def test_a_tenant_that_floods_the_queue_waits_beside_one_that_came_later() -> None:
    stage = stage_of()
    submit(stage, "loud", 0, 20)
    submit(stage, "quiet", 20, 5)
    assert Counter(served(stage)[:11]) == {"loud": 6, "quiet": 5}


def test_weights_are_shares_of_the_tokens_that_are_served() -> None:
    stage = stage_of(gold=3)
    submit(stage, "free", 0, 24)
    submit(stage, "gold", 24, 24)
    first = Counter(served(stage)[:24])
    assert 17 <= first["gold"] <= 19


def test_long_requests_count_for_more_than_short_ones() -> None:
    stage = stage_of()
    submit(stage, "long", 0, 6, max_tokens=32)  # 40 tokens each
    submit(stage, "short", 6, 20, max_tokens=2)  # 10 each
    first = Counter(served(stage)[:15])
    assert 11 <= first["short"] <= 13


def test_an_idle_tenant_saves_nothing_up() -> None:
    stage = stage_of()
    submit(stage, "busy", 0, 10)
    stage.run()
    submit(stage, "busy", 10, 6)
    submit(stage, "late", 16, 6)
    assert Counter(served(stage)[-12:][:6]) == {"busy": 3, "late": 3}


def test_one_tenant_is_first_come_first_served() -> None:
    stage = stage_of(only=7)
    for number, max_tokens in enumerate((9, 1, 5, 30, 2)):
        stage.handle(submitted(f"r{number}", 8, max_tokens=max_tokens, tenant="only"))
    stage.run()
    assert [arrival.request_id for arrival in stage.arrivals] == [f"r{number}" for number in range(5)]


def test_priority_goes_before_shares() -> None:
    stage = Stage(max_drafts=0, max_steps_in_flight=1, scheduling_policy="priority", tenant_weights=(("gold", 9),))
    stage.up(num_blocks=64, max_num_seqs=1)
    submit(stage, "gold", 0, 3)
    TENANT_OF["r9"] = "free"
    stage.handle(submitted("r9", 8, max_tokens=4, tenant="free", priority=-1))
    assert served(stage)[1] == "free"


def test_tenants_that_are_served_are_forgotten_in_time() -> None:
    shares = FairShare({})
    for number in range(3 * MAX_TENANTS):
        shares.serve(shares.start(f"t{number}", 1) + (1 << 40))
    assert len(shares._ends) <= MAX_TENANTS + 1
    assert SchedulerConfig().tenant_weights == ()
