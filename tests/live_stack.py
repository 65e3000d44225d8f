"""A deployment in one process that looks alive: two workers slow enough to watch, clients that never stop, the page."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from cluster.admin_service import VIEW_METHOD
from cluster.client import Client
from cluster.frontend import FrontEnd
from cluster.metrics import Metrics
from cluster.metrics_server import MetricsConfig, MetricsServer
from cluster.page import Page
from cluster.server import Server, ServerConfig
from cluster.serving import Serving
from scheduler.actor import Liveness, SchedulerActor
from scheduler.events import SchedulerConfig
from tests.fake_link import VOCAB_SIZE
from tests.oracle import ToyModel
from tests.served import TINY, tiny_model
from tests.whole_stack import BLOCK_SIZE, MAX_MODEL_LEN, InProcessLink, InProcessWorker, OutOfOrderPort
from worker.draft_model import DraftModelDrafter
from worker.drafter import NgramDrafter
from worker.mixture import MixedDrafter, PreferLookup
from worker.runner import Runner

NUM_BLOCKS, NUM_DRAFT_BLOCKS = 160, 96


class SlowRunner(Runner):
    """Takes as long as a larger model would."""

    verify_s = 0.0

    def _verify(self, frames: Any, started_ns: int) -> Any:
        time.sleep(self.verify_s)
        return super()._verify(frames, started_ns)


class SlowDrafter(MixedDrafter):
    """Likewise: lookup, and a draft model that agrees with the target now and then, with a pool of its own."""

    draft_s = 0.0

    def propose(self, rows: Any, num_propose: Any) -> list[list[int]]:
        time.sleep(self.draft_s)
        return super().propose(rows, num_propose)


@dataclass(slots=True, eq=False)
class LiveStack:
    """What runs, and where the page is."""

    scheduler: SchedulerActor
    link: InProcessLink
    client: Client
    pages: MetricsServer

    @property
    def url(self) -> str:
        return f"http://{self.pages.address}"

    async def load(self, concurrency: int, rng: random.Random) -> None:
        """Clients one after the other, on so many streams, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for index in range(concurrency):
                group.create_task(self._client(index, random.Random(rng.random())))

    async def _client(self, index: int, rng: random.Random) -> None:
        shared = [5 + (i * 7) % 200 for i in range(24)]
        for turn in range(1_000_000):
            name = f"chat-{index}-{turn}"
            prompt = shared[: rng.choice((0, 16, 24))] + [rng.randrange(5, 250) for _ in range(rng.randrange(4, 40))]
            answer = self.client.generate(
                prompt, request_id=name, max_tokens=rng.randrange(40, 160), temperature=0.0, ignore_eos=True
            )
            with suppress(grpc.aio.AioRpcError):
                await answer.aresult()
            if rng.random() < 0.3:
                await self.client.apreempt(f"chat-{rng.randrange(index + 1)}-{turn}")


@asynccontextmanager
async def live_stack(
    *,
    num_workers: int = 2,
    verify_s: float = 0.0,
    draft_s: float = 0.0,
    listen: ServerConfig | None = None,
    token: str | None = None,
) -> AsyncIterator[LiveStack]:
    """Up, with nothing to do yet."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        max_drafts=4,
        largest_pool_blocks=NUM_BLOCKS,
    )
    workers = {f"worker-{index}": _worker(f"worker-{index}", verify_s, draft_s) for index in range(num_workers)}
    link = InProcessLink()
    front_end = FrontEnd(link, tokenizer=TINY, draw_seed=partial(random.Random(1).getrandbits, 64))
    model = tiny_model(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, max_num_seqs=16)
    server = Server(Serving(front_end=front_end, model=model, tokenizer=TINY), listen)
    await server.start()
    page = Page(front_end, model.name, lambda shown: server.guard.admits(VIEW_METHOD, shown))
    pages = MetricsServer(Metrics(front_end, server.guard), MetricsConfig(), page)
    await pages.start()
    scheduler = SchedulerActor(config, workers, Liveness(tick_s=0.005, heartbeat_s=0.05))
    front_end.scheduler_restarted(await scheduler.connect(front_end.name, OutOfOrderPort(front_end)))
    link.scheduler = scheduler
    try:
        async with Client(server.address, token=token) as client:
            yield LiveStack(scheduler, link, client, pages)
    finally:
        await pages.stop()
        await server.stop(0.0)
        await scheduler.stop()
        for worker in workers.values():
            worker.close()


def _worker(worker_id: str, verify_s: float, draft_s: float) -> InProcessWorker:
    size = {"vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE}
    draft_model = ToyModel(num_blocks=NUM_DRAFT_BLOCKS, last_token_weight=60.0, **size)
    draft_model.max_model_len = MAX_MODEL_LEN
    own = DraftModelDrafter(draft_model, max_drafts=2, max_num_seqs=8, vocab_size=VOCAB_SIZE)
    lookup = NgramDrafter(max_drafts=4, prompt_lookup_min=3, prompt_lookup_max=4, max_model_len=MAX_MODEL_LEN)
    drafter = SlowDrafter(lookup, own, PreferLookup())
    model = ToyModel(num_blocks=NUM_BLOCKS, last_token_weight=150.0, **size)
    runner = SlowRunner(worker_id=worker_id, model=model, drafter=drafter, max_num_seqs=8, sanitizer=None)
    runner.verify_s, drafter.draft_s = verify_s, draft_s
    return InProcessWorker(runner)
