"""A real gRPC server on loopback over a toy scheduler, for tests of the services."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from cluster.client import Client
from cluster.frontend import FrontEnd
from cluster.served_model import ServedModel
from cluster.server import Server, ServerConfig
from cluster.serving import Serving
from cluster.text import Tokenizer
from tests import tiny_tokenizer
from tests.fake_link import VOCAB_SIZE, FakeLink

TINY = tiny_tokenizer.tiny()


@dataclass(slots=True, eq=False)
class Served:
    """One running server, its front end and its toy scheduler."""

    link: FakeLink
    front_end: FrontEnd
    serving: Serving
    server: Server
    channel: Any  # grpc.aio.Channel
    client: Client
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def gone(self, *, timeout_s: float = 5.0) -> None:
        """Returns when the scheduler has no live request."""
        async with asyncio.timeout(timeout_s):
            while self.link.live or self.front_end.num_open_requests:  # noqa: ASYNC110 - the toy has no events
                await asyncio.sleep(0.005)


async def rest_of(call: Any) -> list[Any]:
    """Every message of a stream that `read` began."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def tiny_model(**changes: Any) -> ServedModel:
    fields: dict[str, Any] = {
        "name": "tiny",
        "path": "",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "eos_token_ids": (tiny_tokenizer.EOS_TOKEN_ID,),
        "architectures": ("LlamaForCausalLM",),
    }
    return ServedModel(**(fields | changes))


@asynccontextmanager
async def served(
    link: FakeLink | None = None,
    *,
    model: ServedModel | None = None,
    tokenizer: Tokenizer | None = TINY,
    config: ServerConfig | None = None,
    ready: bool = True,
    slowest_reader_s: float = 60.0,
) -> AsyncIterator[Served]:
    """Everything up, the toy stepping by itself; everything down at the end, nothing left open."""
    link = link or FakeLink()
    front_end = FrontEnd(link, name="front", tokenizer=tokenizer, draw_seed=partial(random.Random(1).getrandbits, 64))
    link.front_end = front_end
    serving = Serving(
        front_end=front_end, model=model or tiny_model(), tokenizer=tokenizer, slowest_reader_s=slowest_reader_s
    )
    server = Server(serving, config)
    await server.start(ready=ready)
    running = asyncio.create_task(link.run())
    try:
        async with grpc.aio.insecure_channel(server.address) as channel, Client(server.address) as client:
            yield Served(link, front_end, serving, server, channel, client)
    finally:
        await server.stop(0.0)
        running.cancel()
    assert front_end.num_open_requests == 0
