"""tritonclient[grpc] against a served model: it knows us only by the protocol."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests import triton_client
from tests.fake_link import expected_tokens
from tests.served import TINY, Served, served

GREETING, DOG = "hello world", "the lazy dog"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
async def up() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


async def ask(process: ProcessPoolExecutor, call: Callable[..., Any], up: Served, *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(process, call, up.server.address, "tiny", *args)


def answer(text: str, seed: int, max_tokens: int) -> str:
    return TINY.decode(expected_tokens(TINY.encode(text).tolist(), seed, max_tokens))


async def test_it_finds_the_server_and_the_model(up: Served, process: ProcessPoolExecutor) -> None:
    found = await ask(process, triton_client.describe, up)
    assert (found["live"], found["ready"], found["model_ready"]) == (True, True, True)
    assert found["server"]["name"] == "slipstream"
    assert [one["name"] for one in found["model"]["outputs"]] == ["text_output"]


async def test_one_request_is_answered_after_its_input(up: Served, process: ProcessPoolExecutor) -> None:
    text = await ask(process, triton_client.infer, up, GREETING, {"max_tokens": 9, "seed": 5, "temperature": 0.5})
    assert text == GREETING + answer(GREETING, 5, 9)


async def test_requests_of_one_stream_get_their_texts_piece_by_piece(up: Served, process: ProcessPoolExecutor) -> None:
    asked = {
        "one": (GREETING, {"max_tokens": 40, "seed": 1}),
        "two": (DOG, {"max_tokens": 20, "seed": 2}),
    }
    received = await ask(process, triton_client.stream, up, asked)
    assert "".join(received["one"]) == answer(GREETING, 1, 40)
    assert "".join(received["two"]) == answer(DOG, 2, 20)
    assert min(map(len, received.values())) > 2


async def test_errors_name_what_is_wrong_and_leave_other_requests_alone(
    up: Served, process: ProcessPoolExecutor
) -> None:
    refused = await ask(process, triton_client.infer, up, GREETING, {"best_of": 2})
    assert refused == "StatusCode.INVALID_ARGUMENT: best_of: not implemented by this server"
    asked = {"good": (DOG, {"max_tokens": 8, "seed": 3}), "bad": (DOG, {"temperature": -1})}
    received = await ask(process, triton_client.stream, up, asked)
    assert "".join(received["good"]) == answer(DOG, 3, 8)
    [error] = received["errors"]
    assert error.startswith("INVALID_ARGUMENT: temperature must be in [0")


async def test_a_client_that_leaves_its_stream_cancels_what_is_in_flight(
    up: Served, process: ProcessPoolExecutor
) -> None:
    up.link.stall_at = 30
    asked = {"one": (GREETING, {"max_tokens": 200, "seed": 1}), "two": (DOG, {"max_tokens": 200, "seed": 2})}
    received = await ask(process, triton_client.stream, up, asked, 4)
    assert sum(map(len, received.values())) == 4
    await up.gone()
    assert len(up.link.cancelled) == 2
