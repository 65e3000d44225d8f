"""Ray's transport: the ports through which the scheduler, its workers and its front ends reach each other.

Actors are found by their names, so that a scheduler which Ray restarts can do so without whoever started it.

A failed call means "unknown", never "not done": what happened is decided by sessions, sequence
numbers and epochs on both sides.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from cluster.frontend import FrontEnd, SchedulerUnavailable
from scheduler.actor import Message, SchedulerActor, StepRaised, WorkerUnreachable
from scheduler.cache_feed import CacheNews
from scheduler.events import WorkerUp
from scheduler.request import Request
from scheduler.step import StepPlan, StepResult
from worker.actor import Registered, WorkerActor, WorkerTraits, pack, unpack
from worker.session import StaleSession

Answer = TypeVar("Answer")

AWAIT_DELIVERY_EVERY_S = 0.2
SCHEDULER_HEARTBEAT_S = 1.0
SCHEDULER_LOST_AFTER_S = 30.0  # unreachable for so long


class RayWorkerPort:
    """The scheduler's way to a worker: a scheduler.actor.WorkerPort."""

    def __init__(self, name: str) -> None:
        """Of the actor, in the caller's namespace."""
        self._name = name
        self._found: ActorHandle[WorkerActor] | None = None

    async def register(self, session: int) -> WorkerUp:
        """Begin a session. Raises WorkerUnreachable, also for a model that does not load."""
        return worker_up((await self.registered(session)).traits, session)

    async def registered(self, session: int) -> Registered:
        """The worker's own answer to a registration. Raises WorkerUnreachable."""
        registered: Registered = await _reached(lambda: self._actor().register.remote(session))
        return registered

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """Raises WorkerUnreachable or StepRaised."""
        try:
            packed: bytes = await self._actor().step.remote(pack(plan))
        except RayTaskError as error:
            if isinstance(error.cause, StaleSession):
                raise WorkerUnreachable(one_line(error)) from error
            raise StepRaised(one_line(error)) from error
        except RayError as error:
            raise WorkerUnreachable(one_line(error)) from error
        results: list[StepResult] = unpack(packed)
        return results

    async def health(self) -> int | None:
        """The session the worker is in. Raises WorkerUnreachable."""
        session: int | None = await _reached(lambda: self._actor().health.remote())
        return session

    async def restart(self) -> None:
        """End the worker's process, also one that is stopped; Ray begins another. Raises WorkerUnreachable."""
        try:
            ray.kill(self._actor(), no_restart=False)
        except RayError as error:
            raise WorkerUnreachable(one_line(error)) from error

    async def prepare(self, weights: str) -> None:
        """Load weights that a plan will swap to. Raises ValueError when it cannot, or WorkerUnreachable."""
        try:
            await self._actor().prepare.remote(weights)
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
                raise ValueError(one_line(error)) from error
            raise WorkerUnreachable(one_line(error)) from error

    async def weights(self) -> str | None:
        """What the worker was last swapped to. Raises WorkerUnreachable."""
        weights: str | None = await _reached(lambda: self._actor().weights.remote())
        return weights

    async def draft_blocks(self) -> tuple[int, int] | None:
        """Blocks of its draft model's own pool, and how many are free. Raises WorkerUnreachable."""
        blocks: tuple[int, int] | None = await _reached(lambda: self._actor().draft_blocks.remote())
        return blocks

    def _actor(self) -> "ActorHandle[WorkerActor]":
        if self._found is None:
            try:
                self._found = ray.get_actor(self._name)
            except ValueError as error:
                raise WorkerUnreachable(f"there is no actor {self._name}") from error
        return self._found


class DeliveryActor(Protocol):
    """The actor a front end runs in."""

    async def deliver(self, connection: int, seq: int, packed: bytes) -> None: ...


class RayFrontEndPort:
    """The scheduler's way to a front end: a scheduler.actor.FrontEndPort."""

    def __init__(self, actor: "ActorHandle[DeliveryActor]") -> None:
        self._actor = actor
        self._next_awaited_s = 0.0

    async def deliver(self, connection: int, seq: int, messages: Sequence[Message]) -> None:
        """Raises ConnectionError when the front end's process is gone.

        Waiting for an answer costs as much as the call: a few a second tell as well that it is there.
        """
        answer: Any = self._actor.deliver.remote(connection, seq, pack(messages))
        now_s = time.monotonic()
        if now_s < self._next_awaited_s:
            return
        self._next_awaited_s = now_s + AWAIT_DELIVERY_EVERY_S
        try:
            await answer
        except RayError as error:
            raise ConnectionError(one_line(error)) from error


