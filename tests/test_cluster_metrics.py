"""The page that Prometheus scrapes, over HTTP, while the whole stack runs."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics_server
from cluster.client import Client
from cluster.metrics import Metrics
from cluster.metrics_server import MetricsConfig, MetricsServer
from cluster.server import ServerConfig
from scheduler.stats import Durations
from tests.fake_link import FakeLink
from tests.served import served
from tests.whole_stack import Stack, whole_stack

# Every label and, where they are few, every value it may have.
LABELS = {
    "reason": {
        *("blocks", "priority", "reset", "requested", "drain", "swap", "worker lost", "finished", "front end lost"),
        "replaced by a higher attempt",
    },
    "finished_reason": {"stop", "length", "abort"},
    "code": {"ABORTED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNAVAILABLE"},
    "position": {str(position) for position in range(64)},
    "worker_id": {"w0"},
}
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "step_time_seconds", "step_idle_time_seconds"),
)
NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    *("kv_placeholder_tokens", "kv_placeholder_tokens_reserved_total", "kv_garbage_tokens"),
    *("stale_tokens_dropped_total", "stale_tokens_salvaged_total"),
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")),
}
BY_REASON = {"num_preemptions_total", "stale_tokens_dropped_total", "spec_decode_num_accepted_tokens_per_pos_total"}
NUM_TOKENS = 40
ASKED: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@asynccontextmanager
async def scraped(up: Stack) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(Metrics(up.front_end, up.server.guard), MetricsConfig())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def http(server: MetricsServer, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def page(server: MetricsServer, accept: str = "text/plain") -> str:
    head, body = await http(server, f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n".encode())
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return body.decode()


def samples(families: list[Metric]) -> Samples:
    found = {}
    for family in families:
        assert family.documentation, family.name
        for sample in family.samples:
            name, labels = sample.name.removeprefix("slipstream_"), {**sample.labels}
            assert name != sample.name
            labels.pop("le", None)
            for label, value in labels.items():
                assert value in LABELS[label], f"{name}: {label}={value!r}"
            key = (name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


async def read(server: MetricsServer) -> Samples:
    return samples(list(text_string_to_metric_families(await page(server))))


async def test_a_run_shows_what_it_did_and_nothing_of_what_was_said() -> None:
    prompt, secret = [7, 8, 9, 10, 11, 12, 13, 14, 15], "a very secret salt"
    async with whole_stack(num_blocks=24, max_num_seqs=4) as up, scraped(up) as server:
        before = await read(server)
        assert {name for name, _ in before} >= NAMES - BY_REASON
        prompts = {f"r{i}": [*prompt, i] for i in range(20, 28)}
        learned = [await up.client.generate(prompts[name], **ASKED).aresult() for name in prompts]
        outputs = {name: answer.token_ids for name, answer in zip(prompts, learned, strict=True)}
        up.drafter.learn({name: prompts[name] + outputs[name] for name in prompts})
        running = [
            asyncio.create_task(
                up.client.generate(prompts[name], request_id=name, cache_salt=secret, **ASKED).aresult()
            )
            for name in prompts
        ]
        during = []
        while not all(task.done() for task in running):
            during.append(await read(server))
            await asyncio.sleep(0.02)
            await up.client.areset_prefix_cache(reset_running=len(during) % 4 == 0)
        assert [task.result().token_ids for task in running] == list(outputs.values())
        left = aiter(up.client.generate(prompt, max_tokens=60, ignore_eos=True))
        await anext(left)
        await left.aclose()
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            await up.client.generate(prompt, temperature=-1.0, max_tokens=2).aresult()
        stats = await up.idle()
        text = await page(server)
    after = samples(list(text_string_to_metric_families(text)))
    _assert_agrees(after, stats)
    assert {name for name, _ in after} >= NAMES
    num_tokens = 16 * NUM_TOKENS
    assert value(after, "generation_tokens_total") >= num_tokens
    assert value(after, "request_success_total", finished_reason="length") == 16
    assert value(after, "request_success_total", finished_reason="abort") == 1
    assert value(after, "request_failures_total", code="INVALID_ARGUMENT") == 1
    assert value(after, "time_to_first_token_seconds_count") == 17
    assert value(after, "inter_token_latency_seconds_count") >= num_tokens - 16 * 5
    assert value(after, "e2e_request_latency_seconds_count") == 17
    assert value(after, "request_queue_time_seconds_count") == 17
    assert value(after, "step_time_seconds_count") == value(after, "steps_total")
    assert max(value(found, "num_requests_running") for found in during) > 0
    assert max(value(found, "kv_placeholder_tokens") for found in during) > 0
    assert max(value(found, "kv_garbage_tokens") for found in during) > 0
    assert max(value(found, "kv_cache_usage_perc") for found in during) > 0
    assert value(after, "num_requests_running") == value(after, "kv_placeholder_tokens") == 0
    assert value(after, "kv_garbage_tokens") == value(after, "kv_cache_usage_perc") == 0
    assert secret not in text
    assert str(prompt)[1:-1] not in text
    _assert_counters_only_grow([before, *during, after])


def _assert_agrees(found: Samples, stats: dict[str, object]) -> None:
    """With what the scheduler says of itself."""
    for name, field in (
        ("prompt_tokens_total", "num_prompt_tokens"),
        ("generation_tokens_total", "num_generation_tokens"),
        ("prefix_cache_queries_total", "prefix_cache_queries"),
        ("prefix_cache_hits_total", "prefix_cache_hits"),
        ("spec_decode_num_drafts_total", "num_drafts"),
        ("spec_decode_num_draft_tokens_total", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens_total", "num_accepted_tokens"),
        ("kv_placeholder_tokens_reserved_total", "tokens_reserved"),
        ("stale_tokens_salvaged_total", "tokens_salvaged"),
    ):
        assert value(found, name) == stats[field], name
    for name, field in (
        ("num_preemptions_total", "num_preemptions"),
        ("stale_tokens_dropped_total", "stale_tokens_dropped"),
    ):
        by_reason = stats[field]
        assert isinstance(by_reason, dict)
        for reason, count in by_reason.items():
            assert value(found, name, reason=reason) == count, name
    assert value(found, "num_preemptions_total", reason="reset") > 0
    assert value(found, "stale_tokens_dropped_total", reason="reset") > 0


def _assert_counters_only_grow(pages: list[Samples]) -> None:
    for earlier, later in itertools.pairwise(pages):
        for (name, labels), count in earlier.items():
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                assert later[name, labels] >= count, name


async def test_openmetrics_is_spoken_when_asked_for() -> None:
    async with whole_stack() as up, scraped(up) as server:
        await up.client.generate([5], max_tokens=4, ignore_eos=True).aresult()
        text = await page(server, "application/openmetrics-text; version=1.0.0")
        found = samples(list(parse_openmetrics(text)))
    assert value(found, "request_success_total", finished_reason="length") == 1


async def test_buckets_hold_what_is_at_most_their_bound() -> None:
    async with whole_stack() as up, scraped(up) as server:
        up.front_end.latency.first_token.add(0.3)
        up.front_end.latency.first_token.add(1e4)
        found = await read(server)
    counts = {
        labels[0][1]: count for (name, labels), count in found.items() if name == "time_to_first_token_seconds_bucket"
    }
    assert (counts["0.25"], counts["0.5"], counts["250.0"], counts["+Inf"]) == (0, 1, 1, 2)
    assert list(map(float, counts)) == [*Durations().bounds_s, math.inf]


async def test_without_the_scheduler_the_front_end_s_part_remains() -> None:
    async with whole_stack() as up, scraped(up) as server:
        assert value(await read(server), "scheduler_up") == 1
        await up.kill_scheduler()
        found = await read(server)
        assert value(found, "scheduler_up") == 0
        assert value(found, "open_requests") == 0
        assert ("num_requests_running", ()) not in found
        await up.start_scheduler()


async def test_refused_calls_are_counted_without_their_tokens(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha acme\n")
    async with (
        served(config=ServerConfig(auth_token_file=tokens)) as up,
        Client(up.server.address, token="nope") as bad,
    ):
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            await bad.generate([5], max_tokens=2).aresult()
        body, _ = await Metrics(up.front_end, up.server.guard).page(with_scheduler=False)
    found = samples(list(text_string_to_metric_families(body.decode())))
    assert value(found, "refused_calls_total", code="UNAUTHENTICATED") == 1
    assert not any(word in body for word in (b"alpha", b"nope", b"acme"))


@pytest.fixture
async def plain() -> AsyncIterator[MetricsServer]:
    link = FakeLink()
    async with served(link) as up:
        server = MetricsServer(Metrics(up.front_end), MetricsConfig(with_scheduler=False))
        await server.start()
        yield server
        await server.stop()


async def test_only_the_page_is_there_and_only_to_be_read(plain: MetricsServer) -> None:
    for request, status in (
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x00\xee\r\n\r\n", b"404"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
    ):
        head, _ = await http(plain, request)
        assert head.split(b" ")[1] == status, request[:40]
    head, body = await http(plain, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert (head.split(b" ")[1], body) == (b"200", b"")


async def test_silent_scrapers_are_few_and_do_not_stay(plain: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "HEAD_TIMEOUT_S", 0.5)
    silent = [await asyncio.open_connection("127.0.0.1", plain.port) for _ in range(metrics_server.MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_connection("127.0.0.1", plain.port)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in silent)), 10) == [b""] * len(silent)
    assert "slipstream_open_requests" in await page(plain)
    for _, writer in silent:
        writer.close()


async def test_a_port_that_is_taken_is_refused_by_name_or_another_one_is_found(plain: MetricsServer) -> None:
    metrics = plain._metrics
    with pytest.raises(ValueError, match=f"--metrics-port {plain.port} on --metrics-host 127.0.0.1 cannot be"):
        await MetricsServer(metrics, MetricsConfig(port=plain.port)).start()
    other = MetricsServer(metrics, MetricsConfig(port=plain.port, any_port=True, with_scheduler=False))
    assert await other.start() != plain.port
    assert "slipstream_open_requests" in await page(other)
    await other.stop()
