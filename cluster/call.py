"""One open request: what was asked for, its choices, its only reader, and the error that may end it.

Knows nothing about who serves it.
"""

import asyncio
import hashlib
import struct
from dataclasses import dataclass, field

from cluster.choice import Choice
from scheduler.request import SamplingParams
from scheduler.step import Int32Array, empty_int32


class StreamError(Exception):
    """A stream that ends with an error. `code` is a gRPC status name."""

    def __init__(self, code: str, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextRequest:
    """A checked request: what the scheduler needs, and what only text needs."""

    request_id: str
    attempt: int = 0  # of the client
    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    resume_token_ids: Int32Array = field(default_factory=empty_int32)  # [num_resumed]; with n == 1 only
    resume_fingerprint: str | None = None  # of the numbers these were computed with; None: unknown
    max_tokens: int
    sampling: SamplingParams
    seed: int | None = None  # drawn when None; takes the place of sampling.seed
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    with_text: bool = True
    max_drafts: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    tenant: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """One open request: its choices and its only reader."""

    request: TextRequest
    seed: int
    deadline_s: float | None  # on the loop's clock
    opened_s: float = 0.0  # on the loop's clock
    traceparent: str | None = None  # of the client's span
    choices: list[Choice] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: StreamError | None = None

    def fail(self, error: StreamError) -> None:
        """The first error ends the stream after what is already ready."""
        self.error = self.error or error
        self.ready.set()


def choice_seed(seed: int, index: int, n: int) -> int:
    """The seed of one of n choices, unsigned 64 bit: the request's own when there is only one."""
    if n == 1:
        return seed
    return int.from_bytes(hashlib.sha256(struct.pack("<QI", seed, index)).digest()[:8], "little")
