"""A target's own answers to many prompts, with its hidden states: what everything that drafts for it learns from.

Sampled with the in-process engine, shard by shard; an interrupted run goes on with the next one.
"""

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from cluster.engine import Engine
from cluster.errors import ConfigError
from cluster.head_prompts import read_prompts, varied_prompts
from cluster.progress import Display
from cluster.text import ChatMessage, Tokenizer, load_tokenizer
from scheduler.events import SchedulerConfig
from scheduler.request import SamplingParams
from worker.draft_corpus import Text, shard_path, write_shard
from worker.hf_model import load_any_model, read_any_config
from worker.model import Model
from worker.runner import Runner

BLOCK_SIZE = 16
SHARD_PROMPTS = 64
MAX_NUM_SEQS = 32
MAX_LEN = 1024  # tokens of prompt and answer
HELD_OUT = 20  # one prompt of so many is never trained on
TEMPERATURES = (0.0, 0.7, 1.0)  # of the others
MIN_OUTPUTS = 4  # shorter answers teach nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Whose answers, to what, and how many."""

    directory: Path  # of the target
    name: str  # of the target
    num_tokens: int  # of answers to learn from
    max_tokens: int  # of one answer
    prompts: Path | None  # one a line; None: our own
    state_layers: tuple[int, ...]  # whose hidden states are kept
    seed: int


def default_state_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high, as everybody chooses them."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)}))


def state_layers_of(directory: Path) -> tuple[int, ...]:
    """Of a target, whose states are kept. ConfigError says what is wrong with it."""
    try:
        return default_state_layers(read_any_config(directory).num_layers)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error


def run_directory(output: Path) -> Path:
    """Where a run that makes `output` keeps its texts and where it stands."""
    return output.with_name(output.name + ".run")


def sample_texts(request: TextRequest, run: Path, display: Display) -> None:
    """Fill a run's directory as far as it is not filled yet. ValueError for what the user can change."""
    run.mkdir(parents=True, exist_ok=True)
    prompts = varied_prompts(request.seed) if request.prompts is None else read_prompts(request.prompts)
    _check_same_run(run, request, prompts)
    _sample(request, run, prompts, display)


def _check_same_run(run: Path, request: TextRequest, prompts: Sequence[str]) -> None:
    """The shards of another target or other prompts must not be taken for this one's."""
    path = run / "sampling.json"
    asked = {
        "model": request.name,
        "prompts": len(prompts),
        "first": prompts[0],
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "state_layers": list(request.state_layers),
    }
    known = json.loads(path.read_text()) if path.is_file() else asked
    for name, value in asked.items():
        if known.get(name) != value:
            raise ValueError(f"{run} has the answers of another run: its {name} is {known.get(name)!r}, not {value!r}")
    path.write_text(json.dumps(asked))


def _sample(request: TextRequest, run: Path, prompts: Sequence[str], display: Display) -> None:
    """Answers and their hidden states, shard by shard, until there are tokens enough."""
    sampler: _Sampler | None = None
    done = 0
    with display.bar(f"Sampling {request.num_tokens} tokens", request.num_tokens) as advance:
        for shard in range(-(-len(prompts) // SHARD_PROMPTS)):
            if done >= request.num_tokens:
                return
            path = shard_path(run, shard)
            if not path.is_file():
                sampler = sampler or _Sampler(request)
                first = shard * SHARD_PROMPTS
                sampled = functools.partial(_advance_from, advance, done)
                texts = sampler.texts(prompts[first : first + SHARD_PROMPTS], first, sampled)
                write_shard(path, texts, sampler.model, request.state_layers)
            done += _num_outputs(path)
            advance(min(done, request.num_tokens))
    if done < request.num_tokens:
        display.warn([f"{len(prompts)} prompts gave {done} tokens, not {request.num_tokens}"])


def _advance_from(advance: Callable[[float], None], done: int, more: int) -> None:
    advance(done + more)


def _num_outputs(path: Path) -> int:
    with safe_open(path, framework="pt") as opened:
        return int((opened.get_tensor("num_tokens") - opened.get_tensor("num_prompt_tokens")).sum())


class _Sampler:
    """The target and what it takes to let it answer."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._tokenizer = load_tokenizer(request.directory)
        config = read_any_config(request.directory)
        self._max_len = min(MAX_LEN, config.max_position_embeddings)
        self.model: Model = load_any_model(
            request.directory,
            dtype=torch.bfloat16,
            device="cpu",
            attention="cpu",
            num_blocks=MAX_NUM_SEQS * -(-self._max_len // BLOCK_SIZE) // 2,
            block_size=BLOCK_SIZE,
            max_model_len=self._max_len,
        )

    def texts(self, prompts: Sequence[str], first: int, advance: Callable[[int], None]) -> list[Text]:
        """The target's answers to prompts number `first` and on."""
        # The pool's blocks are written by write_shard too: nothing of them may be found again.
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_model_len=self._max_len,
            max_num_batched_tokens=512,
            max_drafts=0,
            enable_prefix_caching=False,
        )
        runner = Runner(worker_id="sampler", model=self.model, drafter=None, max_num_seqs=MAX_NUM_SEQS, sanitizer=None)
        engine = Engine([runner], config)
        held_out: dict[str, bool] = {}
        for index, prompt in enumerate(prompts, start=first):
            token_ids = _encoded(self._tokenizer, prompt)
            if len(token_ids) + self._request.max_tokens > self._max_len:
                continue
            request_id = engine.submit(token_ids, self._sampling(index), self._request.max_tokens)
            held_out[request_id] = index % HELD_OUT == 0
        while any(output.finish is None for output in engine.outputs.values()):
            engine.step()
            advance(sum(len(output.token_ids) for output in engine.outputs.values()))
        return [
            Text(
                token_ids=[*output.prompt_token_ids.tolist(), *output.token_ids],
                num_prompt_tokens=len(output.prompt_token_ids),
                is_held_out=held_out[request_id],
            )
            for request_id, output in engine.outputs.items()
            if len(output.token_ids) >= MIN_OUTPUTS
        ]

    def _sampling(self, index: int) -> SamplingParams:
        rng = random.Random(f"{self._request.seed} {index}")
        return SamplingParams(
            temperature=0.0 if index % HELD_OUT == 0 else TEMPERATURES[index % len(TEMPERATURES)],
            seed=rng.getrandbits(64),
            eos_token_ids=self.model.config.eos_token_ids,
        )


def _encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """As a chat if the model has a template for it, else as it is."""
    try:
        token_ids = tokenizer.encode_chat([ChatMessage(role="user", content=prompt)])
    except ValueError:
        token_ids = tokenizer.encode(prompt)
    return [int(token_id) for token_id in token_ids]
