"""What is logged of a request's life, with its id and without what it asks."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import grpc
import pytest

from cluster.logs import ROOMS, LogConfig
from cluster.request_log import RequestLog
from tests.fake_link import FakeLink
from tests.served import TINY, Served, served

PROMPT = "the quick xylophone"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything our loggers write, at the lowest level, as JSON; as they were afterwards."""
    before = [(room, vars(logging.getLogger(room)).copy()) for room in ROOMS]
    written = io.StringIO()
    with redirect_stderr(written):
        LogConfig(format="json", level="debug")("front-0")
    yield written
    for room, state in before:
        logger = logging.getLogger(room)
        logger.handlers, logger.propagate = state["handlers"], state["propagate"]
        logger.setLevel(state["level"])


def of(lines: io.StringIO, request_id: str) -> list[dict[str, Any]]:
    parsed = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in parsed if line.get("request_id") == request_id]


async def asked(up: Served, **options: Any) -> None:
    async for _ in up.client.generate(PROMPT, max_tokens=8, ignore_eos=True, **options):
        pass


async def left(up: Served, request_id: str) -> None:
    outputs = aiter(up.client.generate(PROMPT, request_id=request_id, max_tokens=200, ignore_eos=True))
    await anext(outputs)
    await outputs.aclose()
    await up.gone()


async def cancelled(up: Served, request_id: str) -> None:
    async for _ in up.client.generate(PROMPT, request_id=request_id, max_tokens=200, ignore_eos=True):
        await up.client.acancel(request_id)


async def watched(*, prompts: bool) -> None:
    """One request of each kind."""
    async with served(FakeLink()) as up:
        up.front_end.observers = [RequestLog(TINY, prompts=prompts)]
        await asked(up, request_id="whole")
        await left(up, "left")
        await cancelled(up, "cancelled")
        with pytest.raises(grpc.RpcError):
            await asked(up, request_id="bad", stop=PROMPT * 1000)
        up.front_end.scheduler_lost("there is no hope")
        with pytest.raises(grpc.RpcError):
            await asked(up, request_id="late")


def test_each_line_of_a_request_has_its_id_and_tells_how_it_went_but_not_what_it_asks(lines: io.StringIO) -> None:
    asyncio.run(watched(prompts=False))
    admitted, first, finished = of(lines, "whole")
    assert [line["event"] for line in (admitted, first, finished)] == ["admitted", "first token", "finished"]
    assert (admitted["level"], first["level"], admitted["process"]) == ("info", "debug", "front-0")
    assert (finished["reason"], finished["num_output_tokens"]) == ("length", 8)
    assert finished["num_prompt_tokens"] == admitted["num_prompt_tokens"] > 0
    assert [line["event"] for line in of(lines, "left")] == ["admitted", "first token", "cancelled"]
    assert of(lines, "left")[-1]["by"] == "leaving"
    assert of(lines, "cancelled")[-1]["by"] == "call"
    [bad] = of(lines, "bad")
    assert (bad["event"], bad["code"]) == ("rejected", "INVALID_ARGUMENT")
    [late] = of(lines, "late")
    assert (late["event"], late["code"], late["reason"]) == ("rejected", "UNAVAILABLE", "there is no hope")
    assert "xylophone" not in lines.getvalue()


def test_prompts_are_logged_when_that_is_wanted(lines: io.StringIO) -> None:
    asyncio.run(watched(prompts=True))
    assert of(lines, "whole")[0]["prompt"] == PROMPT


def test_a_line_for_people_has_the_fields_and_the_traceback() -> None:
    written = io.StringIO()
    with redirect_stderr(written):
        handler_of = LogConfig(level="warning")
        logger = logging.getLogger("worker")
        before = logger.handlers, logger.propagate, logger.level
        try:
            handler_of("worker-1")
            logger.info("too little to say")
            try:
                raise ValueError("why")
            except ValueError:
                logger.exception("it failed", extra={"request_id": "r1"})
        finally:
            logger.handlers, logger.propagate = before[:2]
            logger.setLevel(before[2])
    first, *rest = written.getvalue().splitlines()
    assert first.endswith("ERROR worker-1 worker: it failed request_id=r1")
    assert rest[-1] == "ValueError: why"
