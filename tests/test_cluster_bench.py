"""The serving benchmark: arrivals, what is measured of a stream, both backends over real sockets, and the page."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from cluster.bench import (
    Goal,
    GrpcBackend,
    Load,
    OpenAIBackend,
    Record,
    arrival_times,
    run_load,
    summarize,
)
from cluster.bench_page import page
from cluster.bench_prompts import SETS, Prompt, prompts_of, random_prompts
from cluster.errors import ConfigError
from tests.served import served


def test_arrivals_are_a_poisson_process_of_the_rate_and_the_same_for_a_seed() -> None:
    times = arrival_times(4000, 20.0, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.06)
    assert spread == pytest.approx(mean, rel=0.1)  # as of an exponential distribution
    assert times == arrival_times(4000, 20.0, seed=3) != arrival_times(4000, 20.0, seed=4)
    assert arrival_times(3, float("inf"), seed=0) == [0.0, 0.0, 0.0]


def test_tokens_that_come_together_share_the_time_before_them() -> None:
    record = Record(due_s=0.0, sent_s=1.0, token_s=[1.5, 2.0, 2.0, 2.6])
    assert record.ttft_s == 0.5
    assert record.itl_s == pytest.approx([0.25, 0.25, 0.6])
    assert record.latency_s == pytest.approx(1.6)


def test_goodput_counts_what_kept_every_goal() -> None:
    quick, slow = Record(due_s=0.0, token_s=[0.1, 0.2]), Record(due_s=0.0, token_s=[0.9, 1.0])
    failed = Record(due_s=0.0, error="UNAVAILABLE: gone")
    assert [Goal(ttft_s=0.5).is_kept(record) for record in (quick, slow, failed)] == [True, False, False]
    assert [Goal(itl_s=0.05).is_kept(record) for record in (quick, slow)] == [False, False]
    summary = summarize([quick, slow, failed], Goal(ttft_s=0.5))
    assert (summary["requests"], summary["failed"], summary["good_requests"]) == (3, 1, 1)
    assert summary["errors"] == ["UNAVAILABLE: gone"]
    assert summary["tokens_per_s"] == 4.0


@pytest.mark.parametrize("source", SETS)
def test_built_in_prompts_differ_and_come_again_with_their_seed(source: str) -> None:
    prompts = prompts_of(source, 40, seed=1)
    assert len({prompt.text for prompt in prompts}) > 30
    assert prompts == prompts_of(source, 40, seed=1) != prompts_of(source, 40, seed=2)


def test_prompts_of_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text('first\n\n{"prompt": "second"}\n')
    assert [prompt.text for prompt in prompts_of(str(lines), 3, 0)] == ["first", "second", "first"]
    lines.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match="a line of JSON needs a `prompt`"):
        prompts_of(str(lines), 1, 0)
    with pytest.raises(ConfigError, match="--dataset nowhere is neither a file nor one of chat, copy, code-edit"):
        prompts_of("nowhere", 1, 0)


async def test_a_closed_loop_over_grpc_counts_every_token_and_never_exceeds_its_concurrency() -> None:
    async with served() as up:
        most = 0
        backend = GrpcBackend(up.client)

        class Watched:
            async def send(self, prompt: Prompt, load: Load, seed: int, record: Record, clock: object) -> None:
                nonlocal most
                sending = asyncio.create_task(backend.send(prompt, load, seed, record, clock))  # type: ignore[arg-type]
                while not sending.done():
                    most = max(most, up.front_end.num_open_requests)
                    await asyncio.sleep(0)
                await sending

        done: list[float] = []
        load = Load(prompts=random_prompts(9, 5, seed=0), max_tokens=7, max_concurrency=3, ignore_eos=True)
        records = await run_load(Watched(), load, done.append)
        summary = summarize(records, Goal())
        assert (summary["failed"], summary["output_tokens"], summary["prompt_tokens"]) == (0, 63, 45)
        assert 1 <= most <= 3
        assert done == list(range(1, 10))


async def test_a_refused_request_is_a_failure_with_its_reason() -> None:
    async with served() as up:
        load = Load(prompts=random_prompts(2, 300, seed=0), max_tokens=7)
        records = await run_load(GrpcBackend(up.client), load)
        assert all(record.error is not None and "INVALID_ARGUMENT" in record.error for record in records)


@asynccontextmanager
async def openai_server() -> AsyncIterator[str]:
    """A server that streams five words as OpenAI's API does, and refuses a prompt of one word."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["messages"][0]["content"] == "refuse":
            return web.Response(status=429, text="slow down")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(5):
            event = {"choices": [{"delta": {"content": f"word{index} "}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
        usage = {"prompt_tokens": 4, "completion_tokens": 10, "completion_tokens_details": details}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def test_an_openai_server_is_measured_by_its_own_counts() -> None:
    async with openai_server() as url:
        load = Load(prompts=[Prompt(text="hello"), Prompt(text="refuse")], max_tokens=10, request_rate=200.0)
        records = await run_load(OpenAIBackend(url, "any"), load)
    summary = summarize(records, Goal())
    assert (summary["output_tokens"], summary["prompt_tokens"], summary["failed"]) == (10, 4, 1)
    assert summary["acceptance_rate"] == 0.75
    assert summary["errors"] == ["OSError: HTTP 429: slow down"]


def test_the_page_stands_alone_and_closes_what_it_opens() -> None:
    records = [Record(due_s=0.0, sent_s=0.1 * i, token_s=[0.1 * i + 0.2, 0.1 * i + 0.3]) for i in range(20)]
    text = page("A <load>", "slipstream bench", summarize(records, Goal()), records)
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    assert text.count("<svg") == text.count("</svg>") == 4
    assert "A &lt;load&gt;" in text

    class Balance(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "line", "polyline", "circle"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    Balance().feed(text.replace("/>", ">"))
    assert Balance.open_tags == []
