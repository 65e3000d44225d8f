"""The gRPC transport between the scheduler and its workers: one bidirectional stream to each worker.

Ray still creates, restarts and registers workers; a registration tells where the worker's process listens
and the secret it wants to hear. Plans go one way and answers the other, one to each plan, both numbered.
A stream that breaks is opened again and its plans are sent again: the worker does not run them twice.
HTTP/2's windows are the flow control; with a handful of steps in flight they never fill.
"""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from cluster import ray_tls
from cluster.link import RayWorkerPort, worker_up
from cluster.status import told
from cluster.step_codec import (
    Answer,
    NumberedPlan,
    decode_answer,
    decode_health,
    decode_plan,
    encode_answer,
    encode_health,
    encode_plan,
)
from scheduler.actor import StepRaised, WorkerUnreachable
from scheduler.events import WorkerUp
from scheduler.step import StepPlan, StepResult
from worker.actor import Endpoint, PlanTaker
from worker.session import StaleSession, StepError

SERVICE = "slipstream.worker.v1.Worker"
SECRET = "slipstream-secret"
MAX_CALLS = 8  # threads of a worker: one stream, health checks, and streams of schedulers that are gone
NUM_TRIES = 2  # of a plan, each on a stream of its own
KEEPALIVE_S = 5
COMMON_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
)
CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


# ---- the worker's side ----


class GrpcTransport:
    """A worker.actor.Transport. Plans are carried out on the thread of their stream."""

    def listen(self, worker: PlanTaker, host: str) -> Endpoint:
        """Any free port of this address; the secret is this process's own."""
        secret = secrets.token_hex(32)
        server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="steps"),
            options=SERVER_OPTIONS,
            interceptors=[_Secret(secret)],
        )
        server.add_generic_rpc_handlers([_handlers(worker)])
        credentials = ray_tls.server_credentials()
        address = f"{host}:0"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        server.start()
        self._server = server  # it stops when nobody holds it
        return Endpoint(address=f"{host}:{port}", secret=secret)


