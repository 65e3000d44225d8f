"""The shell around the core without Ray: real core, real session queues, toy workers behind in-process ports."""

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from cluster.faults import Faults, FaultyWorkerPort
from cluster.grpc_link import Connection, GrpcTransport
from scheduler.actor import Liveness, Message, SchedulerActor, StepRaised, WorkerPort, WorkerUnreachable
from scheduler.events import EmitTokens, FinishRequest, RejectRequest, SchedulerConfig, WorkerUp
from scheduler.request import FinishReason, RejectCode, Request, SamplingParams
from scheduler.step import StepPlan, StepResult
from tests.certificates import Authority
from tests.simulate import worker as toy_worker
from tests.simulate.toy import chain, next_token
from worker.session import SessionQueue, StaleSession, StepError

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_DRAFTS = 3
NO_FAULTS = Faults()
BUDGET = 64  # tokens of one step
Value = TypeVar("Value")


class ToyWorkerPort:
    """A WorkerPort to a toy worker in this process, which can be killed, paused and broken."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.alive = True
        self.running = asyncio.Event()
        self.running.set()
        self.num_sessions = 0
        self.num_restarts = 0
        self._queue = SessionQueue(self._new_executor())
        self._session: int | None = None
        self.prepared: str | None = None
        self.swapped: str | None = None
        self.fail_at: int | None = None  # step_seq

    async def restart(self) -> None:
        """The process comes back empty, in no session."""
        self.come_back()
        self.num_restarts += 1

    def come_back(self) -> None:
        self._queue = SessionQueue(self._new_executor())
        self._session = None
        self.alive = True
        self.running.set()

    async def register(self, session: int) -> WorkerUp:
        await self.reach()
        self._queue.begin(session)
        self._session = session
        self.num_sessions += 1
        return WorkerUp(
            worker_id=self.worker_id, session=session, num_blocks=NUM_BLOCKS, max_num_seqs=8, max_drafts=MAX_DRAFTS
        )

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        await self.reach()
        try:
            return self.offer(plan)
        except StaleSession as error:
            raise WorkerUnreachable(str(error)) from error
        except StepError as error:
            raise StepRaised(str(error)) from error

    async def health(self) -> int | None:
        await self.reach()
        return self._session

    async def prepare(self, weights: str) -> None:
        await self.reach()
        if "broken" in weights:
            raise ValueError(f"{weights}: is damaged")
        self.prepared = weights

    async def weights(self) -> str | None:
        return self.swapped

    async def draft_blocks(self) -> tuple[int, int] | None:
        return None

    def offer(self, plan: StepPlan) -> list[StepResult]:
        """What the worker's own process does with a plan."""
        self.swapped = plan.weights or self.swapped
        if self.fail_at == plan.step_seq:
            self.fail_at = None
            raise StepError(plan.session, plan.step_seq, "out of luck")
        return self._queue.offer(plan)

    @property
    def session(self) -> int | None:
        return self._session

    async def reach(self) -> None:
        await asyncio.sleep(0)
        await self.running.wait()
        if not self.alive:
            raise WorkerUnreachable(f"{self.worker_id} is dead")

    def _new_executor(self) -> toy_worker.ShadowWorker:
        return toy_worker.ShadowWorker(
            worker_id=self.worker_id,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_drafts=MAX_DRAFTS,
            drop_last_hit_block=False,
            max_num_batched_tokens=BUDGET,
            faults=toy_worker.Faults(),
            rng=random.Random(0),
            salts=defaultdict(int),
            poisoned=set(),
        )


class GrpcToyPort:
    """The same worker behind the gRPC transport: registered as Ray would, its plans and answers on a stream."""

    def __init__(self, toy: ToyWorkerPort) -> None:
        self._toy = toy
        self._transport = GrpcTransport()
        self._endpoint = self._transport.listen(Process(toy), "127.0.0.1")
        self.connection: Connection | None = None

    async def register(self, session: int) -> WorkerUp:
        worker_up = await self._toy.register(session)
        await self.close()
        self.connection = Connection(self._endpoint)
        return worker_up

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        await self._toy.reach()
        assert self.connection is not None
        return await self.connection.step(plan)

    async def health(self) -> int | None:
        await self._toy.reach()
        assert self.connection is not None
        return await self.connection.health()

    async def restart(self) -> None:
        await self._toy.restart()

    async def prepare(self, weights: str) -> None:
        await self._toy.prepare(weights)

    async def weights(self) -> str | None:
        return await self._toy.weights()

    async def draft_blocks(self) -> tuple[int, int] | None:
        return await self._toy.draft_blocks()

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()


