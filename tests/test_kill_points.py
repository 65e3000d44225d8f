"""A worker killed at every point of a step: real core and shell, real runner and model, a process that can die.

What a killed process leaves is what has left it: nothing it computed, wrote or drafted is ever seen again.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import torch

from scheduler.actor import Liveness, SchedulerActor, WorkerUnreachable
from scheduler.events import Event, SchedulerConfig, StepFinished, WorkerUp
from scheduler.request import Request, SamplingParams
from scheduler.step import StepPlan, StepResult
from tests.oracle import tokens, undisturbed
from tests.test_scheduler_actor import Inbox, until
from tests.whole_stack import BLOCK_SIZE, CONFIG, MAX_MODEL_LEN, model_of
from worker.batch import Batch
from worker.drafter import Drafter, NgramDrafter, VerifiedStep
from worker.model import Model, random_model
from worker.rows import RowState
from worker.runner import Runner
from worker.sanitizer import KVSanitizer
from worker.session import SessionQueue, StaleSession

NUM_BLOCKS, MAX_DRAFTS, MAX_TOKENS = 48, 4, 28
POINTS = (
    "before verify",
    "during verify",
    "after verify",
    "before draft",
    "during draft",
    "after draft",
    "before the result is sent",
    "while the result is sent",
    "after the result is sent",
    "before the result is processed",
    "while the result is processed",
    "after the result is processed",
)


class Died(BaseException):
    """The process is gone: nothing in it can catch this."""


class Death:
    """Strikes when a point is reached for the n-th time."""

    def __init__(self, point: str, count: int) -> None:
        self._point = point
        self._left = count
        self.has_struck = False

    def at(self, point: str) -> None:
        """Raises Died if this is it."""
        if self.is_at(point):
            raise Died(point)

    def is_at(self, point: str) -> bool:
        """Whether this is it."""
        self._left -= point == self._point
        if self._left == 0 and not self.has_struck:
            self.has_struck = True
            return True
        return False


class MortalModel(Model):
    """Dies in its forward."""

    death: Death

    def forward(self, batch: Batch, *arguments: object, **options: object) -> torch.Tensor:
        self.death.at("before verify")
        hidden = super().forward(batch, *arguments, **options)
        self.death.at("during verify")  # its KV is written
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        self.death.at("after verify")
        return logits


class MortalDrafter(Drafter):
    """Dies while it drafts."""

    def __init__(self, death: Death) -> None:
        self.max_drafts = MAX_DRAFTS
        self._death = death
        self._drafter = NgramDrafter(
            max_drafts=MAX_DRAFTS, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=MAX_MODEL_LEN
        )

    def observe(self, step: VerifiedStep) -> None:
        self._death.at("before draft")

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        self._death.at("during draft")
        drafts = self._drafter.propose(rows, num_propose)
        self._death.at("after draft")
        return drafts


class MortalWorker:
    """A WorkerPort to a process that dies once, and is then started again with nothing."""

    def __init__(self, worker_id: str, death: Death) -> None:
        self._worker_id = worker_id
        self._death = death
        self._thread = ThreadPoolExecutor(1)
        self.num_sessions = 0
        self._start()

    def _start(self) -> None:
        model = random_model(CONFIG, seed=3, dtype=torch.float32, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        model.__class__ = MortalModel
        assert isinstance(model, MortalModel)
        model.death = self._death
        self._runner = Runner(
            worker_id=self._worker_id,
            model=model,
            drafter=MortalDrafter(self._death),
            max_num_seqs=4,
            sanitizer=KVSanitizer(NUM_BLOCKS, BLOCK_SIZE),
        )
        self._queue = SessionQueue(self._runner)
        self._session: int | None = None

    async def register(self, session: int) -> WorkerUp:
        self._queue.begin(session)
        self._session = session
        self.num_sessions += 1
        return WorkerUp(
            worker_id=self._worker_id, session=session, num_blocks=NUM_BLOCKS, max_num_seqs=4, max_drafts=MAX_DRAFTS
        )

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        queue = self._queue
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._carry_out, queue, plan)
        except (Died, StaleSession) as error:
            if queue is self._queue:
                self._start()
            raise WorkerUnreachable(f"the process died: {error}") from error
        if self._death.is_at("after the result is sent") or self._death.is_at("before the result is processed"):
            self._start()  # the result is on its way, and arrives
        return results

    def _carry_out(self, queue: SessionQueue, plan: StepPlan) -> list[StepResult]:
        results = queue.offer(plan)
        self._death.at("before the result is sent")
        self._death.at("while the result is sent")  # the half that arrived is no message
        return results

    def processed(self, point: str) -> None:
        """The scheduler takes or has taken a result of ours."""
        if self._death.is_at(point):
            self._start()

    async def health(self) -> int | None:
        return self._session

    async def restart(self) -> None:
        raise AssertionError("nothing hangs here")

    async def prepare(self, weights: str) -> None:
        raise AssertionError("nobody swaps here")

    async def weights(self) -> str | None:
        return None

    async def draft_blocks(self) -> tuple[int, int] | None:
        return None

    def close(self) -> None:
        self._thread.shutdown()


class WatchedScheduler(SchedulerActor):
    """Tells a worker when its results are processed."""

    watcher: MortalWorker

    def _apply(self, event: Event) -> None:
        is_result = isinstance(event, StepFinished)
        if is_result:
            self.watcher.processed("while the result is processed")
        super()._apply(event)
        if is_result:
            self.watcher.processed("after the result is processed")


def asked(stream: int) -> Request:
    phrase = [7 + stream, 8, 9 + stream]
    return Request(
        request_id=f"r{stream}",
        front_end="front",
        stream=stream,
        prompt_token_ids=tokens(*(phrase * (1 + stream))),
        max_tokens=MAX_TOKENS,
        sampling=SamplingParams(temperature=(0.0, 0.8)[stream % 2], seed=stream),
    )


@asynccontextmanager
async def deployed(death: Death, spare: Death) -> AsyncIterator[tuple[WatchedScheduler, MortalWorker, Inbox]]:
    """A worker that will die, one that will not, the scheduler's shell and a front end's inbox."""
    mortal, other = MortalWorker("a", death), MortalWorker("b", spare)
    config = SchedulerConfig(
        block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64, max_drafts=MAX_DRAFTS
    )
    liveness = Liveness(heartbeat_s=0.02, worker_down_after_s=2.0, tick_s=0.01)
    scheduler = WatchedScheduler(config, {"a": mortal, "b": other}, liveness)
    scheduler.watcher = mortal
    inbox = Inbox()
    await scheduler.connect("front", inbox)
    try:
        yield scheduler, mortal, inbox
    finally:
        await scheduler.stop()
        mortal.close()
        other.close()


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("point", POINTS)
async def test_a_worker_killed_at_any_point_changes_no_stream(point: str, count: int) -> None:
    death = Death(point, count)
    async with deployed(death, Death("never", 1)) as (scheduler, mortal, inbox):
        requests = [asked(stream) for stream in range(4)]
        for request in requests:
            await scheduler.submit(request, None)
        await until(lambda: len(inbox.finished) == len(requests), 30.0)
        assert death.has_struck
        for request in requests:
            expected = undisturbed(
                model_of("oracle", 64), request.prompt_token_ids.tolist(), request.sampling, MAX_TOKENS
            )
            assert inbox.token_ids[request.stream] == expected.token_ids, await scheduler.story(request.request_id)
        await until(lambda: mortal.num_sessions == 2)
        await assert_settled(scheduler)


async def assert_settled(scheduler: SchedulerActor) -> None:
    async with asyncio.timeout(10):
        while True:
            stats = await scheduler.stats()
            if len(stats.workers) == 2 and not any(worker.num_steps_in_flight for worker in stats.workers):
                break
            await asyncio.sleep(0.01)
    assert stats.async_tokens_to_discard == stats.placeholders == stats.num_running == stats.num_waiting == 0
    assert all(worker.num_free_blocks == worker.num_blocks for worker in stats.workers)
