"""`slipstream bench`: a load against a server, ours over gRPC or any that speaks OpenAI's HTTP, and what it felt like.

Open loop: requests arrive at a rate, at random (Poisson), whether or not earlier ones ended. Closed loop:
so many clients, each sending its next request when its last one ended. Times are those a client sees.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import aiohttp
import grpc
import numpy as np

from cluster.bench_prompts import Prompt
from cluster.client import Client
from cluster.status import told
from cluster.text import ChatMessage

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and when."""

    prompts: Sequence[Prompt]
    max_tokens: int  # outputs of each request
    request_rate: float = math.inf  # requests per second; inf: all at once, held back by max_concurrency alone
    max_concurrency: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0  # of arrivals and of sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One request as its client saw it. Seconds since the load began."""

    due_s: float  # when it was meant to be sent: time spent held back counts as waiting
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)  # arrival of each output token
    num_prompt_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Times between messages, each divided among the tokens that it brought."""
        times, gaps = self.token_s, list[float]()
        start = 0
        for index in range(1, len(times) + 1):
            if index == len(times) or times[index] != times[start]:
                if start:
                    gaps += [(times[start] - times[start - 1]) / (index - start)] * (index - start)
                start = index
        return gaps

    @property
    def latency_s(self) -> float:
        """Until the last token."""
        return self.token_s[-1] - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a request must keep to count as good; None: anything."""

    ttft_s: float | None = None
    itl_s: float | None = None  # mean of the request

    def is_kept(self, record: Record) -> bool:
        """Whether this request was served well."""
        if record.error is not None or not record.token_s:
            return False
        gaps = record.itl_s
        seen = (record.ttft_s, sum(gaps) / len(gaps) if gaps else 0.0)
        wanted = (self.ttft_s, self.itl_s)
        return all(limit is None or value <= limit for value, limit in zip(seen, wanted, strict=True))


class Backend(Protocol):
    """Sends one request and notes each token's arrival."""

    async def send(self, prompt: Prompt, load: Load, seed: int, record: Record, clock: Callable[[], float]) -> None:
        """Fill the record. Raises what the transport raises."""
        ...