class Process:
    """A worker.actor.PlanTaker: the toy as the thread of a stream sees it."""

    def __init__(self, toy: ToyWorkerPort) -> None:
        self._toy = toy
        self._turn = threading.Lock()

    def offer(self, plan: StepPlan) -> list[StepResult]:
        with self._turn:
            return self._toy.offer(plan)

    def current_session(self) -> int | None:
        return self._toy.session


class Inbox:
    """A FrontEndPort that keeps what each stream got."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.finished: dict[int, FinishRequest] = {}
        self.rejected: dict[int, RejectRequest] = {}
        self.seqs: list[int] = []
        self.alive = True
        self.refused = False

    async def deliver(self, connection: int, seq: int, messages: Sequence[Message]) -> None:
        if not self.alive:
            self.refused = True
            raise ConnectionError("gone")
        self.seqs.append(seq)
        for message in messages:
            match message:
                case EmitTokens():
                    self._take(message)
                case FinishRequest():
                    self.finished[message.stream] = message
                case RejectRequest():
                    self.rejected[message.stream] = message

    def _take(self, command: EmitTokens) -> None:
        bounds = np.cumsum(command.num_tokens).tolist()
        for stream, offset, stop, count in zip(
            command.streams.tolist(), command.offsets.tolist(), bounds, command.num_tokens.tolist(), strict=True
        ):
            taken = self.token_ids.setdefault(stream, [])
            assert offset == len(taken)
            taken.extend(command.token_ids[stop - count : stop].tolist())


async def until(condition: Callable[[], Value], timeout_s: float = 10.0) -> Value:
    """Waits for something the running tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):  # noqa: ASYNC110 - the shell offers no events to tests
            await asyncio.sleep(0.001)
    return value


def request(stream: int, *, max_tokens: int = 40, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    return Request(
        request_id=f"r{stream}",
        front_end="front",
        stream=stream,
        prompt_token_ids=np.array(prompt, np.int32),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=stream),
    )


def expected(asked: Request) -> list[int]:
    token_ids = asked.prompt_token_ids.tolist()
    outputs: list[int] = []
    while len(outputs) < asked.max_tokens:
        prefix = chain(token_ids + outputs)[-1]
        outputs.append(next_token(prefix, 0, asked.sampling.seed, frozenset(), False))
    return outputs


class World:
    """One life of the scheduler, its two workers and one front end."""

    def __init__(
        self,
        transport: str,
        faults: Faults = NO_FAULTS,
        max_waiting_tokens: int | None = None,
        worker_down_after_s: float = 30.0,  # a busy machine is no fault, unless a test is about silence
    ) -> None:
        self._max_waiting_tokens = max_waiting_tokens
        self._worker_down_after_s = worker_down_after_s
        self.workers = {worker_id: ToyWorkerPort(worker_id) for worker_id in ("a", "b")}
        self.inbox = Inbox()
        self.ports: dict[str, GrpcToyPort] = {}
        if transport == "grpc":
            self.ports = {worker_id: GrpcToyPort(worker) for worker_id, worker in self.workers.items()}
        self.carriers: Mapping[str, WorkerPort] = self.ports or self.workers
        if faults.any:
            self.carriers = {name: FaultyWorkerPort(port, faults, name) for name, port in self.carriers.items()}
        self.lives: list[SchedulerActor] = []
        self.scheduler = self.new_life()

    def new_life(self) -> SchedulerActor:
        """A scheduler that knows nothing yet."""
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_model_len=128,
            max_drafts=MAX_DRAFTS,
            max_num_batched_tokens=BUDGET,
            resend_after_ns=100_000_000,
        )
        life = SchedulerActor(
            config,
            self.carriers,
            Liveness(
                heartbeat_s=0.01, worker_down_after_s=self._worker_down_after_s, worker_hung_after_s=1.0, tick_s=0.005
            ),
            notices=["tried"],
            max_waiting_tokens=self._max_waiting_tokens,
        )
        self.lives.append(life)
        return life

    async def close(self) -> None:
        for life in self.lives:
            await life.stop()
        for port in self.ports.values():
            await port.close()

    async def num_workers(self) -> int:
        return len((await self.scheduler.stats()).workers)

    def notices_of(self, worker_id: str) -> list[str]:
        return [line for line in self.scheduler.notices() if f"worker {worker_id} " in line]

    async def finish(self, *asked: Request) -> None:
        await until(lambda: all(one.stream in self.inbox.finished for one in asked))
        for one in asked:
            assert self.inbox.token_ids[one.stream] == expected(one), await self.scheduler.story(one.request_id)
            assert self.inbox.finished[one.stream].reason is FinishReason.LENGTH


