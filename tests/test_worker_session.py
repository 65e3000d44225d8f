"""The worker's queue: strict order, repeats answered and not run, acknowledged results gone, one session at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from scheduler.step import StepPlan, StepResult
from worker.session import SessionQueue, StaleSession, StepError


class Recorder:
    """Executes nothing and remembers what it was asked."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.executed: list[int] = []
        self.sessions: list[int] = []
        self.fails_at = fails_at

    def begin_session(self, session: int) -> None:
        self.sessions.append(session)

    def execute(self, plan: StepPlan) -> StepResult:
        self.executed.append(plan.step_seq)
        if plan.step_seq == self.fails_at:
            raise RuntimeError("out of memory")
        return StepResult(worker_id="a", session=plan.session, step_seq=plan.step_seq)


@dataclass(slots=True)
class Flight:
    """A launched step; it is over when the recorder says so."""

    recorder: "Launcher"
    plan: StepPlan

    @property
    def is_settled(self) -> bool:
        return self.plan.step_seq in self.recorder.settled

    def wait(self) -> None:
        raise AssertionError("a queue does not wait: it is of the steps' thread")

    def result(self) -> StepResult:
        self.recorder.settled.append(self.plan.step_seq)
        if self.plan.step_seq == self.recorder.breaks_at:
            raise RuntimeError("the device is lost")
        return StepResult(worker_id="a", session=self.plan.session, step_seq=self.plan.step_seq)


class Launcher(Recorder):
    """Launches steps, of which some are over at once."""

    def __init__(self, *, at_once: Sequence[int] = (), breaks_at: int | None = None) -> None:
        super().__init__()
        self.launched: list[int] = []
        self.settled = list(at_once)
        self.breaks_at = breaks_at

    def launch(self, plan: StepPlan) -> Flight:
        self.launched.append(plan.step_seq)
        return Flight(self, plan)


def launching(*, at_once: Sequence[int] = (), breaks_at: int | None = None) -> tuple[SessionQueue, Launcher]:
    launcher = Launcher(at_once=at_once, breaks_at=breaks_at)
    queue = SessionQueue(launcher)
    queue.begin(7)
    return queue, launcher


def plan(step_seq: int, *, session: int = 7, acknowledged: int = -1) -> StepPlan:
    return StepPlan(session=session, step_seq=step_seq, acknowledged=acknowledged)


def begun(fails_at: int | None = None) -> tuple[SessionQueue, Recorder]:
    recorder = Recorder(fails_at)
    queue = SessionQueue(recorder)
    queue.begin(7)
    return queue, recorder


def answered(results: list[StepResult]) -> list[int]:
    return [result.step_seq for result in results]


def test_plans_in_order_are_run_at_once() -> None:
    queue, recorder = begun()
    assert [answered(queue.offer(plan(step_seq))) for step_seq in range(3)] == [[0], [1], [2]]
    assert recorder.executed == [0, 1, 2]


def test_an_early_plan_waits_for_those_before_it() -> None:
    queue, recorder = begun()
    assert queue.offer(plan(2)) == []
    assert queue.offer(plan(1)) == []
    assert recorder.executed == []
    assert answered(queue.offer(plan(0))) == [0, 1, 2]


def test_every_order_of_arrival_runs_in_step_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        queue, recorder = begun()
        arrivals = np.repeat(np.arange(6), 2)
        rng.shuffle(arrivals)
        seen = [step for step_seq in arrivals for step in answered(queue.offer(plan(int(step_seq))))]
        assert recorder.executed == list(range(6))
        assert sorted(set(seen)) == list(range(6))


def test_a_repeated_plan_is_answered_again_and_not_run_again() -> None:
    queue, recorder = begun()
    [first] = queue.offer(plan(0))
    [again] = queue.offer(plan(0))
    assert again is first
    assert recorder.executed == [0]


def test_a_repeat_of_an_early_plan_waits_like_the_first() -> None:
    queue, recorder = begun()
    assert queue.offer(plan(1)) == []
    assert queue.offer(plan(1)) == []
    assert answered(queue.offer(plan(0))) == [0, 1]
    assert recorder.executed == [0, 1]


