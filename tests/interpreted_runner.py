"""The runner on device rows against the runner on the host, plan by plan. Run by test_worker_kernels.py in a process of
its own, under Triton's interpreter."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Semaphore

import numpy as np
import pytest
import torch

from cluster.config import ServeConfig, SpeculativeConfig
from cluster.engine import Engine
from cluster.sizing import size
from scheduler.events import CacheReset, Cancelled, PreemptRequested, SchedulerConfig, SwapRequested
from scheduler.request import FinishReason, SamplingParams
from scheduler.step import StepPlan, StepResult
from tests.oracle import ToyModel
from tests.tiny_model import save_tiny_model
from worker.actor import WorkerActor, WorkerSpec
from worker.batch import Batch
from worker.device_runner import DeviceRunner, LaunchedStep
from worker.drafter import Drafter, NgramDrafter
from worker.drafting import build_drafter
from worker.model import load_model
from worker.rows import RowState
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

BLOCK_SIZE = 4
NUM_BLOCKS = 26
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 64
VOCAB = 40
BROKEN_STATE = 36  # a token
BROKEN_LOGITS = (11, 37)  # tokens

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=1 << 63),
    SamplingParams(temperature=0.7, seed=5, top_k=9, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, logit_bias=((3, 0.5), (BROKEN_STATE, 9.0))),
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=1.0, seed=8, min_tokens=4, stop_token_ids=(1, 2, 3, 4, 5, 6, 7)),
    SamplingParams(temperature=0.0, logit_bias=((999, 0.5),)),  # refused
)


class PaddedToy(ToyModel):
    """Takes padded batches; broken hidden states at one token, broken logits after others."""

    def __init__(self, last_token_weight: float = 4.0) -> None:
        super().__init__(
            vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, last_token_weight=last_token_weight
        )
        self.max_model_len = MAX_MODEL_LEN

    def forward(self, batch: Batch) -> torch.Tensor:
        num_tokens = int(batch.cu_seqlens_q[-1])
        assert (batch.slot_mapping[num_tokens:] == -1).all()
        taken = {name: getattr(batch, name)[:num_tokens] for name in ("token_ids", "positions", "slot_mapping")}
        hidden = torch.zeros((len(batch.token_ids), 2), dtype=torch.float64)
        hidden[:num_tokens] = super().forward(replace(batch, **taken))
        broken = taken["token_ids"] == BROKEN_STATE
        self.kv_cache.value.view(-1)[taken["slot_mapping"][broken]] = torch.nan
        hidden[:num_tokens][broken] = torch.nan
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(torch.nan_to_num(hidden))
        logits[np.isin(hidden[:, 1].numpy(), BROKEN_LOGITS)] = torch.nan
        return logits


class Recalling(Drafter):
    """Drafts what a request returned another time, some tokens of it spoiled."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self.max_drafts = 3
        self._known = known

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        return [self._propose(row, min(wanted, self.max_drafts)) for row, wanted in zip(rows, num_propose, strict=True)]

    def _propose(self, row: RowState, wanted: int) -> list[int]:
        drafts = self._known[row.request_id][row.num_tokens : row.num_tokens + wanted]
        return [(token + ((row.num_tokens + index) % 4 == 0)) % VOCAB for index, token in enumerate(drafts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both runners get of their own."""

    known: dict[str, list[int]] | None = None  # request_id -> tokens, of which a drafter makes its drafts
    lookup: bool = False
    sanitize: bool = False
    last_token_weight: float = 4.0

    def build(self, make: type[Runner]) -> Runner:
        model = PaddedToy(self.last_token_weight)
        other = PaddedToy(self.last_token_weight / 2)
        other.kv_cache = model.kv_cache
        return make(
            worker_id="a",
            model=model,
            drafter=self._drafter(),
            max_num_seqs=MAX_NUM_SEQS,
            sanitizer=KVSanitizer(NUM_BLOCKS, BLOCK_SIZE) if self.sanitize else None,
            swap=lambda weights: other if weights == "other" else model,
        )


    def _drafter(self) -> Drafter | None:
        if self.lookup:
            return NgramDrafter(max_drafts=3, prompt_lookup_min=1, prompt_lookup_max=3)
        return None if self.known is None else Recalling(self.known)


class RecordingRunner(Runner):
    """Keeps what it was asked and what it answered."""

    taken: list[tuple[StepPlan, StepResult]]

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        self.taken.append((plan, result))
        return result


def played(seed: int, setting: Setting, num_requests: int) -> tuple[list[tuple[StepPlan, StepResult]], Engine]:
    """Every plan of a random day and the host's answers: chunks, hits, preemptions, resets, a new session, a swap."""
    runner = setting.build(RecordingRunner)
    assert isinstance(runner, RecordingRunner)
    runner.taken = []
    config = SchedulerConfig(
        block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=14, max_drafts=runner.max_drafts
    )
    engine, rng = Engine([runner], config), random.Random(seed)
    shared = [rng.randrange(VOCAB - 8) for _ in range(8)]
    for index in range(num_requests):
        prompt = shared[: rng.choice((0, 8))] + [rng.randrange(VOCAB - 8) for _ in range(rng.randint(1, 14))]
        engine.submit(
            prompt, SAMPLINGS[index % len(SAMPLINGS)], rng.randint(1, 18), max_drafts=rng.choice((None, None, 1, 2))
        )
        for _ in range(rng.randint(0, 3)):
            engine.step()
        live = [request_id for request_id, output in engine.outputs.items() if output.finish is None]
        match rng.randrange(8):
            case 0 if live:
                engine.handle(PreemptRequested(request_id=rng.choice(live)))
            case 1:
                engine.handle(CacheReset(reset_running=rng.random() < 0.5))
            case 2 if live:
                engine.handle(Cancelled(request_id=rng.choice(live), attempt=0))
        if index == num_requests // 4:
            engine.lose_worker("a")
        if index == num_requests // 2:
            engine.handle(SwapRequested(weights="other"))
    engine.run()
    return runner.taken, engine


def same(result: StepResult, expected: StepResult) -> None:
    """Everything but times."""
    for name in ("rows", "epochs", "num_tokens", "num_verified", "token_ids"):
        got, want = getattr(result, name), getattr(expected, name)
        assert (got.dtype, got.tolist()) == (want.dtype, want.tolist()), (result.step_seq, name)
    assert result.failures == expected.failures
    assert (result.worker_id, result.session, result.step_seq) == ("a", expected.session, expected.step_seq)
    for row, other in zip(result.logprobs, expected.logprobs, strict=True):
        assert row.row_index == other.row_index
        assert row.logprobs.tolist() == other.logprobs.tolist()
        assert row.top_token_ids.tolist() == other.top_token_ids.tolist()


def device_of(setting: Setting) -> DeviceRunner:
    runner = setting.build(DeviceRunner)
    assert isinstance(runner, DeviceRunner)
    return runner


def answers(runner: DeviceRunner, plans: Iterable[StepPlan], *, ahead: int) -> list[StepResult]:
    """ahead: so many plans are launched before the result of one is read."""
    results: list[StepResult] = []
    steps: deque[LaunchedStep] = deque()
    session = 0
    for plan in plans:
        if plan.session != session:
            session = plan.session
            results += [step.result() for step in steps]
            steps.clear()
            runner.begin_session(session)
        steps.append(runner.launch(plan))
        if len(steps) > ahead:
            results.append(steps.popleft().result())
    return [*results, *(step.result() for step in steps)]


def replayed(setting: Setting, taken: Sequence[tuple[StepPlan, StepResult]], *, ahead: int) -> DeviceRunner:
    """The same day on device rows, every answer compared."""
    runner = device_of(setting)
    for result, (_, expected) in zip(answers(runner, [plan for plan, _ in taken], ahead=ahead), taken, strict=True):
        same(result, expected)
    return runner


def test_any_day_on_device_rows_is_answered_as_on_the_host() -> None:
    _, engine = played(1, Setting(), 16)
    known = {
        request_id: [*output.prompt_token_ids.tolist(), *output.token_ids]
        for request_id, output in engine.outputs.items()
    }
    drafting = Setting(known=known, sanitize=True)
    taken, engine = played(1, drafting, 16)
    messages = {failure.message.partition(": ")[2][:10] for _, result in taken for failure in result.failures}
    assert {"the hidden", "the logits", "logit_bias"} <= messages
    assert_a_full_day(taken, engine)
    assert_drafts_were_right_and_wrong(engine)
    runner = replayed(drafting, taken, ahead=0)
    assert 0 < runner.num_host_sampled < sum(int(result.num_tokens.sum()) for _, result in taken)


def test_steps_launched_before_the_last_ones_are_read_are_answered_as_on_the_host() -> None:
    looking_up = Setting(lookup=True, last_token_weight=1000.0)
    taken, engine = played(3, looking_up, 16)
    assert_a_full_day(taken, engine)
    assert_drafts_were_right_and_wrong(engine)
    replayed(looking_up, taken, ahead=1)


def test_without_a_drafter_steps_are_launched_ahead_too() -> None:
    plain = Setting()
    taken, _ = played(3, plain, 7)
    replayed(plain, taken, ahead=1)


def assert_drafts_were_right_and_wrong(engine: Engine) -> None:
    stats = engine.scheduler.stats()
    assert 5 < stats.num_accepted_tokens < stats.num_draft_tokens - 5


def assert_a_full_day(taken: Sequence[tuple[StepPlan, StepResult]], engine: Engine) -> None:
    assert any(result.failures for _, result in taken)
    assert any(plan.weights for plan, _ in taken)
    assert {plan.session for plan, _ in taken} == {1, 2}
    assert any((plan.reserved == 0).any() for plan, _ in taken)
    assert any(result.logprobs for _, result in taken)
    reasons = {output.finish_reason for output in engine.outputs.values()}
    assert reasons > {FinishReason.LENGTH, FinishReason.ERROR}


def test_a_worker_takes_the_next_plan_while_the_device_carries_out_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_SANITIZE_KV", "0")
    save_tiny_model(tmp_path)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    config = ServeConfig(device="cpu", attention="triton", dtype="float32", max_model_len=64, speculative=speculative)
    config = replace(config, max_num_seqs=2, num_gpu_blocks_override=8, threads=1)
    [spec] = size(config, tmp_path).workers
    taken = answered_by_the_host(spec, tmp_path)

    waiting, over = Semaphore(0), Event()
    wait = LaunchedStep.wait

    def wait_for_a_slow_device(step: LaunchedStep) -> None:
        waiting.release()
        assert over.wait(60)
        wait(step)

    monkeypatch.setattr(LaunchedStep, "wait", wait_for_a_slow_device)
    worker = WorkerActor(spec)
    worker.register(1)
    with ThreadPoolExecutor(2) as calls:
        offers = []
        for plan, _ in taken[:2]:
            offers.append(calls.submit(worker.offer, plan))
            assert waiting.acquire(timeout=60)  # it is launched, and its answer is waited for
        assert not any(offer.done() for offer in offers)
        over.set()
    results = [result for offer in offers for result in offer.result()]
    results += [result for plan, _ in taken[2:] for result in worker.offer(plan)]
    for result, (_, expected) in zip(results, taken, strict=True):
        same(replace(result, worker_id="a"), expected)


def answered_by_the_host(spec: WorkerSpec, directory: Path) -> list[tuple[StepPlan, StepResult]]:
    """Two short requests on the host's runner, over the same kernels."""
    model = load_model(
        directory, dtype=torch.float32, device="cpu", attention="triton", num_blocks=8, block_size=spec.block_size
    )
    runner = RecordingRunner(
        worker_id="a",
        model=model,
        drafter=build_drafter(spec.drafts, model, directory, max_num_seqs=2, sanitize=False),
        max_num_seqs=2,
        sanitizer=None,
    )
    runner.taken = []
    engine = Engine([runner], SchedulerConfig(block_size=spec.block_size, max_model_len=64, max_drafts=2))
    engine.submit([5, 9, 5, 9, 5], SamplingParams(temperature=0.0), 5)
    engine.submit([7, 7, 7], SamplingParams(temperature=0.8, seed=3), 4)
    engine.run()
    return runner.taken