class GrpcBackend:
    """Slipstream itself."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def send(self, prompt: Prompt, load: Load, seed: int, record: Record, clock: Callable[[], float]) -> None:
        """See `Backend`."""
        options = {
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
            "seed": seed,
        }
        stream = (
            self._client.chat([ChatMessage(role="user", content=prompt.text)], **options)
            if prompt.token_ids is None
            else self._client.generate(prompt.token_ids, **options)  # type: ignore[arg-type]
        )
        async for output in stream:
            record.token_s += [clock()] * len(output.token_ids)
            if output.finish is not None:
                record.num_prompt_tokens = output.finish.num_prompt_tokens
                record.num_draft_tokens = output.finish.num_draft_tokens
                record.num_accepted_tokens = output.finish.num_accepted_tokens


class OpenAIBackend:
    """Any server with OpenAI's `/v1/chat/completions`, streamed."""

    def __init__(self, base_url: str, model: str, api_key: str = "none") -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def send(self, prompt: Prompt, load: Load, seed: int, record: Record, clock: Callable[[], float]) -> None:
        """See `Backend`. A server that counts no usage is believed to send one token in each message."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if load.ignore_eos else {})
        arrivals: list[float] = []
        num_tokens = 0
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), headers=self._headers) as session,
            session.post(self._url, json=body) as response,
        ):
            if response.status != 200:
                raise OSError(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for event in _events(response):
                usage = event.get("usage")
                if isinstance(usage, dict):
                    num_tokens = int(usage.get("completion_tokens") or 0)
                    record.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
                    details = usage.get("completion_tokens_details") or {}
                    accepted = int(details.get("accepted_prediction_tokens") or 0)
                    record.num_accepted_tokens = accepted
                    record.num_draft_tokens = accepted + int(details.get("rejected_prediction_tokens") or 0)
                choices = event.get("choices")
                if isinstance(choices, list) and choices and choices[0].get("delta", {}).get("content"):
                    arrivals.append(clock())
        record.token_s = _spread(arrivals, max(num_tokens, len(arrivals)))


def _spread(arrivals: Sequence[float], num_tokens: int) -> list[float]:
    """Arrivals of so many tokens that came in these messages, as evenly as whole tokens allow."""
    if not arrivals:
        return []
    return [arrivals[index * len(arrivals) // num_tokens] for index in range(num_tokens)]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, object]]:
    """The JSON of each server-sent event."""
    async for line in response.content:
        data = line.decode().strip().removeprefix("data:").strip()
        if data.startswith("{"):
            yield json.loads(data)


async def run_load(backend: Backend, load: Load, progress: Callable[[float], None] = lambda done: None) -> list[Record]:
    """Send every prompt; the records in the order of sending. A request that failed has its error in its record."""
    arrivals = arrival_times(len(load.prompts), load.request_rate, load.seed)
    gate = asyncio.Semaphore(load.max_concurrency or len(load.prompts))
    began_s = time.perf_counter()
    num_ended = 0

    def clock() -> float:
        return time.perf_counter() - began_s

    async def one(index: int) -> Record:
        nonlocal num_ended
        record = Record(due_s=arrivals[index])
        await asyncio.sleep(max(arrivals[index] - clock(), 0.0))
        async with gate:
            record.sent_s = clock() if math.isinf(load.request_rate) else record.due_s
            try:
                await backend.send(load.prompts[index], load, load.seed + index, record, clock)
            except grpc.aio.AioRpcError as error:
                record.error = told(error)
            except (grpc.RpcError, OSError, aiohttp.ClientError, TimeoutError) as error:
                record.error = f"{type(error).__name__}: {error}"
        num_ended += 1
        progress(num_ended)
        return record

    return list(await asyncio.gather(*(one(index) for index in range(len(load.prompts)))))


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests are due: a Poisson process of this rate, or all at 0."""
    if math.isinf(rate):
        return [0.0] * num_requests
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def summarize(records: Sequence[Record], goal: Goal) -> dict[str, object]:
    """What is printed and kept: counts, rates per second, and milliseconds by percentile."""
    good = [record for record in records if record.error is None and record.token_s]
    span_s = max((record.token_s[-1] for record in good), default=0.0)
    num_tokens = sum(len(record.token_s) for record in good)
    num_drafts = sum(record.num_draft_tokens for record in good)
    accepted = sum(record.num_accepted_tokens for record in good)
    num_kept = sum(goal.is_kept(record) for record in records)
    errors = sorted({record.error for record in records if record.error})
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": errors[:5],
        "duration_s": round(span_s, 3),
        "prompt_tokens": sum(record.num_prompt_tokens for record in good),
        "output_tokens": num_tokens,
        "tokens_per_s": _rate(num_tokens, span_s),
        "requests_per_s": _rate(len(good), span_s),
        "goal": {name: value for name, value in asdict(goal).items() if value is not None},
        "good_requests": num_kept,
        "goodput_per_s": _rate(num_kept, span_s),
        "draft_tokens": num_drafts,
        "acceptance_rate": round(accepted / num_drafts, 4) if num_drafts else None,
        # Each accepted draft saved a step: tokens per step, where drafts were offered or not.
        "mean_acceptance_length": round(num_tokens / max(num_tokens - accepted, 1), 3) if num_tokens else None,
        "ttft_ms": _percentiles([record.ttft_s for record in good]),
        "itl_ms": _percentiles([gap for record in good for gap in record.itl_s]),
        "latency_ms": _percentiles([record.latency_s for record in good]),
    }


def _rate(count: int, span_s: float) -> float:
    return round(count / span_s, 3) if span_s else 0.0


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1000
    named = {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}
    return {name: round(value, 2) for name, value in {"mean": float(values.mean()), **named}.items()}
