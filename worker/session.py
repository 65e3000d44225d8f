"""Strict step_seq order around a Runner: the worker's half of the session protocol.

Early plans wait, repeated plans are answered again and not run again, plans of another session are
refused. Results are kept until the scheduler acknowledges them. A runner that can launch a step before the one
before has answered is let do so. Knows nothing about Ray or gRPC.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

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


class PendingStep(Protocol):
    """A step that was launched."""

    @property
    def is_settled(self) -> bool:
        """Whether `result` has nothing to wait for."""
        ...

    def wait(self) -> None:
        """Until it is carried out. From any thread."""
        ...

    def result(self) -> StepResult:
        """Its result. On the queue's thread."""
        ...


@runtime_checkable
class StepLauncher(StepExecutor, Protocol):
    """An executor that can begin a step before the result of the one before is read."""

    def launch(self, plan: StepPlan) -> PendingStep: ...


class Launched(NamedTuple):
    """What a plan released: steps whose results are to be sent now, in step_seq order (possibly none)."""

    session: int
    step_seqs: list[int]
    pending: list[PendingStep]  # those of them to wait for
    results: list[StepResult]  # of all of them, if there is nothing to wait for


class SessionQueue:
    """One worker's queue. Call it from one thread at a time."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._launcher = executor if isinstance(executor, StepLauncher) else None
        self._session: int | None = None
        self._next_step_seq = 0
        self._early: dict[int, StepPlan] = {}
        self._pending: dict[int, PendingStep] = {}  # launched; in step_seq order
        self._unacknowledged: dict[int, StepResult] = {}
        self._failure: StepError | None = None

    def begin(self, session: int) -> None:
        """Register: forget everything of the session before, whatever became of it."""
        self._executor.begin_session(session)
        self._session = session
        self._next_step_seq = 0
        self._early.clear()
        self._pending.clear()
        self._unacknowledged.clear()
        self._failure = None

    def offer(self, plan: StepPlan) -> list[StepResult]:
        """Run what is next in line; the results to send now, in step_seq order (possibly none).

        Raises StaleSession for another session's plan and StepError when a step fails or one has failed before.
        """
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """`offer` up to where it would wait for a step that another could follow meanwhile. Raises the same."""
        self._check(plan.session, plan.step_seq)
        self._forget(plan.acknowledged)
        if plan.step_seq < self._next_step_seq:
            step_seqs = [plan.step_seq] if plan.step_seq in self._unacknowledged.keys() | self._pending.keys() else []
        else:
            self._early[plan.step_seq] = plan
            step_seqs = self._launch_in_order()
        pending = [self._pending[step_seq] for step_seq in step_seqs if step_seq in self._pending]
        results = [] if pending else [self._unacknowledged[step_seq] for step_seq in step_seqs]
        return Launched(plan.session, step_seqs, pending, results)

    def collect(self, launched: Launched) -> list[StepResult]:
        """The rest of `offer`. Raises the same: its session may have ended meanwhile."""
        if not launched.pending:
            return launched.results
        self._check(launched.session, launched.step_seqs[0])
        for step_seq in [step_seq for step_seq in self._pending if step_seq <= launched.step_seqs[-1]]:
            pending = self._pending.pop(step_seq)
            with self._breaking(launched.session, step_seq):
                self._unacknowledged[step_seq] = pending.result()
        return [self._unacknowledged[step_seq] for step_seq in launched.step_seqs if step_seq in self._unacknowledged]

    def _check(self, session: int, step_seq: int) -> None:
        if session != self._session:
            raise StaleSession(f"plan {step_seq} is of session {session}, this worker is in {self._session}")
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # raised again and again, it would pile up frames

    def _forget(self, acknowledged: int) -> None:
        for step_seq in [step_seq for step_seq in self._unacknowledged if step_seq <= acknowledged]:
            del self._unacknowledged[step_seq]

    def _launch_in_order(self) -> list[int]:
        """Run or begin what is next in line."""
        step_seqs: list[int] = []
        while self._next_step_seq in self._early:
            plan = self._early.pop(self._next_step_seq)
            with self._breaking(plan.session, plan.step_seq):
                step = None if self._launcher is None else self._launcher.launch(plan)
                if step is None:
                    self._unacknowledged[plan.step_seq] = self._executor.execute(plan)
                elif step.is_settled:
                    self._unacknowledged[plan.step_seq] = step.result()
                else:
                    self._pending[plan.step_seq] = step
            self._next_step_seq += 1
            step_seqs.append(plan.step_seq)
        return step_seqs

    @contextmanager
    def _breaking(self, session: int, step_seq: int) -> Iterator[None]:
        """Whatever is raised ends the session."""
        try:
            yield
        except Exception as error:
            self._failure = StepError(session, step_seq, f"{type(error).__name__}: {error}")
            raise self._failure from error