@pytest.fixture(params=["calls", "grpc"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(request.param)
    await world.scheduler.connect("front", world.inbox)
    yield world
    await world.close()


@pytest.fixture(params=["calls", "grpc"])
async def impatient_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(request.param, worker_down_after_s=1.0)
    await world.scheduler.connect("front", world.inbox)
    yield world
    await world.close()


async def test_requests_stream_from_two_workers_in_order(world: World) -> None:
    asked = [request(stream) for stream in range(8)]
    for one in asked:
        await world.scheduler.submit(one, None)
    await world.finish(*asked)
    assert world.inbox.seqs == sorted(world.inbox.seqs)
    assert {worker.num_sessions for worker in world.workers.values()} == {1}
    assert sum((await world.scheduler.stats()).queue_time.counts) == 8


async def test_a_worker_that_falls_silent_is_down_and_its_requests_go_on(impatient_world: World) -> None:
    world = impatient_world
    asked = [request(stream, max_tokens=100) for stream in range(4)]
    for one in asked:
        await world.scheduler.submit(one, None)
    await until(lambda: len(world.inbox.token_ids) == 4)
    world.workers["a"].running.clear()
    await world.finish(*asked)
    world.workers["a"].running.set()
    await until(lambda: world.workers["a"].num_sessions >= 2)


async def test_a_worker_that_hangs_is_ended_and_its_next_process_takes_work_again() -> None:
    world = World("calls", worker_down_after_s=0.3)
    await world.scheduler.connect("front", world.inbox)
    await until(lambda: world.workers["a"].num_sessions == 1)
    world.workers["a"].running.clear()  # and nobody sets it again but `restart`
    await until(lambda: world.workers["a"].num_sessions == 2)
    assert world.workers["a"].num_restarts == 1
    assert world.workers["b"].num_restarts == 0
    await world.close()


async def test_a_restarted_worker_registers_anew(world: World) -> None:
    await until(lambda: world.workers["a"].num_sessions == 1)
    world.workers["a"].alive = False
    await asyncio.sleep(0.02)
    world.workers["a"].come_back()
    await until(lambda: world.workers["a"].num_sessions == 2)
    asked = request(0)
    await world.scheduler.submit(asked, None)
    await world.finish(asked)


async def test_a_failed_step_ends_its_session_alone(world: World) -> None:
    world.workers["a"].fail_at = world.workers["b"].fail_at = 3
    asked = [request(stream) for stream in range(4)]
    for one in asked:
        await world.scheduler.submit(one, None)
    await world.finish(*asked)
    await until(lambda: max(worker.num_sessions for worker in world.workers.values()) == 2)


async def test_a_broken_stream_is_opened_again_within_its_session() -> None:
    world = World("grpc")
    await world.scheduler.connect("front", world.inbox)
    await until(lambda: {worker.num_sessions for worker in world.workers.values()} == {1})
    asked = [request(stream, max_tokens=100) for stream in range(4)]
    for one in asked:
        await world.scheduler.submit(one, None)

    def fewest() -> int:
        return min(len(world.inbox.token_ids.get(one.stream, ())) for one in asked)

    for num_tokens in (10, 30, 60):
        await until(partial(lambda least: fewest() >= least, num_tokens))
        for port in world.ports.values():
            assert port.connection is not None
            port.connection.break_stream()
    await world.finish(*asked)
    assert {worker.num_sessions for worker in world.workers.values()} == {1}
    await world.close()


@pytest.mark.parametrize("transport", ["calls", "grpc"])
@pytest.mark.parametrize("seed", range(3))
async def test_messages_late_repeated_reordered_and_lost_change_no_stream(transport: str, seed: int) -> None:
    world = World(transport, Faults(delay_ms="uniform:0:4", repeat=0.2, reorder=0.1, drop=0.15, seed=seed))
    await world.scheduler.connect("front", world.inbox)
    asked = [request(stream, max_tokens=30 + 5 * stream) for stream in range(6)]
    for one in asked:
        await world.scheduler.submit(one, None)
    await world.finish(*asked)
    stats = await world.scheduler.stats()
    assert stats.num_resends > 0
    assert stats.num_stale_results > 0
    assert {worker.num_sessions for worker in world.workers.values()} == {1}  # all of it repaired within them
    await world.close()


async def test_a_worker_cut_off_for_long_is_down_and_comes_back() -> None:
    world = World("calls", Faults(partition="2:0.8", seed=3), worker_down_after_s=0.4)
    await world.scheduler.connect("front", world.inbox)
    asked = [request(stream, max_tokens=60) for stream in range(80)]
    for one in asked:
        await world.scheduler.submit(one, None)
        await asyncio.sleep(0.05)
    await world.finish(*asked)
    assert max(worker.num_sessions for worker in world.workers.values()) >= 2
    await world.close()


async def test_a_worker_that_fails_over_and_over_is_told_of_until_it_lasts(impatient_world: World) -> None:
    world = impatient_world
    world.workers["a"].alive = False
    notices = await until(lambda: world.notices_of("a"))
    assert "failed 2 times in a row" in notices[0]
    assert (await world.scheduler.stats()).notices == ("tried", *notices)
    world.workers["a"].come_back()
    await until(lambda: not world.notices_of("a"))


async def test_new_weights_reach_every_worker_and_the_next_life(world: World) -> None:
    await until(lambda: all(worker.num_sessions == 1 for worker in world.workers.values()))
    with pytest.raises(ValueError, match="is damaged"):
        await world.scheduler.swap_weights("/models/broken")
    await world.scheduler.swap_weights("/models/other")
    [weights] = {worker.prepared for worker in world.workers.values()}
    assert weights is not None
    assert weights.endswith(" /models/other")
    await until(lambda: {worker.swapped for worker in world.workers.values()} == {weights})

    world.workers["a"].come_back()
    world.workers["a"].swapped = None
    second = world.new_life()
    await second.start()
    await until(lambda: world.workers["a"].swapped == weights)


async def test_a_queue_of_too_many_tokens_takes_no_first_attempt_more() -> None:
    world = World("calls", max_waiting_tokens=200)
    await world.scheduler.connect("front", world.inbox)
    for worker in world.workers.values():
        worker.alive = False  # nothing is ever planned
    for stream in range(3):
        await world.scheduler.submit(request(stream, max_tokens=80), None)
    rejection = await until(lambda: world.inbox.rejected.get(2))
    assert rejection is not None
    assert rejection.code is RejectCode.RESOURCE_EXHAUSTED
    assert rejection.retry_after_ms == 1000
    await world.scheduler.submit(replace(request(3, max_tokens=80), attempt=1), None)  # was admitted elsewhere
    assert (await world.scheduler.stats()).num_waiting == 3
    await world.scheduler.cancel("r0", 0)
    await world.scheduler.cancel("r3", 1)
    await world.scheduler.submit(request(4, max_tokens=80), None)
    assert (await world.scheduler.stats()).num_waiting == 2
    await world.close()


async def test_a_first_attempt_that_would_end_past_its_deadline_is_refused_at_once(world: World) -> None:
    learned = [request(stream) for stream in range(40)]  # more than there are rows: a queue that moves
    for one in learned:
        await world.scheduler.submit(one, None)
    await world.finish(*learned)
    await world.scheduler.submit(request(40), 1e-9)  # nobody waits: it may try
    for worker in world.workers.values():
        worker.alive = False  # nothing is planned any more
    for stream in range(41, 44):
        await world.scheduler.submit(request(stream, max_tokens=80), 1000.0)
    for attempt in (0, 1):
        await world.scheduler.submit(replace(request(44 + attempt, max_tokens=80), attempt=attempt), 1e-6)
    rejection = await until(lambda: world.inbox.rejected.get(44))
    assert rejection is not None
    assert rejection.code is RejectCode.RESOURCE_EXHAUSTED
    assert "its deadline is in 0.00 s" in rejection.message
    ended = await until(lambda: world.inbox.finished.get(45))  # it was admitted elsewhere
    assert ended is not None
    assert ended.reason is FinishReason.DEADLINE
    stats = await world.scheduler.stats()
    assert (stats.num_shed, stats.num_waiting) == (1, 3)


async def test_a_connection_whose_delivery_failed_is_forgotten_and_made_again(world: World) -> None:
    first = await world.scheduler.connection("front")
    world.inbox.alive = False
    await world.scheduler.submit(request(0, max_tokens=100), None)
    await until(lambda: world.inbox.refused)
    assert await world.scheduler.connection("front") is None
    world.inbox.alive = True
    world.inbox.token_ids.clear()
    second = await world.scheduler.connect("front", world.inbox)
    assert first is not None
    assert second > first
    asked = replace(request(0, max_tokens=50), attempt=1)
    await world.scheduler.submit(asked, None)
    await world.finish(asked)


async def test_a_worker_hears_nobody_without_its_secret() -> None:
    toy = ToyWorkerPort("a")
    await toy.register(7)
    transport = GrpcTransport()
    endpoint = transport.listen(Process(toy), "127.0.0.1")
    knows, guesses = Connection(endpoint), Connection(replace(endpoint, secret="0" * 64))
    assert await knows.health() == 7
    with pytest.raises(WorkerUnreachable, match="UNAUTHENTICATED"):
        await guesses.health()
    with pytest.raises(WorkerUnreachable, match="UNAUTHENTICATED"):
        await guesses.step(StepPlan(session=7, step_seq=0, acknowledged=-1))
    for connection in (knows, guesses):
        await connection.close()


async def test_ray_s_certificates_guard_the_stream_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyWorkerPort("a")
    await toy.register(7)
    authority, transport = Authority(tmp_path), GrpcTransport()
    pair = authority.issue()
    settings = {"USE_TLS": "1", "TLS_SERVER_CERT": pair.cert, "TLS_SERVER_KEY": pair.key, "TLS_CA_CERT": authority.ca}
    with monkeypatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"RAY_{name}", str(value))
        endpoint = transport.listen(Process(toy), "127.0.0.1")
        connection = Connection(endpoint)
    assert await connection.health() == 7
    plain = Connection(endpoint)
    with pytest.raises(WorkerUnreachable, match="UNAVAILABLE"):
        await plain.health()
    for one in (connection, plain):
        await one.close()


async def test_a_deadline_ends_a_request_in_the_core(world: World) -> None:
    for worker in world.workers.values():
        worker.running.clear()
    await world.scheduler.submit(request(0), 0.03)
    finish = await until(lambda: world.inbox.finished.get(0))
    assert finish is not None
    assert finish.reason is FinishReason.DEADLINE


async def test_requests_of_a_lost_front_end_are_ended(world: World) -> None:
    await world.scheduler.submit(request(0, max_tokens=100), None)
    world.inbox.alive = False
    await until(lambda: world.inbox.refused)
    with pytest.raises(ConnectionError, match="front end front is not connected"):
        await world.scheduler.submit(request(1), None)
    assert (await world.scheduler.stats()).num_running == 0


async def test_a_second_life_never_uses_a_session_of_the_first(world: World) -> None:
    await until(lambda: all(worker.num_sessions == 1 for worker in world.workers.values()))
    sessions = {stats.session for stats in (await world.scheduler.stats()).workers}
    second = SchedulerActor(SchedulerConfig(), world.workers)
    try:
        assert await second.start() != await world.scheduler.start()
        await until(lambda: all(worker.num_sessions >= 2 for worker in world.workers.values()))
        assert not sessions & {stats.session for stats in (await second.stats()).workers}
    finally:
        await second.stop()
