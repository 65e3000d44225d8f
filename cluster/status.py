"""Errors as gRPC statuses and back, with the retry hint in the two forms that clients look for."""

from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from cluster.call import StreamError


def told(error: Any) -> str:
    """What an RPC ended with, in one line; error: grpc.RpcError of a call."""
    return f"{error.code().name}: {error.details()}"


async def refuse(context: Any, error: Exception) -> NoReturn:
    """Ends an RPC: ValueError is the client's fault, a ConnectionError is a scheduler out of reach."""
    code, retry_after_ms = grpc.StatusCode.INVALID_ARGUMENT, None
    if isinstance(error, StreamError):
        code, retry_after_ms = grpc.StatusCode[error.code], error.retry_after_ms
    elif isinstance(error, ConnectionError):
        code = grpc.StatusCode.UNAVAILABLE
    await context.abort(code, str(error), trailing_metadata=_retry_hint(code, str(error), retry_after_ms))
    raise AssertionError("abort returned")


def timeout_of(context: Any) -> float | None:
    """Seconds until the client's deadline; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else float(remaining)


def traceparent_of(context: Any) -> str | None:
    """The client's span, as W3C's header of that name writes it; None without one."""
    found = (value for name, value in context.invocation_metadata() or () if name == "traceparent")
    return next((value for value in found if isinstance(value, str)), None)


def decoded(deserialize: Callable[[bytes], Any], received: bytes, method: str) -> Any:
    """The message of these bytes. Raises ValueError when they are none."""
    try:
        return deserialize(received)
    except DecodeError as error:
        raise ValueError(f"{len(received)} bytes are no message of {method}") from error


def _retry_hint(code: Any, message: str, retry_after_ms: int | None) -> tuple[tuple[str, str | bytes], ...]:
    if retry_after_ms is None:
        return ()
    retry_delay = duration_pb2.Duration()
    retry_delay.FromMilliseconds(retry_after_ms)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=retry_delay))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    return ("grpc-status-details-bin", status.SerializeToString()), ("retry-after-ms", str(retry_after_ms))
