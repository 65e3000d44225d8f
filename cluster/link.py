"""Ray's transport: the ports through which the scheduler, its workers and its front ends reach each other.

A failed call means "unknown", never "not done": what happened is decided by sessions, sequence
numbers and epochs on both sides.
"""

from collections.abc import Sequence

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from scheduler.actor import StepRaised, WorkerUnreachable
from scheduler.events import WorkerUp
from scheduler.step import StepPlan, StepResult
from worker.actor import WorkerActor
from worker.session import StaleSession


class RayWorkerPort:
    """A scheduler.actor.WorkerPort over actor calls."""

    def __init__(self, actor: "ActorHandle[WorkerActor]") -> None:
        self._actor = actor

    async def register(self, session: int) -> WorkerUp:
        """Begin a session. Raises WorkerUnreachable, also for a model that does not load."""
        try:
            traits = await self._actor.register.remote(session)
        except RayError as error:
            raise WorkerUnreachable(one_line(error)) from error
        return WorkerUp(
            worker_id=traits.worker_id,
            session=session,
            num_blocks=traits.num_blocks,
            max_num_seqs=traits.max_num_seqs,
            max_drafts=traits.max_drafts,
            fingerprint=traits.fingerprint,
        )

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """Raises WorkerUnreachable or StepRaised."""
        try:
            results: list[StepResult] = await self._actor.step.remote(plan)
        except RayTaskError as error:
            if isinstance(error.cause, StaleSession):
                raise WorkerUnreachable(one_line(error)) from error
            raise StepRaised(one_line(error)) from error
        except RayError as error:
            raise WorkerUnreachable(one_line(error)) from error
        return results

    async def health(self) -> int | None:
        """The session the worker is in. Raises WorkerUnreachable."""
        try:
            session: int | None = await self._actor.health.remote()
        except RayError as error:
            raise WorkerUnreachable(one_line(error)) from error
        return session


def one_line(error: RayError) -> str:
    """What went wrong, without Ray's banner and traceback."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return str(error.cause).strip().partition("\n")[0]
    if isinstance(error, RayActorError):
        return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
    return str(error).strip().partition("\n")[0]
