"""Strict step_seq order around a Runner: the worker's half of the session protocol.

Early plans wait, repeated plans are answered again and not run again, plans of another session are
refused. Results are kept until the scheduler acknowledges them. Knows nothing about Ray or gRPC.
"""

from typing import Protocol

from scheduler.step import StepPlan, StepResult


class StaleSession(RuntimeError):
    """A plan of a session that is not this worker's current one."""


class StepError(RuntimeError):
    """A whole step failed, now or earlier in this session: the session is over, the worker must register anew."""

    def __init__(self, session: int, step_seq: int, message: str) -> None:
        super().__init__(f"step {step_seq} of session {session} failed: {message}")
        self.session = session
        self.step_seq = step_seq  # of the step that failed


class StepExecutor(Protocol):
    """What a queue drives: worker.runner.Runner, or a group of ranks behind one."""

    def begin_session(self, session: int) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


class SessionQueue:
    """One worker's queue. Call it from one thread at a time."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._session: int | None = None
        self._next_step_seq = 0
        self._early: dict[int, StepPlan] = {}
        self._unacknowledged: dict[int, StepResult] = {}
        self._failure: StepError | None = None

    def begin(self, session: int) -> None:
        """Register: forget everything of the session before, whatever became of it."""
        self._executor.begin_session(session)
        self._session = session
        self._next_step_seq = 0
        self._early.clear()
        self._unacknowledged.clear()
        self._failure = None

    def offer(self, plan: StepPlan) -> list[StepResult]:
        """Run what is next in line; the results to send now, in step_seq order (possibly none).

        Raises StaleSession for another session's plan and StepError when a step fails or one has failed before.
        """
        if plan.session != self._session:
            raise StaleSession(f"plan {plan.step_seq} is of session {plan.session}, this worker is in {self._session}")
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # raised again and again, it would pile up frames
        self._forget(plan.acknowledged)
        if plan.step_seq < self._next_step_seq:
            kept = self._unacknowledged.get(plan.step_seq)
            return [] if kept is None else [kept]
        self._early[plan.step_seq] = plan
        return self._run_in_order()

    def _forget(self, acknowledged: int) -> None:
        for step_seq in [step_seq for step_seq in self._unacknowledged if step_seq <= acknowledged]:
            del self._unacknowledged[step_seq]

    def _run_in_order(self) -> list[StepResult]:
        results: list[StepResult] = []
        while self._next_step_seq in self._early:
            plan = self._early.pop(self._next_step_seq)
            try:
                result = self._executor.execute(plan)
            except Exception as error:
                self._failure = StepError(plan.session, plan.step_seq, f"{type(error).__name__}: {error}")
                raise self._failure from error
            self._unacknowledged[plan.step_seq] = result
            self._next_step_seq += 1
            results.append(result)
        return results
