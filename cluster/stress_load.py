"""The load of a stress test: what is asked, how each stream went, and what it had to be.

References come from this process, undisturbed: the same model, one engine, no drafts. One greedy stream in
ten is held against transformers' own generation instead. Knows nothing about kills or clusters.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cluster.engine import Engine
from cluster.errors import ServerError
from cluster.sizing import Sizes
from scheduler.request import FinishReason, SamplingParams
from worker.actor import build

FAR_ABOVE = 60.0
NEAR_TIE = 1e-3  # logits so close may be ordered otherwise by another sum
FEWEST_TOKENS = 24
SHORTEST_PAUSE_S = 0.2  # that is worth a word
SHARED_PREFIX = 32  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, and how it is sampled."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int
    few: tuple[int, ...] = ()  # these tokens far above all others: a stream in which n-grams come again
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether transformers' greedy search is asked the same."""
        return self.temperature == 0 and self.repetition_penalty == 1.0 and not (self.few or self.stop_token_ids)

    @property
    def sampling(self) -> SamplingParams:
        """What the core is asked for."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logit_bias=tuple(sorted((token, FAR_ABOVE) for token in self.few)),
            stop_token_ids=self.stop_token_ids,
        )

    def options(self) -> dict[str, Any]:
        """The same for cluster.client."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "logit_bias": dict(self.sampling.logit_bias),
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": True,
        }


@dataclass(slots=True, eq=False)
class Stream:
    """What a client saw of one request."""

    request_id: str
    asked: Asked
    address: str  # of its front end
    token_ids: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # its own side of the story
    last_s: float | None = None  # when the last message came
    pauses: list[tuple[float, float]] = field(default_factory=list)  # between two messages: from, to
    reason: FinishReason | None = None  # None: it has not ended
    inexact: bool = False
    num_repeated: int = 0
    error: str | None = None
    left: bool = False  # the client did not want the rest

    @property
    def is_half_delivered(self) -> bool:
        """Whether some of it came, and not all."""
        return bool(self.token_ids) and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.reason is not None or self.error is not None or self.left

    def took(self, offset: int, token_ids: Sequence[int]) -> None:
        """A message came."""
        now_s = time.monotonic()
        if self.last_s is not None:
            pause_s = now_s - self.last_s
            if pause_s > SHORTEST_PAUSE_S:
                self.pauses.append((self.last_s, now_s))
                self.log.append(f"[{now_s:.3f}s] {len(self.token_ids)} tokens, then a pause of {pause_s:.2f} s")
        self.last_s = now_s
        if offset != len(self.token_ids):
            self.log.append(f"[{now_s:.3f}s] tokens at {offset} after {len(self.token_ids)}")
        self.token_ids.extend(token_ids)


