"""How often sampled drafts are accepted: with the request's own noise, with greedy drafts, and what theory allows.

    python -m tests.bench.noise [--json] [--head DIR | --draft-model DIR] [--temperatures 0.8,1.0] ...

Target and drafter are read on the same contexts, the target's own answers at that temperature. With p and q their
distributions and TV = sum |p - q| / 2, shared Gumbel noise accepts at least (1 - TV) / (1 + TV) of the first drafts
(Daliri, Musco, Suresh 2024, arXiv 2408.07978); no draft distributed as q is accepted more often than 1 - TV; a greedy
draft is accepted with p(argmax q), which may be more or less. What is measured is what serves: the sampler's own
`sample` and `draft`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cluster.bench_prompts import prompts_of
from cluster.config import ServeConfig
from cluster.engine import Engine
from cluster.model_source import resolve_model
from cluster.progress import Display
from cluster.sizing import num_cpus, size
from cluster.text import ChatMessage, load_tokenizer
from scheduler.request import SamplingParams
from scheduler.step import Float32Array, Int64Array
from tests.bench.speculation import bare_runner, draft_specs
from worker.drafting import load_draft_weights
from worker.eagle3 import Eagle3Head
from worker.fingerprint import make_batch
from worker.model import Model
from worker.process import environment, restart_with
from worker.sampler import TokenSampler

TEMPERATURES = (0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contexts:
    """Target and drafter on the same contexts."""

    positions: Sequence[int]  # [n] of the next token
    target: Float32Array  # [n, vocab_size] logits
    drafter: Float32Array  # [n, m] logits
    token_ids: Int64Array | None  # [m] what the drafter's logits are of; None: the whole vocabulary


@dataclass(slots=True, kw_only=True)
class Acceptance:
    """Means over contexts."""

    temperature: float
    num_contexts: int = 0
    shared: float = 0.0  # accepted of drafts sampled with the same noise
    greedy: float = 0.0  # accepted of drafts that are the drafter's likeliest token
    bound: float = 0.0  # (1 - TV) / (1 + TV)
    optimum: float = 0.0  # 1 - TV
    total_variation: float = 0.0

    def add(self, contexts: Contexts, draws: int) -> None:
        """Every context, with so many draws of noise each."""
        for index, position in enumerate(contexts.positions):
            p, q = distributions(contexts, index, self.temperature)
            distance = 0.5 * float(np.abs(p - q).sum())
            found = (
                shared_acceptance(contexts, index, position, self.temperature, draws),
                float(p[q.argmax()]),
                (1.0 - distance) / (1.0 + distance),
                1.0 - distance,
                distance,
            )
            self.num_contexts += 1
            for name, value in zip(("shared", "greedy", "bound", "optimum", "total_variation"), found, strict=True):
                setattr(self, name, getattr(self, name) + (value - getattr(self, name)) / self.num_contexts)

    def as_row(self) -> dict[str, float]:
        """For a table."""
        return {name: round(getattr(self, name), 4) for name in self.__slots__}


def distributions(contexts: Contexts, index: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """p and q of one context over the whole vocabulary: [vocab_size] float64 each."""
    both = (contexts.target[index], contexts.drafter[index])
    p, few = (_softmax(logits.astype(np.float64) / temperature) for logits in both)
    if contexts.token_ids is None:
        return p, few
    q = np.zeros_like(p)
    q[contexts.token_ids] = few
    return p, q


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def shared_acceptance(contexts: Contexts, index: int, position: int, temperature: float, draws: int) -> float:
    """Share of draws of noise with which drafter and target choose the same token."""
    empty, vocab_size, same = np.empty(0, np.int32), contexts.target.shape[1], 0
    for seed in range(draws):
        # A seed of its own for each context, or the contexts of one position would share their noise.
        sampling = SamplingParams(temperature=temperature, seed=(index << 32) + (position << 16) + seed)
        sampler = TokenSampler(sampling, empty, empty, vocab_size)
        draft = sampler.draft(contexts.drafter[index], position, contexts.token_ids)
        same += draft == sampler.sample(contexts.target[index], position)
    return same / draws


@torch.inference_mode()
def read_contexts(model: Model, drafter: Eagle3Head | Model, token_ids: Sequence[int], num_prompt: int) -> Contexts:
    """Both on every context that ends in a text's answer; uses the first blocks of both pools."""
    blocks, block_size = range(-(-len(token_ids) // model.kv_cache.block_size)), model.kv_cache.block_size
    batch = make_batch([(token_ids, 0, blocks)], block_size)
    positions = range(max(num_prompt, 2), len(token_ids))
    last = torch.tensor(positions) - 1
    if isinstance(drafter, Eagle3Head):
        hidden, states = model.forward_with_states(batch, drafter.config.state_layers)
        # Pair i has the states at i and the token at i + 1: it predicts the token at i + 2.
        pairs = make_batch([(token_ids[1:], 0, blocks)], block_size)
        features = drafter.forward(drafter.features(states[:-1]), pairs)
        drafted, ids = drafter.logits(features.index_select(0, last - 1)), drafter.config.token_ids
    else:
        hidden = model.forward(batch)
        drafted, ids = drafter.logits(drafter.forward(batch).index_select(0, last))[:, : model.config.vocab_size], None
    return Contexts(
        positions=positions,
        target=model.logits(hidden.index_select(0, last)).numpy(),
        drafter=drafted.numpy(),
        token_ids=ids,
    )


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sample answers, read both models on them, compare. ValueError without a drafter that has probabilities."""
    config = ServeConfig(model=arguments.model, port=0, threads=arguments.threads)
    with Display() as display:
        directory = resolve_model(config.model, display)
        specs = draft_specs(config, directory, arguments.head, arguments.draft_model)
        if not specs:
            raise ValueError(f"{arguments.model} ships no head: give --head or --draft-model")
        with display.phase("Loading"):
            sizes = size(config, directory)
            runner = bare_runner(sizes)
            drafter = load_draft_weights(specs[-1], runner.model, directory)
        assert drafter is not None
        tokenizer = load_tokenizer(directory)
        prompts = [
            tokenizer.encode_chat([ChatMessage(role="user", content=prompt.text)])
            for prompt in prompts_of("chat", arguments.prompts, seed=1)
        ]
        found = [Acceptance(temperature=temperature) for temperature in arguments.temperatures]
        with display.bar("Comparing", len(found) * len(prompts)) as advance:
            for number, acceptance in enumerate(found):
                engine = Engine([runner], sizes.scheduler)
                for seed, prompt in enumerate(prompts):
                    sampling = SamplingParams(
                        temperature=acceptance.temperature, seed=seed, eos_token_ids=runner.model.config.eos_token_ids
                    )
                    engine.submit(prompt, sampling, arguments.max_tokens)
                for index, output in enumerate(engine.run().values()):
                    text = [*output.prompt_token_ids.tolist(), *output.token_ids]
                    contexts = read_contexts(runner.model, drafter, text, len(output.prompt_token_ids))
                    acceptance.add(contexts, arguments.draws)
                    advance(number * len(prompts) + index + 1)
    return {"method": specs[-1].method, "draws": arguments.draws, "rows": [one.as_row() for one in found]}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Acceptance of sampled drafts")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", default=None, help="an EAGLE-3 head; default: the one that ships for the model")
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draws", type=int, default=8, help="of noise, for each context")
    parser.add_argument(
        "--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=TEMPERATURES
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    """Measure and print."""
    arguments = parse(sys.argv[1:])
    restart_with(environment(arguments.threads))
    result = benchmark(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    table = Table(*result["rows"][0], title=f"First drafts of {result['method']}, sampled")
    for row in result["rows"]:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
