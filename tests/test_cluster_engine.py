"""The in-process engine: the same core and runners as on a cluster, with steps in flight and messages gone astray."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from cluster.engine import Engine, Message, Output, in_order
from scheduler.events import (
    CacheReset,
    Cancelled,
    PreemptRequested,
    SchedulerConfig,
    StartStep,
    StepFinished,
    SwapRequested,
)
from scheduler.request import FinishReason, SamplingParams
from tests.disorder import Disorder
from tests.oracle import OracleDrafter, ToyModel, undisturbed
from worker.batch import Batch
from worker.drafter import Drafter, NgramDrafter
from worker.model import Model
from worker.rows import RowState
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

BLOCK = 4
VOCAB = 64
GREEDY = SamplingParams(temperature=0.0)
CONFIG = SchedulerConfig(
    block_size=BLOCK, max_model_len=200, max_num_batched_tokens=32, max_drafts=4, resend_after_ns=20_000_000
)


def toy(num_blocks: int = 64, **options: float) -> ToyModel:
    return ToyModel(vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK, **options)


def runner_of(
    worker_id: str = "a", *, model: ToyModel | None = None, drafter: Drafter | None = None, max_num_seqs: int = 8
) -> Runner:
    model = toy() if model is None else model
    return Runner(
        worker_id=worker_id,
        model=model,
        drafter=drafter,
        max_num_seqs=max_num_seqs,
        sanitizer=KVSanitizer(model.kv_cache.num_blocks, BLOCK),
    )


def prompt(number: int) -> list[int]:
    return [(number * 7 + index * index) % VOCAB for index in range(3 + number * 5 % 23)]


def expected(number: int, max_tokens: int = 20, sampling: SamplingParams = GREEDY) -> list[int]:
    return undisturbed(toy(), prompt(number), sampling, max_tokens).token_ids


def oracle_for(numbers: Sequence[int], max_drafts: int = 4) -> OracleDrafter:
    drafter = OracleDrafter(max_drafts=max_drafts, vocab_size=VOCAB, spoil=0.25)
    drafter.learn({f"r{number}": [*prompt(number), *expected(number)] for number in numbers})
    return drafter


def submit_all(engine: Engine, numbers: Sequence[int], sampling: SamplingParams = GREEDY) -> None:
    for number in numbers:
        engine.submit(prompt(number), sampling, 20, f"r{number}")


def assert_all_as_expected(outputs: dict[str, Output], numbers: Sequence[int]) -> None:
    assert {name: output.token_ids for name, output in outputs.items()} == {
        f"r{number}": expected(number) for number in numbers
    }


def test_requests_run_to_their_end_with_what_they_asked_for() -> None:
    engine = Engine([runner_of(drafter=oracle_for(range(5)))], CONFIG)
    submit_all(engine, range(5), replace(GREEDY, num_logprobs=2))
    outputs = engine.run()
    assert_all_as_expected(outputs, range(5))
    for output in outputs.values():
        assert output.finish_reason is FinishReason.LENGTH
        assert output.finish is not None
        assert output.finish.num_output_tokens == 20
        assert len(output.logprobs) == len(output.top_token_ids) == len(output.top_logprobs) == 20


def test_an_id_is_given_to_a_request_that_has_none() -> None:
    engine = Engine([runner_of()], CONFIG)
    first, second = (engine.submit(prompt(1), GREEDY, 3) for _ in range(2))
    assert first != second
    assert [engine.run()[request_id].token_ids for request_id in (first, second)] == [expected(1)[:3]] * 2


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3, 4])
def test_steps_are_planned_as_far_ahead_as_configured(max_steps_in_flight: int) -> None:
    most = 0

    def watch(under_way: list[Message]) -> list[Message]:
        nonlocal most
        most = max(most, sum(isinstance(message, StartStep) for message in under_way))
        return in_order(under_way)

    engine = Engine([runner_of()], replace(CONFIG, max_steps_in_flight=max_steps_in_flight), schedule=watch)
    submit_all(engine, range(3))
    assert_all_as_expected(engine.run(), range(3))
    assert most == max_steps_in_flight


@pytest.mark.parametrize("seed", range(12))
def test_delayed_reordered_repeated_and_lost_messages_change_no_stream(seed: int) -> None:
    numbers = range(8)
    runners = [runner_of(name, drafter=oracle_for(numbers)) for name in "ab"]
    config = replace(CONFIG, max_steps_in_flight=1 + seed % 4)
    engine = Engine(runners, config, schedule=Disorder(seed, delay=0.5, repeat=0.3, lose=0.1))
    submit_all(engine, numbers)
    assert_all_as_expected(engine.run(), numbers)
    engine.scheduler.check()


def test_every_plan_lost_once_is_sent_again() -> None:
    seen: set[tuple[str, int]] = set()

    def lose_first(under_way: list[Message]) -> list[Message]:
        arriving: list[Message] = []
        for message in under_way:
            worked_on = message.plan if isinstance(message, StartStep) else message.result
            key = (type(message).__name__, worked_on.step_seq)
            if key in seen:
                arriving.append(message)
            seen.add(key)
        under_way.clear()
        return arriving

    engine = Engine([runner_of()], CONFIG, schedule=lose_first)
    submit_all(engine, [1])
    assert_all_as_expected(engine.run(), [1])
    assert engine.scheduler.stats().num_resends > 0


def test_events_at_any_step_change_no_stream() -> None:
    for disturbed_step in range(12):
        engine = Engine([runner_of(drafter=oracle_for(range(6)), model=toy(24))], CONFIG)
        submit_all(engine, range(6))
        for _ in range(disturbed_step):
            engine.step()
        engine.handle(PreemptRequested(request_id="r2"))
        engine.handle(CacheReset(reset_running=disturbed_step % 2 == 0))
        assert_all_as_expected(engine.run(), range(6))
        assert engine.scheduler.stats().async_tokens_to_discard == 0


def test_a_cancelled_request_ends_where_it_was() -> None:
    engine = Engine([runner_of()], CONFIG)
    submit_all(engine, range(2))
    for _ in range(8):
        engine.step()
    engine.handle(Cancelled(request_id="r1", attempt=0))
    outputs = engine.run()
    assert outputs["r1"].finish_reason is FinishReason.ABORT
    assert 0 < len(outputs["r1"].token_ids) < 20
    assert outputs["r1"].token_ids == expected(1)[: len(outputs["r1"].token_ids)]
    assert outputs["r0"].token_ids == expected(0)


def test_a_lost_worker_s_requests_resume_on_another() -> None:
    engine = Engine([runner_of(name) for name in "ab"], CONFIG)
    submit_all(engine, range(6))
    for _ in range(9):
        engine.step()
    engine.lose_worker("a")
    assert_all_as_expected(engine.run(), range(6))


class FailsOnce(ToyModel):
    """Its tenth forward raises."""

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.num_forwards == 9:
            self.num_forwards += 1
            raise RuntimeError("out of memory")
        return super().forward(batch)


def test_a_step_that_fails_costs_its_session_and_no_token() -> None:
    model = FailsOnce(vocab_size=VOCAB, num_blocks=64, block_size=BLOCK)
    engine = Engine([runner_of(model=model)], CONFIG)
    submit_all(engine, range(4))
    assert_all_as_expected(engine.run(), range(4))
    [worker] = engine.scheduler.stats().workers
    assert worker.session == 2


class PoisonsOne(ToyModel):
    """Gives NaN wherever token 63 stands."""

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        hidden[batch.token_ids == 63] = torch.nan
        return hidden


def test_a_row_that_fails_ends_alone_with_its_error() -> None:
    model = PoisonsOne(vocab_size=VOCAB, num_blocks=64, block_size=BLOCK)
    engine = Engine([runner_of(model=model)], CONFIG)
    assert 63 not in {*prompt(0), *expected(0)}
    submit_all(engine, [0])
    engine.submit([4, 4, 63, 4, 4], GREEDY, 20, "bad")
    outputs = engine.run()
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    assert outputs["bad"].token_ids == []
    assert outputs["bad"].finish is not None
    assert "request bad: the hidden state at position 2 is not finite" in outputs["bad"].finish.message
    assert outputs["r0"].token_ids == expected(0)


def test_swapped_weights_continue_streams_with_the_new_model() -> None:
    runner = runner_of()
    other = toy(last_token_weight=1.0)

    def swap(weights: str) -> Model:
        assert weights == "other"
        return other

    runner._swap = swap
    engine = Engine([runner], CONFIG)
    submit_all(engine, [1])
    for _ in range(6):
        engine.step()
    num_before = len(engine.outputs["r1"].token_ids)
    engine.handle(SwapRequested(weights="other"))
    stream = engine.run()["r1"].token_ids
    assert other.num_forwards > 0

    def continued(num_kept: int) -> list[int]:
        fresh = toy(last_token_weight=1.0)
        kept = stream[:num_kept]
        return kept + undisturbed(fresh, [*prompt(1), *kept], GREEDY, 20 - num_kept).token_ids

    # The plan that swaps waits for a free place in the pipeline: what is applied until then counts.
    assert any(
        stream[:kept] == expected(1)[:kept] and stream == continued(kept) for kept in range(num_before, num_before + 3)
    )


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "named"),
    [([], 5, "prompt_token_ids"), ([1], 0, "max_tokens"), ([1] * 190, 20, "max_model_len")],
)
def test_what_the_scheduler_refuses_is_raised_and_not_kept(token_ids: list[int], max_tokens: int, named: str) -> None:
    engine = Engine([runner_of()], CONFIG)
    with pytest.raises(ValueError, match=named):
        engine.submit(token_ids, GREEDY, max_tokens)
    assert engine.outputs == {}
    assert engine.run() == {}


def test_a_request_beyond_every_pool_is_refused() -> None:
    engine = Engine([runner_of(model=toy(4))], CONFIG)
    with pytest.raises(ValueError, match="KV pool"):
        engine.submit([1] * 10, GREEDY, 20)


def test_a_deadline_ends_a_request_where_it_is() -> None:
    engine = Engine([runner_of()], CONFIG)
    engine.submit(prompt(0), GREEDY, 150, "slow", deadline_ns=20_000_000)
    output = engine.run()["slow"]
    assert output.finish_reason is FinishReason.DEADLINE
    assert 0 < len(output.token_ids) < 150


def test_a_gap_in_a_stream_is_a_fault_of_ours() -> None:
    output = Output(request_id="r0", prompt_token_ids=torch.zeros(1).numpy())
    output.append(0, [1, 2], None)
    with pytest.raises(AssertionError, match="tokens at 3, have 2"):
        output.append(3, [4], None)


def test_the_engine_says_when_nothing_moves_any_more() -> None:
    def lose_everything(under_way: list[Message]) -> list[Message]:
        under_way.clear()
        return []

    engine = Engine([runner_of()], CONFIG, schedule=lose_everything)
    submit_all(engine, [1])
    with pytest.raises(RuntimeError, match="nothing moves any more"):
        engine.run()


def test_prompt_lookup_speeds_up_a_stream_that_repeats_and_changes_nothing() -> None:
    steps = []
    for drafter in (None, NgramDrafter(max_drafts=4, prompt_lookup_min=1)):
        engine = Engine([runner_of(drafter=drafter, model=toy(last_token_weight=1000.0))], CONFIG)
        engine.submit(prompt(3), GREEDY, 100, "r3")
        steps.append((engine.run()["r3"].token_ids, engine.scheduler.stats().num_steps))
    assert steps[0][0] == steps[1][0]
    assert steps[1][1] < steps[0][1] * 0.6


def test_streams_are_the_same_on_one_worker_and_on_three() -> None:
    for names in ("a", "abc"):
        engine = Engine([runner_of(name, drafter=oracle_for(range(9))) for name in names], CONFIG)
        submit_all(engine, range(9))
        assert_all_as_expected(engine.run(), range(9))


def test_results_of_a_session_that_is_over_are_ignored() -> None:
    held: list[Message] = []

    def hold_results(under_way: list[Message]) -> list[Message]:
        held.extend(message for message in under_way if isinstance(message, StepFinished))
        return in_order(under_way)

    engine = Engine([runner_of()], CONFIG, schedule=hold_results)
    submit_all(engine, range(3))
    for _ in range(5):
        engine.step()
    engine.lose_worker("a")
    for message in held:
        assert isinstance(message, StepFinished)
        engine.handle(message)
    assert_all_as_expected(engine.run(), range(3))
    assert engine.scheduler.stats().num_stale_results > 0


# ---- traps ----


@pytest.mark.parametrize("first_reset", [6, 18])
def test_trap_4_resets_on_consecutive_steps_drop_frames_and_no_token(first_reset: int) -> None:
    streams = {f"r{number}": expected(number, 100) for number in range(3)}
    drafter = OracleDrafter(max_drafts=3, vocab_size=VOCAB, spoil=0.25)
    drafter.learn({f"r{number}": [*prompt(number), *streams[f"r{number}"]] for number in range(3)})
    engine = Engine([runner_of(drafter=drafter)], replace(CONFIG, max_drafts=3, max_steps_in_flight=4))
    for number in range(3):
        engine.submit(prompt(number), GREEDY, 100, f"r{number}")
    dropped = 0
    for step in range(first_reset + 2):
        if step >= first_reset:
            engine.handle(CacheReset(reset_running=True))
            dropped = max(dropped, engine.scheduler.stats().async_tokens_to_discard)
        engine.step()
        engine.scheduler.check()
    assert dropped > 0
    outputs = engine.run()
    assert {request_id: output.token_ids for request_id, output in outputs.items()} == streams
    assert all(engine.scheduler.async_tokens_to_discard(f"r{number}") == 0 for number in range(3))


def test_trap_9_penalties_see_real_tokens_under_speculation_with_steps_in_flight() -> None:
    sampling = SamplingParams(
        temperature=0.7, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    )
    drafter = OracleDrafter(max_drafts=4, vocab_size=VOCAB, spoil=0.3)
    drafter.learn({f"r{number}": [*prompt(number), *expected(number, sampling=sampling)] for number in range(5)})
    engine = Engine([runner_of(drafter=drafter)], replace(CONFIG, max_steps_in_flight=3))
    submit_all(engine, range(5), sampling)
    outputs = engine.run()
    for number in range(5):
        assert outputs[f"r{number}"].token_ids == expected(number, sampling=sampling)
    assert engine.scheduler.stats().num_accepted_tokens > 0


def test_trap_12_a_request_outgrows_its_drafter_and_goes_on_without_drafts() -> None:
    repeating = toy(last_token_weight=1000.0)
    drafter = NgramDrafter(max_drafts=4, prompt_lookup_min=1, max_model_len=80)
    engine = Engine([runner_of(drafter=drafter, model=repeating)], CONFIG)
    engine.submit(prompt(0), GREEDY, 190, "long")
    num_draft_tokens = []
    while engine.outputs["long"].finish is None:
        engine.step()
        length = len(prompt(0)) + len(engine.outputs["long"].token_ids)
        if length > 80:
            num_draft_tokens.append(engine.scheduler.stats().num_draft_tokens)
    output = engine.run()["long"]
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 190
    assert num_draft_tokens[-1] == num_draft_tokens[0] > 0


def test_trap_31_acceptance_of_others_stays_when_one_request_outgrows_the_drafter() -> None:
    accepted = []
    for others in (0, 1):
        drafter = NgramDrafter(max_drafts=4, prompt_lookup_min=1, max_model_len=80)
        engine = Engine([runner_of(drafter=drafter, model=toy(last_token_weight=1000.0))], CONFIG)
        for _ in range(others):
            engine.submit([*range(40), *range(40)], GREEDY, 100, "long")
        engine.submit(prompt(0), GREEDY, 60, "short")
        finish = engine.run()["short"].finish
        assert finish is not None
        accepted.append((finish.num_accepted_tokens, finish.num_draft_tokens))
    assert accepted[0] == accepted[1]
    assert accepted[0][0] > 0


def test_trap_33_drafts_that_were_planned_but_never_made_count_nowhere() -> None:
    class Silent(Drafter):
        """Has no idea."""

        max_drafts = 4

        def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
            return [[] for _ in rows]

    engine = Engine([runner_of(drafter=Silent())], CONFIG)
    submit_all(engine, range(3))
    assert_all_as_expected(engine.run(), range(3))
    stats = engine.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0, 0)
    assert stats.mean_acceptance_length == 1.0
    assert stats.tokens_rolled_back > 0
