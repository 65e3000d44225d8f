"""`slipstream stress`: a mixed load, faults and kills against a whole deployment, and every stream verified.

Streams are compared with undisturbed references, blocks and counters must settle at the end, and nothing
may be lost. Knows the deployment from outside: over its ports, and by its processes' ids.
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from rich.console import Console

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import ServeConfig
from cluster.errors import ServerError
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import size
from cluster.status import told
from cluster.stress_kill import Killer, check_kinds
from cluster.stress_load import Asked, References, Stream, make_requests
from cluster.stress_report import Progress, Totals, print_report, show

NUM_REQUESTS = 40  # different ones, each asked again and again
RESUME_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 30.0
LEAVE_SHARE = 0.05  # of the streams, left by their client on the way
PREEMPT_EVERY_S = 0.25
RESET_EVERY_S = 1.5
POLL_S = 0.25
LOOK_AGAIN_S = 0.05  # for something worth killing
ONE_IN = 10  # greedy streams held against transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class StressConfig:
    """What to do to which deployment."""

    serve: ServeConfig  # as it is started, or as the running one was
    endpoints: tuple[str, ...] = ()  # of a running one; empty: it is started here
    root: int | None = None  # the process that serves it
    seconds: float = 60.0
    kill: tuple[str, ...] = ()
    kill_every_s: float = 6.0
    preempt: bool = False
    reset: bool = False
    concurrency: int = 12  # streams at once
    seed: int = 0


def run_stress(config: StressConfig, *, as_json: bool) -> int:
    """Start or join, load, disturb, verify, report. The exit code: 1 on any violation."""
    check_kinds(config.kill)
    with Display() as display:
        directory = resolve_model(config.serve.model, display)
        sizes = size(config.serve, directory)
        requests = make_requests(NUM_REQUESTS, sizes, config.seed)
        with display.phase("Computing what every stream must be"):
            references = References(sizes, requests)
        deployment = None if config.endpoints else Deployment(config.serve, directory, display.phase)
        if deployment is not None:
            display.warn(deployment.warnings)
    ended: list[str] = []
    stopping = threading.Event()
    keeper = threading.Thread(target=_keep, args=(deployment, stopping, ended))
    try:
        keeper.start()
        stress = Stress(config, deployment.endpoints if deployment else config.endpoints, references, requests)
        asyncio.run(stress.run(Console(stderr=True)))
    finally:
        stopping.set()
        keeper.join()
        if deployment is not None:
            deployment.stop(1.0)
    if ended:
        raise ServerError(f"the deployment ended by itself: {ended[0]}")
    report = stress.report(with_transformers=sizes.dtype == "float32")
    print_report(report, stress.stories, as_json=as_json)
    return int(bool(stress.stories))


def _keep(deployment: Deployment | None, stopping: threading.Event, ended: list[str]) -> None:
    """Starts front ends again, as `serve` does."""
    while deployment is not None and not stopping.is_set():
        why = deployment.wait(POLL_S)
        if why is not None:
            ended.append(why)
            return


class Stress:
    """One run against one deployment."""

    def __init__(
        self, config: StressConfig, endpoints: Sequence[str], references: References, requests: Sequence[Asked]
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        self._references = references
        self._requests = requests
        self._rng = random.Random(config.seed)
        self._streams: list[Stream] = []
        self._open: dict[str, Stream] = {}
        self._totals = Totals()
        self._began_s = time.monotonic()
        self._happened: list[str] = []  # kills, latest last
        self._leaked = 0
        self._killer: Killer | None = None
        self.stories: list[str] = []  # of what went wrong

    def progress(self) -> Progress:
        """How it goes, now."""
        return Progress(
            elapsed_s=time.monotonic() - self._began_s,
            seconds=self._config.seconds,
            num_over=sum(stream.is_over for stream in self._streams),
            num_open=len(self._open),
            num_tokens=sum(len(stream.token_ids) for stream in self._streams),
            sums=self._totals.sums(),
            happened=self._happened,
        )

    async def run(self, console: Console) -> None:
        """Load and disturb for so long, then wait until everything has ended and settled."""
        self._clients = [Client(address) for address in self._endpoints]
        try:
            await self._begin()
            self._began_s = time.monotonic()
            readers = [asyncio.create_task(self._read_on(index)) for index in range(self._config.concurrency)]
            others = [asyncio.create_task(work()) for work in self._disturbances()]
            everything = asyncio.gather(*readers)
            showing = asyncio.create_task(show(console, self.progress))
            try:
                async with asyncio.timeout(self._config.seconds + DRAIN_TIMEOUT_S):
                    await everything
            except TimeoutError:
                pass  # what is still open is lost
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._settle()
            await self._verify()
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        finally:
            for client in self._clients:
                await client.aclose()

    # ---- load ----

    async def _begin(self) -> None:
        stats = (await self._clients[0].astats())["scheduler"]
        if len(stats["workers"]) != self._config.serve.data_parallel_size:
            raise ServerError(f"{len(stats['workers'])} workers are up, not {self._config.serve.data_parallel_size}")
        self._references.check_numbers([worker["fingerprint"] for worker in stats["workers"]])

    @property
    def _is_time_up(self) -> bool:
        return time.monotonic() - self._began_s >= self._config.seconds

    async def _read_on(self, index: int) -> None:
        """One client: one stream after the other."""
        client = self._clients[index % len(self._clients)]
        while not self._is_time_up:
            asked = self._rng.choice(self._requests)
            stream = Stream(f"stress-{len(self._streams)}", asked, client.address)
            self._streams.append(stream)
            self._open[stream.request_id] = stream
            try:
                await self._read(client, stream)
            finally:
                del self._open[stream.request_id]

    async def _read(self, client: Client, stream: Stream) -> None:
        leaves_at = stream.asked.max_tokens
        if self._rng.random() < LEAVE_SHARE:
            leaves_at = self._rng.randrange(1, stream.asked.max_tokens)
        generation = client.generate(
            stream.asked.prompt,
            request_id=stream.request_id,
            resume=True,
            resume_timeout_s=RESUME_TIMEOUT_S,
            **stream.asked.options(),
        )
        outputs = generation.__aiter__()
        try:
            async for output in outputs:
                stream.took(output.offset, output.token_ids)
                if output.finish is not None:
                    stream.reason, stream.inexact = output.finish.reason, output.finish.inexact
                elif len(stream.token_ids) >= leaves_at:
                    stream.left = True
                    break
        except grpc.aio.AioRpcError as error:
            stream.error = told(error)
        except ValueError as error:
            stream.error = str(error)  # the client's own gate
        finally:
            stream.num_repeated = generation.num_repeated_tokens
            await outputs.aclose()

    # ---- disturbances ----

    def _disturbances(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        config = self._config
        works: list[Callable[[], Coroutine[None, None, None]]] = [self._count]
        if config.preempt:
            works.append(lambda: self._every(PREEMPT_EVERY_S, self._preempt))
        if config.reset:
            works.append(lambda: self._every(RESET_EVERY_S, self._reset))
        if config.kill:
            root = os.getpid() if config.root is None else config.root
            self._killer = Killer(
                root=root,
                clients=self._clients,
                num_workers=config.serve.data_parallel_size,
                kinds=config.kill,
                rng=self._rng,
                streams=lambda: list(self._open.values()),
            )
            works.append(self._kill)
        return works

    async def _every(self, pause_s: float, disturb: Callable[[Client], Coroutine[None, None, None]]) -> None:
        while not self._is_time_up:
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
            try:
                await disturb(self._rng.choice(self._clients))
            except grpc.aio.AioRpcError:
                continue  # whoever would have been told is away

    async def _preempt(self, client: Client) -> None:
        if self._open:
            await client.apreempt(self._rng.choice(list(self._open)))

    async def _reset(self, client: Client) -> None:
        await client.areset_prefix_cache(reset_running=self._rng.random() < 0.7)

    async def _kill(self) -> None:
        assert self._killer is not None
        wait_s = self._config.kill_every_s
        while not self._is_time_up:
            await asyncio.sleep(wait_s)
            killed = await self._killer.kill_next()
            wait_s = LOOK_AGAIN_S
            if killed is not None:
                self._happened.append(f"{time.monotonic() - self._began_s:.0f} s: {killed}")
                wait_s = self._config.kill_every_s * self._rng.uniform(0.5, 1.0)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for client in self._clients:
                try:
                    self._totals.take((await client.astats())["scheduler"])
                    break
                except grpc.aio.AioRpcError:
                    continue

    # ---- verdict ----

    async def _settle(self) -> None:
        """Every worker is back, every frame settles, every block comes back, nothing is owed."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        left = "no front end answers"
        while time.monotonic() < deadline_s:
            try:
                stats = (await self._clients[0].astats())["scheduler"]
            except grpc.aio.AioRpcError:
                await asyncio.sleep(POLL_S)
                continue
            self._totals.take(stats)
            workers = stats["workers"]
            self._leaked = sum(worker["num_blocks"] - worker["num_free_blocks"] for worker in workers)
            owed = {name: stats[name] for name in ("num_running", "num_waiting", "placeholders")}
            owed |= {"leaked_blocks": self._leaked, "async_tokens_to_discard": stats["async_tokens_to_discard"]}
            owed["steps_in_flight"] = sum(worker["num_steps_in_flight"] for worker in workers)
            owed["workers_away"] = self._config.serve.data_parallel_size - len(workers)
            left = ", ".join(f"{name} {count}" for name, count in owed.items() if count)
            if not left:
                return
            await asyncio.sleep(POLL_S)
        self.stories.append(f"after the last stream it does not settle: {left}")

    async def _verify(self) -> None:
        for stream in self._streams:
            problem = self._problem_with(stream)
            if problem is not None:
                self.stories.append(await self._story(stream, problem))

    def _problem_with(self, stream: Stream) -> str | None:
        if stream.error is not None:
            return f"it ended with an error: {stream.error}"
        if not stream.is_over:
            return "it never ended"
        if stream.num_repeated:
            return f"{stream.num_repeated} tokens came again"
        return self._references.problem_with(stream)

    async def _story(self, stream: Stream, problem: str) -> str:
        try:
            story = await self._clients[0].astory(stream.request_id)
        except grpc.aio.AioRpcError:
            story = "the scheduler could not be asked"
        told = "\n  ".join([*stream.log, *story.splitlines()])
        return f"{stream.request_id} ({len(stream.token_ids)} tokens): {problem}\n  asked: {stream.asked}\n  {told}"

    def report(self, *, with_transformers: bool) -> dict[str, Any]:
        """The fields of the JSON line. Adds what transformers find to the stories."""
        if with_transformers:
            self._compare_with_transformers()
        streams, sums, killer = self._streams, self._totals.sums(), self._killer
        wrong = sum(self._references.problem_with(stream) is not None for stream in streams)
        ended = [stream for stream in streams if stream.is_over and stream.error is None]
        pauses = [end - begin for stream in streams for begin, end in stream.pauses]
        return {
            "requests": len(streams),
            "tokens": sum(len(stream.token_ids) for stream in streams),
            "identical": sum(self._problem_with(stream) is None for stream in streams),
            "wrong": wrong,
            "lost": len(streams) - len(ended),
            "repeated": sum(stream.num_repeated for stream in streams),
            "leaked_blocks": self._leaked,
            "stale_tokens_dropped": sums["stale_tokens_dropped"],
            "tokens_salvaged": sums["tokens_salvaged"],
            "kills": killer.counted if killer else {},
            "kills_that_hit_no_stream": killer.num_missed if killer else 0,
            "longest_pause_s": round(max(pauses, default=0.0), 2),
            "longest_pause_s_by_kill": killer.longest_pauses_s(streams) if killer else {},
            "longest_return_s_by_kill": killer.longest_return_s if killer else {},
            "left_by_client": sum(stream.left for stream in streams),
            "inexact": sum(stream.inexact for stream in streams),
            "compared_with_transformers": self._references.num_compared,
            "preemptions": sums["preemptions"],
            "plans_resent": sums["plans_resent"],
            "stale_results": sums["stale_results"],
            "violations": len(self.stories),
            "seconds": self._config.seconds,
            "transport": self._config.serve.transport,
            "seed": self._config.seed,
        }

    def _compare_with_transformers(self) -> None:
        plain = [stream for stream in self._streams if stream.asked.is_plain and stream.reason is not None]
        for stream in plain[::ONE_IN]:
            problem = self._references.problem_with_transformers(stream)
            if problem is not None:
                self.stories.append(f"{stream.request_id}: {problem}\n  asked: {stream.asked}")
