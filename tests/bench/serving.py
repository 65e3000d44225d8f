"""Tokens per second over Ray and gRPC beside the in-process engine: what the cluster costs.

    python -m tests.bench.serving [--model DIR] [--threads N] [--pairs N] [--json]

One worker with the same threads on both sides, the same prompts, seeds and drafts. The two sides
are measured in turn, after each other and never at once; the ratio is the median over the pairs.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.ray_environment import prepare

prepare()  # before anything imports ray

import torch

from cluster.bringup import Deployment
from cluster.client import Client
from cluster.config import TRANSPORTS, ServeConfig, SpeculativeConfig
from cluster.demo import QUESTIONS
from cluster.engine import Engine
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import Sizes, default_threads
from cluster.text import ChatMessage, load_tokenizer
from scheduler.request import SamplingParams
from worker.actor import build
from worker.process import environment, restart_with

GOAL = 0.85
CONCURRENCIES = (1, 8)
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One measurement of each side, tokens per second."""

    engine: float
    cluster: float

    @property
    def ratio(self) -> float:
        return self.cluster / self.engine


class Bench:
    """Both sides, loaded once."""

    def __init__(self, deployment: Deployment, max_tokens: int) -> None:
        self._address = deployment.endpoints[0]
        self._engine = in_process_engine(deployment.sizes)
        self._max_tokens = max_tokens
        self._seed = 0
        tokenizer = load_tokenizer(deployment.sizes.directory)
        self._prompts = [
            tokenizer.encode(tokenizer.render_chat([ChatMessage(role="user", content=question)])).tolist()
            for question in QUESTIONS
        ]

    def pair(self, concurrency: int, *, engine_first: bool) -> Pair:
        """Both sides on the same requests, whose seeds were never used before."""
        self._seed += concurrency
        prompts = [self._prompts[index % len(self._prompts)] for index in range(concurrency)]
        seeds = [self._seed + index for index in range(concurrency)]
        if engine_first:
            engine_tokens, engine = self._run_engine(prompts, seeds)
            cluster_tokens, cluster = asyncio.run(self._run_cluster(prompts, seeds))
        else:
            cluster_tokens, cluster = asyncio.run(self._run_cluster(prompts, seeds))
            engine_tokens, engine = self._run_engine(prompts, seeds)
        assert engine_tokens == cluster_tokens, "the two sides gave different streams"
        return Pair(engine=engine, cluster=cluster)

    def _run_engine(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> tuple[list[list[int]], float]:
        started_s = time.perf_counter()
        ids = [
            self._engine.submit(prompt, SamplingParams(temperature=TEMPERATURE, seed=seed), self._max_tokens)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        outputs = self._engine.run()
        elapsed_s = time.perf_counter() - started_s
        token_ids = [outputs[request_id].token_ids for request_id in ids]
        return token_ids, sum(map(len, token_ids)) / elapsed_s

    async def _run_cluster(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> tuple[list[list[int]], float]:
        async with Client(self._address) as client:
            await client.astats()  # connected
            started_s = time.perf_counter()
            answers = await asyncio.gather(
                *(
                    client.generate(
                        prompt,
                        max_tokens=self._max_tokens,
                        temperature=TEMPERATURE,
                        top_p=1.0,
                        top_k=0,
                        seed=seed,
                        ignore_eos=True,
                    ).aresult()
                    for prompt, seed in zip(prompts, seeds, strict=True)
                )
            )
            elapsed_s = time.perf_counter() - started_s
        token_ids = [answer.token_ids for answer in answers]
        return token_ids, sum(map(len, token_ids)) / elapsed_s


def in_process_engine(sizes: Sizes) -> Engine:
    """The same core and the same runner in this process."""
    [spec] = sizes.workers
    torch.set_num_threads(spec.threads)
    runner, _ = build(replace(spec, worker_id="in-process"))
    return Engine([runner], sizes.scheduler)


def measure(bench: Bench, num_pairs: int) -> dict[int, list[Pair]]:
    """Pairs by concurrency, after one unmeasured pair each."""
    pairs: dict[int, list[Pair]] = {}
    for concurrency in CONCURRENCIES:
        bench.pair(concurrency, engine_first=True)
        pairs[concurrency] = [bench.pair(concurrency, engine_first=index % 2 == 0) for index in range(num_pairs)]
    return pairs


def summary(pairs: Sequence[Pair]) -> dict[str, float]:
    """Medians over the pairs."""
    return {
        "engine_tokens_per_s": round(statistics.median(pair.engine for pair in pairs), 1),
        "cluster_tokens_per_s": round(statistics.median(pair.cluster for pair in pairs), 1),
        "ratio": round(statistics.median(pair.ratio for pair in pairs), 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Ray + gRPC beside the in-process engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    threads = arguments.threads or default_threads(1)
    restart_with(environment(threads))  # the engine runs here, and as the worker does
    config = ServeConfig(
        model=arguments.model, port=0, threads=threads, transport=arguments.transport, metrics_port=0,
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=4),  # auto would choose by the clock
    )  # fmt: skip
    with Display() as display:
        directory: Path = resolve_model(config.model, display)
        deployment = Deployment(config, directory, display.phase)
    try:
        measured = measure(Bench(deployment, arguments.max_tokens), arguments.pairs)
    finally:
        deployment.stop()
    results = {concurrency: summary(pairs) for concurrency, pairs in measured.items()}
    if arguments.json:
        print(json.dumps({"threads": threads, "goal": GOAL, "concurrent": results}))
        return
    for concurrency, result in results.items():
        print(
            f"{concurrency} concurrent, {threads} threads: engine {result['engine_tokens_per_s']} tokens/s, "
            f"Ray + gRPC {result['cluster_tokens_per_s']} tokens/s, ratio {result['ratio']} (goal {GOAL})"
        )


if __name__ == "__main__":
    main()