class RaySchedulerLink:
    """A front end's way to the scheduler: a cluster.frontend.SchedulerLink."""

    def __init__(self, scheduler: "ActorHandle[SchedulerActor]") -> None:
        self._scheduler = scheduler

    async def submit(self, request: Request, timeout_s: float | None) -> None:
        """Raises SchedulerUnavailable if the scheduler may not have it."""
        await _answered(self._scheduler.submit.remote(request, timeout_s))

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Ends this attempt or an older one."""
        await _answered(self._scheduler.cancel.remote(request_id, attempt))

    async def reset_prefix_cache(self, reset_running: bool) -> None:
        """Empties the prefix cache."""
        await _answered(self._scheduler.reset_prefix_cache.remote(reset_running))

    async def preempt(self, request_id: str) -> None:
        """Takes a running request off its worker."""
        await _answered(self._scheduler.preempt.remote(request_id))

    async def stats(self) -> dict[str, object]:
        """The scheduler's counters, as plain values."""
        return asdict(await _answered(self._scheduler.stats.remote()))

    async def view(self, after: int, frames: bool) -> dict[str, Any]:
        """What a live page draws of the scheduler."""
        view: dict[str, Any] = await _answered(self._scheduler.view.remote(after, frames))
        return view

    async def recording(self) -> bytes:
        """The scheduler's log. Raises ValueError if it keeps none."""
        content: bytes = await _answered(self._scheduler.recording.remote())
        return content

    async def cache_changes(self, after: int | None) -> CacheNews | None:
        """What the prefix caches gained and lost since."""
        news: CacheNews | None = await _answered(self._scheduler.cache_changes.remote(after))
        return news

    async def swap_weights(self, directory: str) -> None:
        """Go on with the weights of another checkpoint. Raises ValueError if a worker cannot load them."""
        await _answered(self._scheduler.swap_weights.remote(directory))

    async def story(self, request_id: str) -> str:
        """One request's history in this life of the scheduler."""
        story: str = await _answered(self._scheduler.story.remote(request_id))
        return story

    async def connect(self, front_end: FrontEnd, actor: "ActorHandle[DeliveryActor]") -> int:
        """Tells the scheduler where the front end is; the connection's number."""
        connection: int = await _answered(self._scheduler.connect.remote(front_end.name, RayFrontEndPort(actor)))
        front_end.scheduler_restarted(connection)
        return connection

    async def follow(self, front_end: FrontEnd, actor: "ActorHandle[DeliveryActor]", connection: int) -> None:
        """Keeps a front end connected, to every life of the scheduler, until there is no hope for one."""
        clock = asyncio.get_running_loop().time
        last_heard_s = clock()
        while True:
            try:
                # Another life knows no connection of ours, and this one forgets it when a delivery failed.
                if await _answered(self._scheduler.connection.remote(front_end.name)) != connection:
                    connection = await self.connect(front_end, actor)
                last_heard_s = clock()
            except SchedulerUnavailable as error:
                hopeless = isinstance(error.__cause__, ActorDiedError | RayTaskError)
                if hopeless or clock() - last_heard_s > SCHEDULER_LOST_AFTER_S:
                    front_end.scheduler_lost(f"the scheduler is lost: {error}")
                    return
            await asyncio.sleep(SCHEDULER_HEARTBEAT_S)


def worker_up(traits: WorkerTraits, session: int) -> WorkerUp:
    """The event that says so: this worker has begun this session."""
    return WorkerUp(
        worker_id=traits.worker_id,
        session=session,
        num_blocks=traits.num_blocks,
        max_num_seqs=traits.max_num_seqs,
        max_drafts=traits.max_drafts,
        fingerprint=traits.fingerprint,
        drop_last_hit_block=traits.drop_last_hit_block,
    )


async def _reached(call: Callable[[], Coroutine[object, object, Answer]]) -> Answer:
    """A worker's answer. Raises WorkerUnreachable."""
    try:
        return await call()
    except RayError as error:
        raise WorkerUnreachable(one_line(error)) from error


async def _answered(answer: Coroutine[object, object, Answer]) -> Answer:
    """Raises SchedulerUnavailable, or the scheduler's own ValueError."""
    try:
        return await answer
    except RayError as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
            raise ValueError(one_line(error)) from error
        raise SchedulerUnavailable(one_line(error)) from error


def one_line(error: RayError) -> str:
    """What went wrong, without Ray's banner and traceback."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return str(error.cause).strip().partition("\n")[0]
    if isinstance(error, RayActorError):
        return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
    return str(error).strip().partition("\n")[0]