def make_requests(count: int, sizes: Sizes, seed: int) -> list[Asked]:
    """Greedy and sampled, with repetitions and shared prefixes, for n-gram drafts and the prefix cache to find."""
    rng = random.Random(seed)
    vocab_size, room = sizes.vocab_size, sizes.max_model_len
    shared = [rng.randrange(3, vocab_size) for _ in range(SHARED_PREFIX)]
    requests = []
    for index in range(count):
        phrase = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(3, 12))]
        prompt = (shared if index % 3 == 0 else []) + phrase * rng.randrange(1, 4)
        most = min(room - len(prompt), room // 2)
        kind = index % 8
        requests.append(
            Asked(
                prompt=tuple(prompt),
                max_tokens=rng.randrange(min(FEWEST_TOKENS, most), most + 1),
                temperature=0.8 if kind in (1, 3, 5) else 0.0,
                top_k=20 if kind == 3 else 0,
                repetition_penalty=1.2 if kind == 6 else 1.0,
                seed=rng.randrange(1 << 32),
                few=tuple(dict.fromkeys(phrase[:3])) if kind in (2, 5) else (),
                stop_token_ids=tuple(phrase[:1]) if kind == 7 else (),
            )
        )
    return requests


class References:
    """What each stream must be."""

    def __init__(self, sizes: Sizes, requests: Sequence[Asked]) -> None:
        """Computes them all at once, in one engine with room for all, on as many threads as a worker's."""
        self._sizes = sizes
        self._by_transformers: dict[Asked, list[int]] = {}
        self.num_compared = 0  # streams held against transformers
        self.num_near_ties = 0  # of these, where two tokens were as good
        blocks = -(-sizes.max_model_len // sizes.scheduler.block_size)
        spec = replace(sizes.workers[0], num_blocks=len(requests) * blocks, max_num_seqs=len(requests))
        runner, traits = build(spec)
        self.fingerprint = traits.fingerprint
        engine = Engine([runner], sizes.scheduler)
        names = [engine.submit(asked.prompt, asked.sampling, asked.max_tokens, max_drafts=0) for asked in requests]
        outputs = engine.run()
        self._outputs = {asked: outputs[name] for asked, name in zip(requests, names, strict=True)}

    def token_ids(self, asked: Asked) -> list[int]:
        """All that a stream must bring."""
        return self._outputs[asked].token_ids

    def check_numbers(self, fingerprints: Sequence[str]) -> None:
        """ServerError if workers compute with other numbers than these."""
        for fingerprint in fingerprints:
            if fingerprint != self.fingerprint:
                raise ServerError(
                    f"a worker's numbers differ from this process's, so nothing can be compared: {fingerprint} is not "
                    f"{self.fingerprint}; give the same --model, --dtype and --threads"
                )

    def problem_with(self, stream: Stream) -> str | None:
        """What is wrong with a stream as far as it came; None if nothing is."""
        output = self._outputs[stream.asked]
        expected = output.token_ids
        if stream.reason is None:
            expected = expected[: len(stream.token_ids)]
        if stream.token_ids != expected:
            return difference(stream.token_ids, expected)
        if stream.reason is not None and stream.reason is not output.finish_reason:
            return f"it ended as {stream.reason.value}, not as {output.finish_reason}"
        return None

    def problem_with_transformers(self, stream: Stream) -> str | None:
        """The same, against another implementation. For plain requests in float32 only."""
        assert stream.asked.is_plain
        self.num_compared += 1
        expected = self._by_transformers.get(stream.asked)
        if expected is None:
            expected = self._by_transformers[stream.asked] = self._generate(stream)
        if stream.token_ids == expected[: len(stream.token_ids)]:
            return None
        return "by transformers: " + difference(stream.token_ids, expected)

    def _generate(self, stream: Stream) -> list[int]:
        """Greedy search; where it finds two tokens as good, the stream's own."""
        model, prompt = _transformers_model(self._sizes.directory), list(stream.asked.prompt)
        token_ids = _greedy(model, prompt, stream.asked.max_tokens)
        common = first_difference(token_ids, stream.token_ids)
        while common < min(len(token_ids), len(stream.token_ids)):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + token_ids[:common]])).logits[0, -1].float()
            if float(logits[token_ids[common]] - logits[stream.token_ids[common]]) > NEAR_TIE:
                break
            self.num_near_ties += 1
            token_ids = [*token_ids[:common], stream.token_ids[common]]
            token_ids += _greedy(model, prompt + token_ids, stream.asked.max_tokens - len(token_ids))
            common = first_difference(token_ids, stream.token_ids)
        return token_ids


_models: dict[Path, Any] = {}


def _transformers_model(directory: Path) -> Any:
    if directory not in _models:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        quieten: Any = logging.disable_progress_bar
        quieten()
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.generation_config.eos_token_id = None  # as ignore_eos
        _models[directory] = model
    return _models[directory]


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    if count < 1:
        return []
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
    token_ids: list[int] = found[0, len(prompt) :].tolist()
    return token_ids


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def difference(got: Sequence[int], expected: Sequence[int]) -> str:
    """In words, from the first token on that differs."""
    at = first_difference(got, expected)
    return f"from output {at} on: {list(got[at : at + 5])}, not {list(expected[at : at + 5])}"
