"""The whole stack in one process but for Ray: real scheduler shell and core, real runner, real gRPC.

Messages between scheduler and front end start in any order, as calls to an asynchronous actor do.
"""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import torch

from cluster.client import Client
from cluster.frontend import FrontEnd, SchedulerUnavailable
from cluster.server import Server, ServerConfig
from cluster.serving import Serving
from cluster.text import Tokenizer
from scheduler.actor import Liveness, Message, SchedulerActor, StepRaised, WorkerUnreachable
from scheduler.cache_feed import CacheNews
from scheduler.events import SchedulerConfig, WorkerUp
from scheduler.request import Request
from scheduler.step import StepPlan, StepResult
from tests.fake_link import VOCAB_SIZE
from tests.oracle import OracleDrafter
from tests.served import TINY, tiny_model
from worker.drafting import draft_blocks
from worker.model import Model, ModelConfig, random_model
from worker.runner import Runner
from worker.sanitizer import KVSanitizer
from worker.session import SessionQueue, StaleSession, StepError

MAX_MODEL_LEN = 256
BLOCK_SIZE = 8
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=MAX_MODEL_LEN,
)


@functools.cache
def model_of(purpose: str, num_blocks: int) -> Model:
    """One model per purpose: each has a pool of its own, all have the same weights."""
    assert purpose
    return random_model(CONFIG, seed=3, dtype=torch.float32, num_blocks=num_blocks, block_size=BLOCK_SIZE)


class InProcessWorker:
    """A scheduler.actor.WorkerPort to a runner on a thread of its own."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue = SessionQueue(runner)
        self._session: int | None = None
        self._thread = ThreadPoolExecutor(1)

    async def register(self, session: int) -> WorkerUp:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._queue.begin, session)
        self._session = session
        return WorkerUp(
            worker_id=self._runner.worker_id,
            session=session,
            num_blocks=self._runner.model.kv_cache.num_blocks,
            max_num_seqs=self._runner.max_num_seqs,
            max_drafts=self._runner.drafter.max_drafts if self._runner.drafter else 0,
        )

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._queue.offer, plan)
        except StaleSession as error:
            raise WorkerUnreachable(str(error)) from error
        except StepError as error:
            raise StepRaised(str(error)) from error

    async def health(self) -> int | None:
        return self._session

    async def restart(self) -> None:
        raise AssertionError("nothing hangs here")

    async def prepare(self, weights: str) -> None:
        raise ValueError(f"nothing can be loaded here: {weights}")

    async def weights(self) -> str | None:
        return None

    async def draft_blocks(self) -> tuple[int, int] | None:
        return draft_blocks(self._runner.drafter)

    def close(self) -> None:
        self._thread.shutdown()


class OutOfOrderPort:
    """A scheduler.actor.FrontEndPort whose deliveries overtake each other."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._rng = random.Random(0)

    async def deliver(self, connection: int, seq: int, messages: Sequence[Message]) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        self._front_end.deliver(seq, messages, connection)  # type: ignore[arg-type]


RECORD_EVENTS = 64  # few, so that the log starts over from snapshots


class InProcessLink:
    """A cluster.frontend.SchedulerLink to the shell in this process; `scheduler` is None while it is away."""

    def __init__(self) -> None:
        self.scheduler: SchedulerActor | None = None

    async def submit(self, request: Request, timeout_s: float | None) -> None:
        await self._there().submit(request, timeout_s)

    async def cancel(self, request_id: str, attempt: int) -> None:
        await self._there().cancel(request_id, attempt)

    async def reset_prefix_cache(self, reset_running: bool) -> None:
        await self._there().reset_prefix_cache(reset_running)

    async def preempt(self, request_id: str) -> None:
        await self._there().preempt(request_id)

    async def swap_weights(self, directory: str) -> None:
        await self._there().swap_weights(directory)

    async def story(self, request_id: str) -> str:
        return await self._there().story(request_id)

    async def view(self, after: int, frames: bool) -> dict[str, Any]:
        return await self._there().view(after, frames)

    async def recording(self) -> bytes:
        return await self._there().recording()

    async def cache_changes(self, after: int | None) -> CacheNews | None:
        return await self._there().cache_changes(after)

    async def stats(self) -> dict[str, object]:
        return asdict(await self._there().stats())

    def _there(self) -> SchedulerActor:
        if self.scheduler is None:
            raise SchedulerUnavailable("the scheduler is away")
        return self.scheduler


