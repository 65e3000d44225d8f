"""A recorded scheduler can be told its events again and makes the same commands."""

import pickle
from pathlib import Path

import pytest

from scheduler.core import Scheduler
from scheduler.events import CacheReset, SchedulerConfig, StartStep, Tick
from scheduler.record import RecordedScheduler, replay
from tests.builders import cancelled, submitted, worker_up
from tests.simulate import world

LANDED = Path(__file__).parent / "recorded" / "world.recording"


def recorded_world(monkeypatch: pytest.MonkeyPatch, seed: int, max_events: int) -> RecordedScheduler:
    """A whole simulated world played to its end on recorded schedulers; the last of them."""
    made: list[RecordedScheduler] = []

    def recorded(config: SchedulerConfig, choose_drafts: object = None) -> RecordedScheduler:
        made.append(RecordedScheduler(config, max_events=max_events))
        return made[-1]

    monkeypatch.setattr(world, "Scheduler", recorded)
    world.World(seed).run()
    return made[-1]


@pytest.mark.parametrize(("seed", "max_events"), [(7, 10_000), (8, 50), (11, 1)])
def test_replayed_world_makes_the_same_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, max_events: int
) -> None:
    scheduler = recorded_world(monkeypatch, seed, max_events)
    scheduler.save(tmp_path / "recording")
    num_events, divergence, replayed = replay(tmp_path / "recording")
    assert divergence is None
    assert 0 < num_events <= max_events
    replayed.check()
    assert replayed.stats() == scheduler.stats()


def test_recording_made_before_the_last_refactoring_replays_to_identical_commands() -> None:
    """Made by an earlier core. A change that claims to change nothing must pass; another makes it anew, and says so:
    `python -m tests.test_scheduler_record`."""
    num_events, divergence, _ = replay(LANDED)
    assert num_events > 300
    assert divergence is None, f"event {divergence.index}: {divergence.event} now makes {divergence.commands}"


def test_change_of_behaviour_is_found_by_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.plan.lookahead", lambda num_propose: num_propose * 0)
    _, divergence, _ = replay(LANDED)
    assert divergence is not None
    assert any(isinstance(command, StartStep) for command in divergence.commands)


def test_failed_check_leaves_its_recording(tmp_path: Path) -> None:
    scheduler = RecordedScheduler(SchedulerConfig())
    scheduler.handle(worker_up())
    scheduler.handle(submitted("r0"))
    scheduler.workers["a"].rows.num_placeholders[0] += 1
    with pytest.raises(AssertionError):
        scheduler.check(tmp_path / "recording")
    num_events, divergence, replayed = replay(tmp_path / "recording")
    assert (num_events, divergence) == (2, None)
    replayed.check()


def test_event_that_raised_ends_the_replay_where_it_raised(tmp_path: Path) -> None:
    scheduler = RecordedScheduler(SchedulerConfig())
    with pytest.raises(AssertionError):
        scheduler.handle("not an event")  # type: ignore[arg-type]
    scheduler.save(tmp_path / "recording")
    assert replay(tmp_path / "recording")[:2] == (1, None)


def test_recording_holds_only_types_of_the_core(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("run by a stranger's file",))

    for content in (pickle.dumps(Evil.__reduce__(Evil())), b"", b"garbage", pickle.dumps({"format": 99})):
        path = tmp_path / "recording"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="recording"):
            replay(path)


def test_recorder_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_events must be at least 1"):
        RecordedScheduler(SchedulerConfig(), max_events=0)


def make_landed() -> None:
    """Record a world with resets, cancels, preemptions and drafts by a plain scheduler's default policy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        scheduler = max(
            (recorded_world(monkeypatch, seed, 100_000) for seed in range(20, 40)),
            key=lambda made: len(made.stats().num_preemptions) * 1000 + made.stats().tokens_salvaged,
        )
    LANDED.parent.mkdir(exist_ok=True)
    scheduler.save(LANDED)


def test_recorded_events_cover_what_matters() -> None:
    """The landed recording met preemption, dropped and salvaged tokens and rollback."""
    _, _, scheduler = replay(LANDED)
    assert isinstance(scheduler, Scheduler)
    stats = scheduler.stats()
    assert stats.tokens_rolled_back
    assert stats.num_preemptions
    assert sum(stats.stale_tokens_dropped.values())
    assert stats.tokens_salvaged
    scheduler.handle(Tick(now_ns=scheduler.now_ns))
    scheduler.handle(CacheReset(reset_running=True))
    scheduler.handle(cancelled("unheard of"))
    scheduler.check()


if __name__ == "__main__":
    make_landed()