def test_results_are_kept_until_acknowledged_and_then_forgotten() -> None:
    queue, recorder = begun()
    for step_seq in range(4):
        queue.offer(plan(step_seq))
    queue.offer(plan(4, acknowledged=1))
    assert queue.offer(plan(0)) == queue.offer(plan(1)) == []
    assert answered(queue.offer(plan(2))) == [2]
    assert recorder.executed == [0, 1, 2, 3, 4]


def test_an_acknowledgement_counts_even_on_a_plan_that_waits() -> None:
    queue, _ = begun()
    queue.offer(plan(0))
    assert queue.offer(plan(2, acknowledged=0)) == []
    assert queue.offer(plan(0)) == []


@pytest.mark.parametrize("session", [6, 8])
def test_plans_of_another_session_are_refused_and_change_nothing(session: int) -> None:
    queue, recorder = begun()
    with pytest.raises(StaleSession, match=f"of session {session}, this worker is in 7"):
        queue.offer(plan(0, session=session))
    assert recorder.executed == []
    assert answered(queue.offer(plan(0))) == [0]


def test_before_the_first_session_everything_is_refused() -> None:
    with pytest.raises(StaleSession):
        SessionQueue(Recorder()).offer(plan(0))


def test_a_failed_step_poisons_the_rest_of_its_session() -> None:
    queue, recorder = begun(fails_at=1)
    queue.offer(plan(0))
    with pytest.raises(StepError, match="step 1 of session 7 failed: RuntimeError: out of memory") as failed:
        queue.offer(plan(1))
    assert (failed.value.session, failed.value.step_seq) == (7, 1)
    for step_seq in (0, 1, 2):
        with pytest.raises(StepError, match="step 1 of session 7"):
            queue.offer(plan(step_seq))
    assert recorder.executed == [0, 1]


def test_a_new_session_begins_with_nothing_of_the_one_before() -> None:
    queue, recorder = begun(fails_at=1)
    queue.offer(plan(0))
    queue.offer(plan(2))
    with pytest.raises(StepError):
        queue.offer(plan(1))
    recorder.fails_at = None
    queue.begin(9)
    assert recorder.sessions == [7, 9]
    with pytest.raises(StaleSession):
        queue.offer(plan(1))
    assert queue.offer(plan(1, session=9)) == []
    assert answered(queue.offer(plan(0, session=9))) == [0, 1]


# ---- steps launched ahead ----


def test_a_step_is_launched_before_the_result_of_the_one_before_is_read() -> None:
    queue, launcher = launching()
    first, second = queue.launch(plan(0)), queue.launch(plan(1))
    assert (launcher.launched, launcher.settled) == ([0, 1], [])
    assert [len(first.pending), len(second.pending)] == [1, 1]
    assert answered(queue.collect(second)) == [1]
    assert launcher.settled == [0, 1]  # in order, whoever asks first
    assert answered(queue.collect(first)) == [0]


def test_a_step_that_is_over_at_once_is_answered_at_once() -> None:
    queue, _ = launching(at_once=(0,))
    launched = queue.launch(plan(0))
    assert launched.pending == []
    assert answered(launched.results) == [0]


def test_a_repeat_of_a_launched_plan_waits_for_the_same_step() -> None:
    queue, launcher = launching()
    first, again = queue.launch(plan(0)), queue.launch(plan(0))
    assert first.pending == again.pending
    assert queue.collect(first) == queue.collect(again)
    assert launcher.launched == [0]


def test_steps_released_together_are_launched_together() -> None:
    queue, launcher = launching()
    assert queue.offer(plan(1)) == []
    assert answered(queue.offer(plan(0))) == [0, 1]
    assert launcher.launched == [0, 1]


def test_a_launched_step_that_breaks_ends_its_session() -> None:
    queue, _ = launching(breaks_at=0)
    first, second = queue.launch(plan(0)), queue.launch(plan(1))
    for launched in (second, first):
        with pytest.raises(StepError, match="step 0 of session 7 failed: RuntimeError: the device is lost"):
            queue.collect(launched)


def test_what_was_launched_in_an_earlier_session_is_not_collected() -> None:
    queue, launcher = launching()
    launched = queue.launch(plan(0))
    queue.begin(8)
    with pytest.raises(StaleSession):
        queue.collect(launched)
    assert launcher.settled == []
