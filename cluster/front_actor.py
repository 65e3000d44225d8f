"""The actor of one front end: a gRPC server and the streams behind it, on one event loop."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from cluster.admin_service import VIEW_METHOD
from cluster.frontend import FrontEnd, RequestObserver
from cluster.link import RaySchedulerLink
from cluster.logs import LogConfig
from cluster.metrics import Metrics
from cluster.metrics_server import MetricsConfig, MetricsServer
from cluster.page import Page
from cluster.ray_watch import PROBE_EVERY_S, RayPart, RayWatch
from cluster.request_log import RequestLog
from cluster.served_model import ServedModel
from cluster.server import Server, ServerConfig
from cluster.serving import Serving
from cluster.text import Tokenizer, load_tokenizer
from scheduler.actor import SchedulerActor
from worker.actor import unpack

if TYPE_CHECKING:
    from cluster.spans import Spans

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndSpec:
    """Everything a front end builds itself from: plain values, so that they travel."""

    name: str
    server: ServerConfig
    metrics: MetricsConfig | None  # None: off
    directory: str  # of the model
    model_name: str
    max_model_len: int
    block_size: int
    max_num_seqs: int  # running at once on all workers
    dtype: str
    seed: int | None  # of the seeds drawn for requests that bring none; None: of the system
    logs: LogConfig = field(default_factory=LogConfig)
    traces_endpoint: str | None = None  # of an OTLP receiver; None: no spans
    ray_parts: tuple[RayPart, ...] = ()  # without which there is no scheduler for long


class FrontEndActor:
    """One gRPC front end. Its streams die with it; clients resume them there or at another one."""

    def __init__(self, spec: FrontEndSpec) -> None:
        self._spec = spec
        spec.logs(spec.name)
        self._front_end: FrontEnd | None = None
        self._server: Server | None = None
        self._metrics: MetricsServer | None = None
        self._following: asyncio.Task[None] | None = None  # the scheduler
        self._spans: Spans | None = None
        self._closed_because = "the scheduler is lost"
        self._watching: asyncio.Task[None] | None = None  # Ray

    async def load(self) -> None:
        """Read the tokenizer. `ValueError` says what is wrong with it."""
        self._tokenizer = _tokenizer_of(Path(self._spec.directory))

    async def start(self, scheduler: "ActorHandle[SchedulerActor]", port: int | None = None) -> int:
        """Connect to the scheduler and answer requests; the port. `ValueError` when it is taken.

        `port`: where a process of this name listened before.
        """
        link = RaySchedulerLink(scheduler)
        self._front_end = FrontEnd(
            link,
            name=self._spec.name,
            tokenizer=self._tokenizer,
            draw_seed=_seeds(self._spec.seed, self._spec.name),
            observers=self._observers(),
        )
        me = ray.get_runtime_context().current_actor
        connection = await link.connect(self._front_end, me)
        serving = Serving(front_end=self._front_end, model=self._model(), tokenizer=self._tokenizer)
        config = self._spec.server if port is None else replace(self._spec.server, port=port)
        self._server = Server(serving, config)
        port = await self._server.start()
        if self._spec.metrics is not None:
            guard = self._server.guard
            page = Page(self._front_end, self._spec.model_name, lambda token: guard.admits(VIEW_METHOD, token))
            self._metrics = MetricsServer(Metrics(self._front_end, guard, self._spans), self._spec.metrics, page)
            await self._metrics.start()
        self._following = asyncio.get_running_loop().create_task(link.follow(self._front_end, me, connection))
        self._watching = asyncio.get_running_loop().create_task(self._watch_ray())
        return port

    async def deliver(self, connection: int, seq: int, packed: bytes) -> None:
        """What one scheduler event means for this front end's streams: packed messages."""
        assert self._front_end is not None
        self._front_end.deliver(seq, unpack(packed), connection)

    async def wait_until_closed(self) -> str | None:
        """Why this front end can serve no more, once it cannot; None at once if it was not told to start."""
        if self._following is None:
            return None
        await asyncio.wait({self._following})
        return self._closed_because

    async def metrics_address(self) -> str | None:
        """HOST:PORT of the metrics, once started; None when they are off."""
        return None if self._metrics is None else self._metrics.address

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let streams end within the grace, close the port."""
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._metrics is not None:
            await self._metrics.stop()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.stop)
        for task in (self._following, self._watching):
            if task is not None:
                task.cancel()

    async def _watch_ray(self) -> None:
        """Ends the streams once Ray is lost; `serve` watches for itself."""
        assert self._front_end is not None
        assert self._following is not None
        watch = RayWatch(self._spec.ray_parts)
        while (lost := await asyncio.to_thread(watch.lost)) is None:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(PROBE_EVERY_S)
        self._closed_because = lost
        self._following.cancel()  # a scheduler that still answers is no hope
        self._front_end.scheduler_lost(lost)

    def _observers(self) -> list[RequestObserver]:
        observers: list[RequestObserver] = [RequestLog(self._tokenizer, prompts=self._spec.logs.prompts)]
        if self._spec.traces_endpoint is not None:
            from cluster.spans import Spans  # of an extra

            self._spans = Spans(
                self._spec.traces_endpoint, front_end=self._spec.name, model_name=self._spec.model_name
            )
            observers.append(self._spans)
        return observers

    def _model(self) -> ServedModel:
        return ServedModel.from_directory(
            Path(self._spec.directory),
            name=self._spec.model_name,
            max_model_len=self._spec.max_model_len,
            block_size=self._spec.block_size,
            max_num_seqs=self._spec.max_num_seqs,
            dtype=self._spec.dtype,
        )


def _seeds(seed: int | None, name: str) -> Callable[[], int]:
    """Draws the seeds of requests: the same ones again for the same seed, and others in each front end."""
    source = random.SystemRandom() if seed is None else random.Random(f"{seed} {name}")
    return lambda: source.getrandbits(64)


def _tokenizer_of(directory: Path) -> Tokenizer | None:
    """None for a model that comes without a tokenizer: token ids in, token ids out."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(directory)
