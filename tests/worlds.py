"""Random schedules of many requests, played to their end and compared with undisturbed runs.

K, drafter, block size, chunking, steps in flight, pools too small, forced preemptions and resets at random
steps, cancels, lost workers, lost and reordered messages: none of it may show in a stream.
"""

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.engine import Engine, Output, in_order
from scheduler.events import CacheReset, Cancelled, PreemptRequested, SchedulerConfig, SwapRequested
from scheduler.request import FinishReason, SamplingParams
from tests.disorder import Disorder
from tests.oracle import OracleDrafter, Stream
from worker.attention import CpuAttention, KVCache
from worker.drafter import Drafter, NgramDrafter
from worker.model import Model
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

MAX_MODEL_LEN = 128
MAX_STEPS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request and its undisturbed stream."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stream: Stream

    @property
    def grows(self) -> bool:
        """Whether its outputs take more blocks than its admission looked for."""
        return len(self.prompt_token_ids) <= 48 and len(self.stream.token_ids) >= 12


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One random schedule. Printed when it fails."""

    seed: int
    crowded: bool  # short prompts and long outputs over a small pool: they get in each other's way as they grow
    dtype: str
    drafter: str
    num_requests: int
    num_drafts: int  # K
    spoil: float
    block_size: int
    pool_tokens: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    max_num_seqs: int
    num_workers: int
    prefix_caching: bool
    disorder: bool
    priorities: bool  # the priority policy, with priorities 0..2
    event_rate: float


def world_of(seed: int, dtype: str, drafter: str) -> World:
    rng = random.Random(f"{seed} {dtype} {drafter}")
    crowded = seed % 3 == 1
    return World(
        seed=seed,
        crowded=crowded,
        dtype=dtype,
        drafter=drafter,
        num_requests=rng.randint(8, 16),
        num_drafts=seed % 9,
        spoil=rng.choice((0.15, 0.25, 0.35)),
        block_size=rng.choice((8, 16, 32)),
        pool_tokens=96 if crowded else rng.choice((128, 160, 224, 512)),
        max_num_batched_tokens=rng.choice((12, 24, 40, 200)),
        max_steps_in_flight=1 + seed % 4,
        max_num_seqs=16 if crowded else rng.choice((4, 8, 16)),
        num_workers=rng.choice((1, 1, 1, 2)),
        prefix_caching=rng.random() < 0.8,
        disorder=rng.random() < 0.35,
        priorities=rng.random() < 0.3,
        event_rate=0.02 if crowded else rng.choice((0.0, 0.06, 0.15)),
    )


class Stage:
    """A model and the requests that worlds draw from, each with its undisturbed stream."""

    def __init__(
        self,
        vocab_size: int,
        asks: Sequence[Ask],
        pooled: Callable[[int, int], Model],
        drafters: "Mapping[str, MakeDrafter] | None" = None,
    ) -> None:
        """pooled: the model over a new pool, from (block_size, num_blocks). drafters: by name, besides the usual."""
        self.vocab_size = vocab_size
        self.asks = asks
        self.drafters = dict(drafters or {})
        self._pool = pooled
        self._pooled: dict[tuple[int, int, int], Model] = {}

    @classmethod
    def of(cls, model: Model, asks: Sequence[Ask], drafters: "Mapping[str, MakeDrafter] | None" = None) -> "Stage":
        """Of one set of weights under many pools."""
        return cls(model.config.vocab_size, asks, functools.partial(with_pool, model), drafters)

    def model_of(self, block_size: int, num_blocks: int, worker: int) -> Model:
        """The model over a pool of its own. Pools keep what earlier worlds wrote, as a worker's do."""
        key = (block_size, num_blocks, worker)
        if key not in self._pooled:
            self._pooled[key] = self._pool(block_size, num_blocks)
        return self._pooled[key]


