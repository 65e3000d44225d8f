"""Every rule is needed: with one rule patched away, the simulation fails within 500 seeds.

The patches live here; the product has no switch for them.
"""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.core import Scheduler
from scheduler.plan import Count
from scheduler.state import FrameKind, RequestState, WorkerState
from scheduler.step import Int32Array, StepPlan, StepResult
from tests.simulation import run_seed
from worker.session import SessionQueue

MAX_SEEDS = 500
Patch = Callable[[pytest.MonkeyPatch], None]


def _without_epoch_check(patch: pytest.MonkeyPatch) -> None:
    """A frame is applied to whoever sits in its row now."""
    patch.setattr("scheduler.core.is_live", lambda step: np.arange(len(step.kind)))


def _without_session_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_is_current", staticmethod(lambda worker, result: True))


def _without_step_order(patch: pytest.MonkeyPatch) -> None:
    """Results are applied as they come."""

    def on_step_finished(self: Scheduler, result: StepResult) -> None:
        worker = self._claim(result)
        if worker is not None:
            worker.acknowledged = max(worker.acknowledged, result.step_seq)
            self._apply(worker, worker.in_flight.pop(result.step_seq), result)

    patch.setattr(Scheduler, "_on_step_finished", on_step_finished)


def _without_step_order_on_the_worker(patch: pytest.MonkeyPatch) -> None:
    """Plans are carried out as they come; each still once."""
    offer = SessionQueue.offer
    carried_out: set[tuple[int, int]] = set()  # session, step_seq

    def offer_at_once(self: SessionQueue, plan: StepPlan) -> list[StepResult]:
        step = plan.session, plan.step_seq
        self._next_step_seq = plan.step_seq + (step in carried_out)
        if plan.session == self._session:
            carried_out.add(step)
        return offer(self, plan)

    patch.setattr(SessionQueue, "offer", offer_at_once)


def _discarding_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """The seed article's counter: set in tokens, counted down by one per frame."""
    discard = Scheduler._discard

    def discard_one(self: Scheduler, key: tuple[str, int], num_tokens: int) -> None:
        discard(self, key, num_tokens if num_tokens >= 0 else -1)

    patch.setattr(Scheduler, "_discard", discard_one)


def _resuming_before_draining(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_drains", staticmethod(lambda state: False))


def _publishing_unconfirmed(patch: pytest.MonkeyPatch) -> None:
    """Whatever will have been computed is offered at once, drafts included."""

    def publishable(worker: WorkerState, rows: Int32Array) -> Int32Array:
        return np.asarray(np.minimum(worker.rows.num_computed[rows], worker.rows.end[rows] - 1))

    patch.setattr("scheduler.commit.publishable_tokens", publishable)


def _publishing_incomplete(patch: pytest.MonkeyPatch) -> None:
    """Confirmed tokens are offered before the step that writes them has completed."""

    def publishable(worker: WorkerState, rows: Int32Array) -> Int32Array:
        return np.asarray(np.minimum(worker.rows.num_tokens[rows] - 1, worker.rows.num_computed[rows]))

    patch.setattr("scheduler.commit.publishable_tokens", publishable)


def _without_lookahead(patch: pytest.MonkeyPatch) -> None:
    def none(num_propose: Count) -> Count:
        return num_propose * 0

    patch.setattr("scheduler.plan.lookahead", none)
    patch.setattr("scheduler.admit.lookahead", none)


def _publishing_in_any_namespace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("scheduler.commit.may_publish", lambda worker, rows: np.ones(len(rows), np.bool_))


def _delivering_after_cancel(patch: pytest.MonkeyPatch) -> None:
    """Frames of a request that is gone still deliver."""
    take_off = Scheduler._take_off

    def deliver(self: Scheduler, state: RequestState, kind: int, reason: str) -> None:
        take_off(self, state, FrameKind.DELIVER if reason.startswith("finished") else kind, reason)

    patch.setattr(Scheduler, "_take_off", deliver)


def _cancelling_only_when_idle(patch: pytest.MonkeyPatch) -> None:
    """A cancel loses against tokens in flight."""
    cancel = Scheduler._on_cancelled

    def cancel_idle(self: Scheduler, event: object) -> None:
        state = self.requests.get(event.request_id)  # type: ignore[attr-defined]
        if state is None or state.worker is None:
            cancel(self, event)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_on_cancelled", cancel_idle)


MUTANTS: dict[str, Patch] = {
    "epoch check": _without_epoch_check,
    "session check": _without_session_check,
    "step order": _without_step_order,
    "step order on the worker": _without_step_order_on_the_worker,
    "discard by the frame's own reserved": _discarding_one_by_one,
    "resume only after draining": _resuming_before_draining,
    "publish only confirmed blocks": _publishing_unconfirmed,
    "publish only completed blocks": _publishing_incomplete,
    "lookahead slots": _without_lookahead,
    "namespace of the epoch": _publishing_in_any_namespace,
    "cancel wins: nothing is delivered": _delivering_after_cancel,
    "cancel wins: at once": _cancelling_only_when_idle,
}


def first_failing_seed(max_seeds: int = MAX_SEEDS) -> tuple[int, str] | None:
    """The first world that notices, and what it noticed."""
    for seed in range(max_seeds):
        for failure in run_seed(seed).failures:
            return seed, failure.message
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_patched_away_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[rule](monkeypatch)
    assert first_failing_seed() is not None, f"no world of {MAX_SEEDS} needs the rule: {rule}"