def _handlers(worker: PlanTaker) -> Any:
    def steps(plans: Iterable[NumberedPlan], _context: Any) -> Iterator[Answer]:
        return (_answer(worker, message) for message in plans)

    def health(_request: bytes, _context: Any) -> int | None:
        return worker.current_session()

    methods = {
        "Steps": grpc.stream_stream_rpc_method_handler(steps, decode_plan, encode_answer),
        "Health": grpc.unary_unary_rpc_method_handler(health, None, encode_health),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _answer(worker: PlanTaker, message: NumberedPlan) -> Answer:
    try:
        return Answer(number=message.number, results=worker.offer(message.plan))
    except StaleSession as error:
        return Answer(number=message.number, stale=str(error))
    except StepError as error:
        return Answer(number=message.number, failed=str(error))


class _Secret(grpc.ServerInterceptor):  # type: ignore[misc]
    """Lets nobody in who was not told by a registration."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """The handler itself, or one that refuses."""
        for key, value in handler_call_details.invocation_metadata:
            if key == SECRET and hmac.compare_digest(value.encode(), self._secret):
                return continuation(handler_call_details)
        return self._refusal


def _refuse(_messages: Any, context: Any) -> Iterator[bytes]:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is not the secret of this worker")
    yield b""


# ---- the scheduler's side ----


class GrpcWorkerPort:
    """The scheduler's way to a worker: a scheduler.actor.WorkerPort. Registers by Ray, all else by gRPC."""

    def __init__(self, name: str) -> None:
        """Of the worker's actor."""
        self._registrar = RayWorkerPort(name)
        self._connection: Connection | None = None

    async def register(self, session: int) -> WorkerUp:
        """Begin a session, on a connection of its own. Raises WorkerUnreachable."""
        registered = await self._registrar.registered(session)
        assert registered.endpoint is not None, "the worker has no transport but Ray's calls"
        before, self._connection = self._connection, Connection(registered.endpoint)
        if before is not None:
            await before.close()
        return worker_up(registered.traits, session)

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """Raises WorkerUnreachable or StepRaised."""
        return await self._there().step(plan)

    async def health(self) -> int | None:
        """The session the worker is in. Raises WorkerUnreachable."""
        return await self._there().health()

    async def restart(self) -> None:
        """End the worker's process; Ray begins another. Raises WorkerUnreachable."""
        await self._registrar.restart()

    async def prepare(self, weights: str) -> None:
        """Load weights that a plan will swap to. Raises ValueError when it cannot, or WorkerUnreachable."""
        await self._registrar.prepare(weights)

    async def weights(self) -> str | None:
        """What the worker was last swapped to. Raises WorkerUnreachable."""
        return await self._registrar.weights()

    async def draft_blocks(self) -> tuple[int, int] | None:
        """Blocks of its draft model's own pool, and how many are free. Raises WorkerUnreachable."""
        return await self._registrar.draft_blocks()

    def _there(self) -> "Connection":
        if self._connection is None:
            raise WorkerUnreachable("the worker has not registered")
        return self._connection


class StreamBroken(ConnectionError):
    """A stream ended before it brought an answer."""


class Connection:
    """One connection to one worker process and its stream. Lives on one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        credentials = ray_tls.channel_credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(endpoint.address, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(endpoint.address, credentials, CHANNEL_OPTIONS)
        self._metadata = ((SECRET, endpoint.secret),)
        self._open_steps = self._channel.stream_stream(f"/{SERVICE}/Steps", encode_plan, decode_answer)
        self._ask_health = self._channel.unary_unary(f"/{SERVICE}/Health", None, decode_health)
        self._stream: _Stream | None = None
        self._closed = False

    async def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """Raises WorkerUnreachable or StepRaised."""
        why = "the connection was closed"
        for _ in range(NUM_TRIES):
            if self._closed:
                break
            if self._stream is None or self._stream.broken:
                self._stream = _Stream(self._open_steps(metadata=self._metadata))
            try:
                answer = await self._stream.exchange(plan)
            except StreamBroken as error:
                why = str(error)
                continue
            if answer.stale is not None:
                raise WorkerUnreachable(answer.stale)
            if answer.failed is not None:
                raise StepRaised(answer.failed)
            return answer.results
        raise WorkerUnreachable(why)

    async def health(self) -> int | None:
        """The session the worker is in. Raises WorkerUnreachable."""
        try:
            session: int | None = await self._ask_health(b"", metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnreachable(told(error)) from error
        return session

    def break_stream(self) -> None:
        """As a network would; the next plan opens another."""
        if self._stream is not None:
            self._stream.close()

    async def close(self) -> None:
        """Whoever waits for an answer waits no longer."""
        self._closed = True
        self.break_stream()
        await self._channel.close()


class _Stream:
    """One call of Steps: numbers plans and hands each its answer."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._waiting: dict[int, asyncio.Future[Answer | str]] = {}  # by number: the answer, or why there is none
        self._next_number = 0
        self._writing = asyncio.Lock()  # one write at a time, says gRPC
        self._why: str | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def broken(self) -> bool:
        """Whether it brings no answer any more."""
        return self._why is not None

    async def exchange(self, plan: StepPlan) -> Answer:
        """Raises StreamBroken."""
        if self._why is not None:
            raise StreamBroken(self._why)
        number, self._next_number = self._next_number, self._next_number + 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._writing:
                await self._call.write(NumberedPlan(number, plan))
            answered: Answer | str = await answer
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The latter says only that the call has ended.
            why = f"{(await self._call.code()).name}: {await self._call.details()}"
            self._end(why)
            raise StreamBroken(why) from error
        finally:
            del self._waiting[number]
            answer.cancel()  # it is not awaited where the write failed
        if isinstance(answered, str):
            raise StreamBroken(answered)
        return answered

    def close(self) -> None:
        """End the call."""
        self._call.cancel()
        self._end("the connection was closed")

    async def _read(self) -> None:
        why = "the worker ended the stream"
        try:
            async for answer in self._call:
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except grpc.aio.AioRpcError as error:
            why = told(error)
        except asyncio.CancelledError:
            why = "the call was cancelled"
        self._end(why)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(self._why)