def with_pool(model: Model, block_size: int, num_blocks: int) -> Model:
    """The same weights over another KV pool, on the CPU."""
    config = model.config
    pooled = copy.copy(model)
    pooled.kv_cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )
    pooled.attention = CpuAttention(pooled.kv_cache, num_heads=config.num_heads, windows=config.windows)
    return pooled


MakeDrafter = Callable[[World, Model, Drafter], Drafter]  # the last one knows the streams and spoils them


def drafter_of(world: World, stage: Stage, wanted: dict[str, Ask], model: Model) -> Drafter | None:
    if world.num_drafts == 0:
        return None
    if world.drafter == "ngram":
        return NgramDrafter(max_drafts=world.num_drafts, prompt_lookup_min=1, prompt_lookup_max=3)
    oracle = OracleDrafter(max_drafts=world.num_drafts, vocab_size=stage.vocab_size, spoil=world.spoil, seed=world.seed)
    oracle.learn({request_id: [*ask.prompt_token_ids, *ask.stream.token_ids] for request_id, ask in wanted.items()})
    make = stage.drafters.get(world.drafter)
    return oracle if make is None else make(world, model, oracle)


def engine_of(world: World, stage: Stage, wanted: dict[str, Ask]) -> Engine:
    num_blocks = world.pool_tokens // world.block_size
    models = [stage.model_of(world.block_size, num_blocks, index) for index in range(world.num_workers)]
    runners = [
        Runner(
            worker_id=f"worker-{index}",
            model=model,
            drafter=drafter_of(world, stage, wanted, model),
            max_num_seqs=world.max_num_seqs,
            sanitizer=KVSanitizer(num_blocks, world.block_size),
            swap=lambda _weights, model=model: model,  # type: ignore[misc]
        )
        for index, model in enumerate(models)
    ]
    config = SchedulerConfig(
        block_size=world.block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=world.max_num_batched_tokens,
        max_steps_in_flight=world.max_steps_in_flight,
        max_drafts=world.num_drafts,
        enable_prefix_caching=world.prefix_caching,
        scheduling_policy="priority" if world.priorities else "fcfs",
        resend_after_ns=20_000_000,
    )
    return Engine(runners, config, schedule=Disorder(world.seed) if world.disorder else in_order)