@dataclass(slots=True, eq=False)
class Stack:
    """Everything that runs."""

    config: SchedulerConfig
    worker: InProcessWorker
    drafter: OracleDrafter
    link: InProcessLink
    front_end: FrontEnd
    server: Server
    client: Client
    channel: Any  # grpc.aio.Channel
    lives: list[SchedulerActor] = field(default_factory=list)

    async def start_scheduler(self) -> None:
        """A new life of the scheduler, known to the front end."""
        liveness = Liveness(tick_s=0.005, heartbeat_s=0.05)
        scheduler = SchedulerActor(self.config, {"w0": self.worker}, liveness, RECORD_EVENTS)
        self.lives.append(scheduler)
        life = await scheduler.connect(self.front_end.name, OutOfOrderPort(self.front_end))
        self.link.scheduler = scheduler
        self.front_end.scheduler_restarted(life)

    async def kill_scheduler(self) -> None:
        """Its state is gone; the worker and the front end are not told."""
        self.link.scheduler = None
        await self.lives[-1].stop()

    async def idle(self) -> dict[str, Any]:
        """The scheduler's stats once every frame has settled; asserts that nothing is owed."""
        async with asyncio.timeout(10):
            while True:
                stats = (await self.client.astats())["scheduler"]
                busy = stats["num_running"] or stats["num_waiting"]
                if not busy and not any(worker["num_steps_in_flight"] for worker in stats["workers"]):
                    break
                await asyncio.sleep(0.005)
        assert stats["async_tokens_to_discard"] == stats["placeholders"] == 0
        assert all(worker["num_free_blocks"] == worker["num_blocks"] for worker in stats["workers"])
        return dict(stats)


@asynccontextmanager
async def whole_stack(
    *,
    num_drafts: int = 4,
    spoil: float = 0.3,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_waiting: int = 4096,
    listen: ServerConfig | None = None,
    token: str | None = None,
    tokenizer: Tokenizer = TINY,
) -> AsyncIterator[Stack]:
    """One worker, one scheduler, one front end. The drafter knows only what it is taught.

    `token` is the client's, for a server that asks for one.
    """
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        max_drafts=num_drafts,
        largest_pool_blocks=num_blocks,
        max_waiting=max_waiting,
    )
    drafter = OracleDrafter(max_drafts=num_drafts, vocab_size=VOCAB_SIZE, spoil=spoil)
    runner = Runner(
        worker_id="w0",
        model=model_of("serving", num_blocks),
        drafter=drafter,
        max_num_seqs=max_num_seqs,
        sanitizer=KVSanitizer(num_blocks, BLOCK_SIZE),
    )
    worker, link = InProcessWorker(runner), InProcessLink()
    front_end = FrontEnd(link, tokenizer=tokenizer, draw_seed=functools.partial(random.Random(1).getrandbits, 64))
    model = tiny_model(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs)
    server = Server(Serving(front_end=front_end, model=model, tokenizer=tokenizer), listen)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel, Client(server.address, token=token) as client:
        stack = Stack(config, worker, drafter, link, front_end, server, client, channel)
        await stack.start_scheduler()
        try:
            yield stack
            if link.scheduler is not None:
                await stack.idle()
        finally:
            await server.stop(0.0)
            for scheduler in stack.lives:
                await scheduler.stop()
            worker.close()
