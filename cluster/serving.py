"""What every service of one port shares: the model, the front end, and whether requests are taken."""

import asyncio
import time
from dataclasses import replace
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cluster.call import Call, StreamError
from cluster.frontend import FrontEnd
from cluster.guard import current_caller
from cluster.served_model import ServedModel
from cluster.text import Tokenizer
from cluster.tokens import Caller
from cluster.validate import ClientRequest, checked

HEALTH_TIMEOUT_S = 2.0
RETRY_AFTER_MS = 1000
SLOWEST_READER_S = 60.0


class State(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Serving:
    """One model served through one front end."""

    def __init__(
        self,
        *,
        front_end: FrontEnd,
        model: ServedModel,
        tokenizer: Tokenizer | None,
        slowest_reader_s: float = SLOWEST_READER_S,
    ) -> None:
        """A client that takes longer than `slowest_reader_s` to make room for a message loses its stream."""
        self.front_end = front_end
        self.model = model
        self.tokenizer = tokenizer
        self.slowest_reader_s = slowest_reader_s
        self.version = _version()
        self.state = State.STARTING
        self.started_s = time.monotonic()
        self.last_request_s = 0.0  # wall clock; 0: none yet

    async def open(self, client: ClientRequest, *, traceparent: str | None = None) -> Call:
        """Checks and submits. Raises ValueError for a bad request, StreamError when it is not taken.

        traceparent: the client's span, as W3C writes it.
        """
        self.last_request_s = time.time()
        try:
            return await self._open(client, current_caller(), traceparent)
        except (ValueError, StreamError) as error:
            code = error.code if isinstance(error, StreamError) else "INVALID_ARGUMENT"
            self.front_end.latency.num_failed[code] += 1
            for observer in self.front_end.observers:
                observer.rejected(client.request_id, error)
            raise

    async def _open(self, client: ClientRequest, caller: Caller, traceparent: str | None) -> Call:
        if self.state is not State.SERVING:
            raise StreamError("UNAVAILABLE", f"the server is {self.state.value}", RETRY_AFTER_MS)
        self._check_concurrency(caller, caller.scoped(client.request_id), 1)  # before any text is encoded
        request = await checked(client, self.model, self.tokenizer)
        if caller.tenant is not None:  # a token's tenant, whatever the request says
            request = replace(request, tenant=caller.tenant, request_id=caller.scoped(request.request_id))
        self._check_concurrency(caller, request.request_id, request.n)
        return self.front_end.open(request, traceparent=traceparent)

    async def why_not_ready(self) -> str | None:
        """Why requests would not be answered now; None when they would: it takes them and the scheduler answers."""
        if self.state is not State.SERVING:
            return f"the server is {self.state.value}"
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.front_end.scheduler_stats()
        except (ConnectionError, TimeoutError) as error:
            return f"the scheduler does not answer: {error}"
        return None

    async def write(self, context: Any, message: Any) -> None:
        """Waits while flow control holds a slow reader's stream back, but not without end. Raises StreamError."""
        try:
            async with asyncio.timeout(self.slowest_reader_s):
                await context.write(message)
        except TimeoutError as error:
            late = f"the client read nothing for {self.slowest_reader_s:g} s"
            raise StreamError("RESOURCE_EXHAUSTED", late, RETRY_AFTER_MS) from error

    async def cancel(self, request_id: str) -> bool:
        """Ends a request of the caller's; False if it is not open."""
        return await self.front_end.cancel(current_caller().scoped(request_id))

    async def preempt(self, request_id: str) -> None:
        """Takes a request off its worker. An operator names another tenant's as `TENANT/REQUEST_ID`."""
        await self.front_end.preempt(current_caller().scoped(request_id))

    async def story(self, request_id: str) -> str:
        """What the scheduler remembers of a request, named as for `preempt`."""
        return await self.front_end.story(current_caller().scoped(request_id))

    def _check_concurrency(self, caller: Caller, request_id: str, n: int) -> None:
        if caller.tenant is None or caller.max_concurrent is None:
            return
        # A higher attempt takes the place of the one it resumes.
        if self.front_end.num_open_choices(caller.tenant, other_than=request_id) + n > caller.max_concurrent:
            raise StreamError(
                "RESOURCE_EXHAUSTED",
                f"this tenant's limit is {caller.max_concurrent} choices at once",
                RETRY_AFTER_MS,
            )


def _version() -> str:
    try:
        return version("slipstream")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