class Play:
    """One world, played to its end, with what happened counted."""

    def __init__(self, world: World, stage: Stage) -> None:
        self.world = world
        self.rng = random.Random(world.seed * 7919 + 1)
        asks = [ask for ask in stage.asks if ask.grows or not world.crowded]
        self.wanted = {f"r{index}": self.rng.choice(asks) for index in range(world.num_requests)}
        self.engine = engine_of(world, stage, self.wanted)
        self.unsubmitted = list(self.wanted)
        self.cancelled: set[str] = set()
        self.happened: Counter[str] = Counter()

    def to_the_end(self) -> Counter[str]:
        scheduler = self.engine.scheduler
        for _ in range(MAX_STEPS):
            self._submit_some()
            if self.rng.random() < self.world.event_rate:
                self._disturb()
                scheduler.check()
            self.engine.step()
            scheduler.check()
            if not self.unsubmitted and all(output.finish for output in self.engine.outputs.values()):
                break
        self.engine.run()  # what is still in flight of requests already gone
        self._assert_streams()
        self._assert_nothing_left()
        return self._tally()

    def _submit_some(self) -> None:
        while self.unsubmitted and self.rng.random() < 0.7:
            request_id = self.unsubmitted.pop(0)
            ask = self.wanted[request_id]
            priority = self.rng.randrange(3) if self.world.priorities else 0
            self.engine.submit(ask.prompt_token_ids, ask.sampling, ask.max_tokens, request_id, priority=priority)

    def _disturb(self) -> None:
        live = [request_id for request_id, output in self.engine.outputs.items() if output.finish is None]
        events = ("preempt", "preempt", "reset", "reset running", "reset running", "cancel", "lose", "swap")
        match self.rng.choice(events):
            case "preempt" if live:
                self._act("preempt", lambda: self.engine.handle(PreemptRequested(request_id=self.rng.choice(live))))
            case "reset":
                self._act("reset", lambda: self.engine.handle(CacheReset()))
            case "reset running":
                self._act("reset running", lambda: self.engine.handle(CacheReset(reset_running=True)))
            case "cancel" if live and len(self.cancelled) < 3:
                self.cancelled.add(request_id := self.rng.choice(live))
                self._act("cancel", lambda: self.engine.handle(Cancelled(request_id=request_id, attempt=0)))
            case "swap":  # to the same weights, over a pool full of KV of the namespace before
                weights = f"copy {self.happened['swap']}"
                self._act("swap", lambda: self.engine.handle(SwapRequested(weights=weights)))
            case "lose" if self.happened["lose"] < 2:
                worker_id = f"worker-{self.rng.randrange(self.world.num_workers)}"
                self._act("lose", lambda: self.engine.lose_worker(worker_id))

    def _act(self, name: str, act: Callable[[], None]) -> None:
        before = self.engine.scheduler.stats().async_tokens_to_discard
        act()
        self.happened[name] += 1
        if self.engine.scheduler.stats().async_tokens_to_discard > before:
            self.happened[f"{name} with frames in flight"] += 1

    def _assert_streams(self) -> None:
        for request_id, ask in self.wanted.items():
            output = self.engine.outputs[request_id]
            told = f"{request_id} of {self.world}\n{self.engine.scheduler.story(request_id)}"
            if output.finish_reason is FinishReason.ABORT:
                assert request_id in self.cancelled, told
                assert output.token_ids == ask.stream.token_ids[: len(output.token_ids)], told
            else:
                assert output.finish is not None, told
                assert output.finish_reason is ask.stream.reason, f"{output.finish.message} {told}"
                assert output.token_ids == ask.stream.token_ids, told
                assert not output.finish.inexact or self.happened["swap"]
            assert_same_logprobs(output, ask, told)

    def _assert_nothing_left(self) -> None:
        stats = self.engine.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.placeholders == stats.async_tokens_to_discard == 0
        for worker in stats.workers:
            assert worker.num_free_blocks == worker.num_blocks, self.world
            assert worker.num_steps_in_flight == 0, self.world

    def _tally(self) -> Counter[str]:
        stats = self.engine.scheduler.stats()
        self.happened["draft tokens"] += stats.num_draft_tokens
        self.happened["accepted tokens"] += stats.num_accepted_tokens
        self.happened["rolled back"] += stats.tokens_rolled_back
        self.happened["salvaged"] += stats.tokens_salvaged
        self.happened["prefix hits"] += stats.prefix_cache_hits
        for reason, count in stats.num_preemptions.items():
            self.happened[f"preempted: {reason}"] += count
        for reason, count in stats.stale_tokens_dropped.items():
            self.happened[f"dropped: {reason}"] += count
        return self.happened


def assert_same_logprobs(output: Output, ask: Ask, told: str) -> None:
    expected = ask.stream.logprobs[: len(output.token_ids)]
    assert output.logprobs == [position.logprob for position in expected], told
    if ask.sampling.num_logprobs:
        assert np.array_equal(output.top_token_ids, [position.top_token_ids for position in expected]), told
        assert np.array_equal(output.top_logprobs, [position.top_logprobs for position in expected]), told


def assert_everything_happened(happened: Counter[str], drafter: str) -> None:
    """The worlds were no easy ones."""
    for what in (
        "rolled back",
        "preempted: blocks",
        "salvaged",  # a block preemption hit a request with frames in flight
        "preempt with frames in flight",
        "reset running with frames in flight",
        "cancel with frames in flight",
        "prefix hits",
    ):
        assert happened[what] > 0, f"never happened: {what}; {happened}"
    acceptance = happened["accepted tokens"] / happened["draft tokens"]
    assert drafter == "ngram" or 0.2 < acceptance < 0.9, acceptance
