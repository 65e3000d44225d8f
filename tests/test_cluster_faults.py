"""What the fault injector can be told. What it does to streams is in test_scheduler_actor."""

from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from cluster.config import ServeConfig
from cluster.errors import ConfigError
from cluster.faults import Faults, Partition
from cluster.running import Running
from cluster.status_page import status_of, status_table
from scheduler.core import Scheduler
from scheduler.events import SchedulerConfig


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("20", ("exponential", [20.0])),
        ("exponential:1.5", ("exponential", [1.5])),
        ("fixed:7", ("fixed", [7.0])),
        ("uniform:1:9", ("uniform", [1.0, 9.0])),
    ],
)
def test_a_delay_is_a_mean_or_a_named_distribution(text: str, parsed: object) -> None:
    assert Faults(delay_ms=text).parsed_delay() == parsed


def test_nothing_is_on_by_default_and_what_is_on_says_so() -> None:
    assert not ServeConfig().faults.any
    faults = Faults(drop=0.1, partition="10:1.5", seed=4)
    assert faults.any
    assert faults.parsed_partition() == Partition(every_s=10.0, for_s=1.5)
    assert str(faults).endswith("drop 0.1, partition 10:1.5, seed 4")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(drop=1.0), "--fault-drop must be in"),
        (Faults(repeat=-0.1), "--fault-repeat must be in"),
        (Faults(delay_ms="fast"), "--fault-delay-ms: 'fast' is not made of numbers"),
        (Faults(delay_ms="uniform:1"), "--fault-delay-ms: 'uniform:1' needs 2 numbers"),
        (Faults(delay_ms="-1"), "--fault-delay-ms: '-1' needs 1 numbers of at least 0"),
        (Faults(partition="0:1"), "--fault-partition must be EVERY_S:FOR_S"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_flag(faults: Faults, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(faults=faults)


def test_status_says_loudly_what_is_on() -> None:
    notice = str(Faults(drop=0.1))
    stats = asdict(replace(Scheduler(SchedulerConfig()).stats(), notices=(notice,)))
    running = Running(pid=1, pid_started_at=1, endpoints=("h:1",), model="m", directory="", processes=())
    page = status_of(running, {"scheduler": stats, "front_end": {}})
    assert page["notices"] == (notice,)
    out = StringIO()
    Console(file=out, width=200).print(status_table(page))
    assert notice in out.getvalue()
