"""What every call passes before a service sees it: its token, and the patience with a call that never speaks.

Calls that are refused are refused at their first frame. One that is let in must send its message within
a timeout: a stream opened and left silent costs little, and not for long.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc

from cluster.call import StreamError
from cluster.status import decoded, refuse
from cluster.tokens import Caller, TokenFile

ANYONE = Caller()
SCHEME = "bearer"
MAX_TOKEN_BYTES = 4096

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def current_caller() -> Caller:
    """Who makes the call that is being answered."""
    return _caller.get()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The interceptor of one port."""

    def __init__(
        self,
        *,
        tokens: TokenFile | None,
        admin_tokens: TokenFile | None,
        admin: Callable[[str], bool],
        exempt: Callable[[str], bool],
        message_timeout_s: float,
    ) -> None:
        """`admin` and `exempt` tell by a method's full name what is for operators, and what needs no token.

        Without tokens nothing is asked. Without operators' tokens their calls need what all others need, unless
        several tenants share the server: then there are no operators.
        """
        self._tokens, self._admin_tokens = tokens, admin_tokens
        self._admin, self._exempt = admin, exempt
        self._message_timeout_s = message_timeout_s
        self.num_refused: Counter[str] = Counter()  # by status name

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The handler to use: the service's own behind the timeout, or one that refuses at once."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # UNIMPLEMENTED, which tells nothing
        method = handler_call_details.method
        try:
            caller = self._admitted(method, handler_call_details.invocation_metadata)
        except StreamError as error:
            self.num_refused[error.code] += 1
            return _refusing(error)
        if not _is_asynchronous(_behavior(handler)):
            return handler  # a generated default, which answers UNIMPLEMENTED
        return self._patient(handler, method, caller)

    def admits(self, method: str, token: str | None) -> bool:
        """Whether who shows this token, or none, may call this method."""
        try:
            self._admitted(method, [] if token is None else [("authorization", f"{SCHEME} {token}")])
        except StreamError as error:
            self.num_refused[error.code] += 1
            return False
        return True

    def _admitted(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Whose call it is. Raises StreamError."""
        if self._exempt(method):
            return ANYONE
        operators = self._admin_tokens is not None and self._admin(method)
        tokens = self._admin_tokens if operators else self._tokens
        if tokens is None:
            return ANYONE
        token = _bearer(metadata)
        caller = tokens.caller(token)
        if caller is not None and self._admin_tokens is None and self._admin(method) and tokens.num_tenants > 1:
            raise StreamError("PERMISSION_DENIED", "several tenants share this server, and it has no operators' tokens")
        if caller is not None:
            return ANYONE if operators else caller
        if operators and self._tokens is not None and self._tokens.caller(token) is not None:
            raise StreamError("PERMISSION_DENIED", "this call needs an operator's token")
        raise StreamError("UNAUTHENTICATED", "the token is not known")

    def _patient(self, handler: Any, method: str, caller: Caller) -> Any:
        """The same method, its first message awaited by us: gRPC itself would wait for it without end."""
        behavior = _behavior(handler)

        async def answer(_messages: Any, context: Any) -> None:
            _caller.set(caller)  # of this call's own task
            messages = _Messages(context, lambda received: decoded(handler.request_deserializer, received, method))
            try:
                async with asyncio.timeout(self._message_timeout_s):
                    await messages.read()
            except TimeoutError:
                self.num_refused["DEADLINE_EXCEEDED"] += 1
                late = f"no message came within {self._message_timeout_s:g} s"
                await refuse(context, StreamError("DEADLINE_EXCEEDED", late))
            if handler.request_streaming:
                await _respond(behavior(messages.rest(), context), handler, context)
            elif messages.newest is not None:
                await _respond(behavior(messages.newest, context), handler, context)
            elif messages.error is None:
                await refuse(context, ValueError("the call ended before its message"))
            if messages.error is not None:
                await refuse(context, messages.error)

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)


class _Messages:
    """The messages of one call. They end before the first that is none, which `error` tells of."""

    def __init__(self, context: Any, decode: Callable[[bytes], Any]) -> None:
        self._context, self._decode = context, decode
        self.newest: Any = None  # None: they have ended
        self.error: ValueError | None = None

    async def read(self) -> None:
        """Waits for the next one."""
        self.newest = None
        received = await self._context.read()
        if received is grpc.aio.EOF:
            return
        try:
            self.newest = self._decode(received)
        except ValueError as error:
            self.error = error

    async def rest(self) -> AsyncIterator[Any]:
        """The newest, and those that follow it."""
        while self.newest is not None:
            yield self.newest
            await self.read()


async def _respond(answer: Any, handler: Any, context: Any) -> None:
    """Writes what a method answers: an asynchronous generator, or one response to await."""
    if inspect.isasyncgen(answer):
        async with aclosing(answer) as responses:
            async for response in responses:
                await context.write(response)
        return
    response = await answer
    if not handler.response_streaming:
        await context.write(response)


def in_services(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether a method's full name is of one of these services."""
    prefixes = tuple(f"/{name}/" for name in names)
    return lambda method: method.startswith(prefixes)


def _refusing(error: StreamError) -> Any:
    async def answer(_messages: Any, context: Any) -> None:
        await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(answer)


def _behavior(handler: Any) -> Any:
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def _is_asynchronous(behavior: Any) -> bool:
    return inspect.iscoroutinefunction(behavior) or inspect.isasyncgenfunction(behavior)


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token of `authorization: Bearer TOKEN`. Raises StreamError; never repeats what was sent."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise StreamError("UNAUTHENTICATED", "a call needs one `authorization: Bearer TOKEN`")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != SCHEME or not token or len(token) > MAX_TOKEN_BYTES:
        raise StreamError("UNAUTHENTICATED", "a call needs `authorization: Bearer TOKEN`")
    return token.strip()
