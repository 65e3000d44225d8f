"""The runner, driven by hand-made plans: true positions, verification, confinement of failures, order within a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from scheduler.request import SamplingParams
from scheduler.step import Arrival, StepPlan, StepResult
from tests.oracle import OracleDrafter, ToyModel, tokens, undisturbed
from worker.batch import Batch
from worker.drafter import Drafter, NgramDrafter
from worker.frames import Frame, gather_batch
from worker.model import Model
from worker.rows import RowState
from worker.runner import Runner
from worker.sanitizer import KVSanitizer

BLOCK = 4
NUM_BLOCKS = 64
VOCAB = 64
GREEDY = SamplingParams(temperature=0.0)
PROMPT = (5, 9, 2, 7, 7, 1)


class ListDrafter(Drafter):
    """Proposes from a list, whatever the row."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = list(token_ids)
        self.max_drafts = 8
        self.seen: list[list[int]] = []

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        self.seen.extend(row.token_ids.tolist() for row in rows)
        return [self.token_ids[:wanted] for wanted in num_propose]


class BrokenModel(ToyModel):
    """Gives NaN hidden states from token 60 on, and NaN logits after token 61."""

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        broken = batch.token_ids == 60
        self.kv_cache.value.view(-1)[batch.slot_mapping[broken]] = torch.nan
        hidden[broken] = torch.nan
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(torch.nan_to_num(hidden))
        logits[hidden[:, 1] == 61] = torch.nan
        return logits


@dataclass(slots=True, eq=False)
class Hand:
    """Makes the plans of one session and carries them out."""

    runner: Runner
    step_seq: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    columns: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    block_ids: list[list[int]] = field(default_factory=list)

    def arrive(
        self,
        epoch: int,
        prompt: Sequence[int] = PROMPT,
        *,
        outputs: Sequence[int] = (),
        row: int | None = None,
        end: int = 40,
        sampling: SamplingParams = GREEDY,
        num_computed_tokens: int = 0,
        request_id: str | None = None,
    ) -> None:
        self.arrivals.append(
            Arrival(
                row=epoch - 1 if row is None else row,
                epoch=epoch,
                request_id=f"r{epoch}" if request_id is None else request_id,
                prompt_token_ids=tokens(*prompt),
                output_token_ids=tokens(*outputs),
                num_computed_tokens=num_computed_tokens,
                end=end,
                namespace=0,
                sampling=sampling,
            )
        )

    def frame(
        self,
        epoch: int,
        num_scheduled: int,
        *,
        drafts: int = 0,
        reserved: int | None = None,
        propose: int = 0,
        blocks: Sequence[int] = (),
    ) -> None:
        reserved = 1 + drafts if reserved is None else reserved
        self.columns.append((epoch - 1, epoch, num_scheduled, drafts, reserved, propose))
        self.block_ids.append(list(blocks))

    def step(self, *, weights: str | None = None) -> StepResult:
        columns = np.array(self.columns, np.int64).reshape(-1, 6)
        rows, epochs, num_scheduled, num_drafts, reserved, num_propose = columns.T
        plan = StepPlan(
            session=1,
            step_seq=self.step_seq,
            acknowledged=-1,
            weights=weights,
            released_epochs=np.array(self.released, np.int64),
            arrivals=tuple(self.arrivals),
            rows=rows.astype(np.int32),
            epochs=epochs,
            num_scheduled=num_scheduled.astype(np.int32),
            num_drafts=num_drafts.astype(np.int32),
            reserved=reserved.astype(np.int32),
            num_propose=num_propose.astype(np.int32),
            block_offsets=np.cumsum([0, *map(len, self.block_ids)]).astype(np.int32),
            block_ids=np.array([block for blocks in self.block_ids for block in blocks], np.int32),
        )
        self.step_seq += 1
        for column in (self.arrivals, self.released, self.columns, self.block_ids):
            column.clear()
        return self.runner.execute(plan)


def hand_of(
    drafter: Drafter | None = None, model: ToyModel | None = None, *, sanitize: bool = True, max_num_seqs: int = 4
) -> Hand:
    model = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK) if model is None else model
    runner = Runner(
        worker_id="a",
        model=model,
        drafter=drafter,
        max_num_seqs=max_num_seqs,
        sanitizer=KVSanitizer(NUM_BLOCKS, BLOCK) if sanitize else None,
    )
    runner.begin_session(1)
    return Hand(runner)


def reference(prompt: Sequence[int] = PROMPT, max_tokens: int = 30, sampling: SamplingParams = GREEDY) -> list[int]:
    model = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    return undisturbed(model, prompt, sampling, max_tokens).token_ids


def returned(result: StepResult) -> list[list[int]]:
    """Tokens row by row."""
    return [part.tolist() for part in np.split(result.token_ids, np.cumsum(result.num_tokens)[:-1])]


def oracle_for(*continuations: Sequence[int], spoil: float = 0.0, max_drafts: int = 8) -> OracleDrafter:
    drafter = OracleDrafter(max_drafts=max_drafts, vocab_size=VOCAB, spoil=spoil)
    drafter.learn({f"r{index + 1}": token_ids for index, token_ids in enumerate(continuations)})
    return drafter


# ---- positions ----


def test_a_prompt_in_chunks_gives_the_token_of_the_prompt_in_one_piece() -> None:
    expected = reference()[:1]
    for chunks in ([6], [5, 1], [1, 1, 4], [2, 2, 2]):
        hand = hand_of()
        hand.arrive(1)
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1
            hand.frame(1, chunk, reserved=int(last), blocks=(9, 3) if index == 0 else ())
            result = hand.step()
            assert returned(result) == ([expected] if last else [[]])
            assert result.failures == ()


def test_every_step_is_one_forward_over_all_rows() -> None:
    model = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    hand = hand_of(ListDrafter(1, 2, 3), model)
    hand.arrive(1)
    hand.arrive(2, (8, 8, 8))
    hand.frame(1, 6, propose=3, blocks=range(4))
    hand.frame(2, 2, reserved=0, blocks=(10,))
    hand.step()
    hand.arrive(3, (4, 4))
    hand.frame(1, 4, drafts=3)
    hand.frame(2, 1)
    hand.frame(3, 2, blocks=(20,))
    hand.step()
    assert model.num_forwards == 2


def test_a_row_far_ahead_of_the_plan_computes_by_its_own_length() -> None:
    """Two plans made before either result: the second carries upper bounds only."""
    stream = [*PROMPT, *reference()]
    hand = hand_of(oracle_for(stream))
    hand.arrive(1)
    hand.frame(1, 6, propose=3, blocks=range(6))
    assert returned(hand.step()) == [stream[6:7]]
    hand.frame(1, 4, drafts=3, propose=3)
    assert returned(hand.step()) == [stream[7:11]]
    hand.frame(1, 4, drafts=3, propose=3)
    assert returned(hand.step()) == [stream[11:15]]


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3)])
def test_streams_are_those_of_plain_decoding_for_every_k(num_drafts: int, sampling: SamplingParams) -> None:
    expected = reference(sampling=sampling)
    hand = hand_of(oracle_for([*PROMPT, *expected], spoil=0.3))
    hand.arrive(1, sampling=sampling, end=len(PROMPT) + 30)
    hand.frame(1, 6, propose=num_drafts, blocks=range(9))
    outputs = returned(hand.step())[0]
    while len(outputs) < 30:
        hand.frame(1, 1 + num_drafts, drafts=num_drafts, propose=num_drafts)
        outputs += returned(hand.step())[0]
    assert outputs == expected


def test_trap_8_a_resumed_row_continues_behind_all_its_outputs() -> None:
    expected = reference()
    hand = hand_of()
    hand.arrive(1, outputs=expected[:10])
    hand.frame(1, 9, reserved=0, blocks=range(5))
    hand.step()
    hand.frame(1, 7)
    assert returned(hand.step()) == [expected[10:11]]


def test_a_prefix_hit_is_read_and_not_computed() -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.frame(1, 6, blocks=(7, 3))
    hand.step()
    prompt = (*PROMPT[:4], 40, 41)
    hand.arrive(2, prompt, num_computed_tokens=4)
    hand.frame(2, 2, blocks=(7, 5))
    result = hand.step()
    assert result.failures == ()
    assert returned(result) == [reference(prompt, 1)]


# ---- how many drafts ----


def test_no_more_drafts_are_verified_than_are_pending() -> None:
    stream = [*PROMPT, *reference()]
    hand = hand_of(oracle_for(stream, max_drafts=2))
    hand.arrive(1)
    hand.frame(1, 6, propose=2, blocks=range(5))
    hand.step()
    hand.frame(1, 6, drafts=5, propose=0)
    result = hand.step()
    assert result.num_verified.tolist() == [2]
    assert returned(result) == [stream[7:10]]
    hand.frame(1, 3, drafts=2)  # nothing was proposed for this one
    result = hand.step()
    assert result.num_verified.tolist() == [0]
    assert returned(result) == [stream[10:11]]


def test_trap_6_drafts_left_over_from_an_earlier_frame_are_never_used() -> None:
    stream = [*PROMPT, *reference()]
    hand = hand_of(oracle_for(stream))
    hand.arrive(1)
    hand.frame(1, 6, propose=5, blocks=range(5))
    hand.step()
    hand.frame(1, 2, drafts=1)
    assert returned(hand.step()) == [stream[7:9]]
    hand.frame(1, 5, drafts=4)
    result = hand.step()
    assert result.num_verified.tolist() == [0]
    assert returned(result) == [stream[9:10]]


def test_trap_6_drafts_of_a_row_that_was_passed_over_are_used_when_it_is_planned_again() -> None:
    stream = [*PROMPT, *reference()]
    hand = hand_of(oracle_for(stream))
    hand.arrive(1)
    hand.arrive(2, (8, 8))
    hand.frame(1, 6, propose=3, blocks=range(5))
    hand.step()
    for _ in range(3):
        hand.frame(2, 2 if hand.step_seq == 1 else 1, blocks=(30, 31) if hand.step_seq == 1 else ())
        hand.step()
    hand.frame(1, 4, drafts=3)
    result = hand.step()
    assert result.num_verified.tolist() == [3]
    assert returned(result) == [stream[7:11]]


def test_trap_11_near_its_end_a_row_verifies_and_proposes_only_what_can_still_count() -> None:
    stream = [*PROMPT, *reference()]
    drafter = oracle_for(stream)
    hand = hand_of(drafter)
    hand.arrive(1, end=10)
    hand.frame(1, 6, propose=8, blocks=range(3))
    hand.step()  # 7 tokens: drafts for positions 7 and 8, the token at 9 is the last
    assert drafter.num_proposed == 2
    hand.frame(1, 9, drafts=8, propose=8)
    result = hand.step()
    assert result.num_verified.tolist() == [2]
    assert returned(result) == [stream[7:10]]
    assert drafter.num_proposed == 2


def test_a_row_at_its_end_answers_no_tokens_and_writes_nothing() -> None:
    model = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    hand = hand_of(None, model)
    hand.arrive(1, end=7)
    hand.frame(1, 6, blocks=(0, 1))
    hand.step()
    before = model.kv_cache.key.clone()
    hand.frame(1, 1)
    result = hand.step()
    assert returned(result) == [[]]
    assert result.failures == ()
    assert model.num_forwards == 1
    assert torch.equal(model.kv_cache.key, before)


def test_trap_7_the_drafter_sees_confirmed_tokens_of_rows_that_returned_some() -> None:
    stream = [*PROMPT, *reference()]
    drafter = ListDrafter(63, 63, 63)  # never right
    hand = hand_of(drafter)
    hand.arrive(1)
    hand.arrive(2, (3, 3, 3, 3))
    hand.frame(1, 6, propose=3, blocks=range(5))
    hand.frame(2, 2, reserved=0, propose=0, blocks=(9,))
    hand.step()
    hand.frame(1, 4, drafts=3, propose=3)
    hand.step()
    assert drafter.seen == [stream[:7], stream[:8]]


def test_drafts_outside_the_vocabulary_are_cut_off() -> None:
    stream = [*PROMPT, *reference()]
    hand = hand_of(ListDrafter(stream[7], VOCAB, stream[9]))
    hand.arrive(1)
    hand.frame(1, 6, propose=3, blocks=range(5))
    hand.step()
    hand.frame(1, 4, drafts=3)
    result = hand.step()
    assert result.num_verified.tolist() == [1]
    assert returned(result) == [stream[7:9]]


def test_prompt_lookup_drafts_are_accepted_where_the_text_repeats() -> None:
    hand = hand_of(NgramDrafter(max_drafts=4, prompt_lookup_min=1))
    model = hand.runner.model
    assert isinstance(model, ToyModel)
    model._weight = 1000.0  # the next token depends on the last one alone: the stream runs into a cycle
    hand.arrive(1, end=200)
    hand.frame(1, 6, propose=4, blocks=range(50))
    num_outputs = len(returned(hand.step())[0])
    for _ in range(12):
        hand.frame(1, 5, drafts=4, propose=4)
        num_outputs += len(returned(hand.step())[0])
    assert num_outputs > 2 * 13


# ---- what comes back ----


def test_trap_14_each_row_gets_its_own_logprobs_when_rows_accept_different_counts() -> None:
    sampling = SamplingParams(temperature=0.0, num_logprobs=2)
    model = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    prompts = (PROMPT, (8, 8, 8), (3, 1))
    streams = [undisturbed(model, prompt, sampling, 12) for prompt in prompts]
    known = [[*prompt, *stream.token_ids] for prompt, stream in zip(prompts, streams, strict=True)]
    known[1][5] += 1  # the oracle is wrong about the second row's third output
    drafter = OracleDrafter(max_drafts=3, vocab_size=VOCAB + 1, spoil=0.0)
    drafter.learn({"r1": known[0], "r2": known[1]})
    hand = hand_of(drafter)
    for epoch, prompt in enumerate(prompts, start=1):
        hand.arrive(epoch, prompt, sampling=sampling)
        hand.frame(epoch, len(prompt), propose=3, blocks=range(10 * epoch, 10 * epoch + 5))
    hand.step()
    for epoch in (1, 2, 3):
        hand.frame(epoch, 4, drafts=3)
    result = hand.step()
    assert result.num_tokens.tolist() == [4, 2, 1]
    assert [row.row_index for row in result.logprobs] == [0, 1, 2]
    for row, stream, count in zip(result.logprobs, streams, (4, 2, 1), strict=True):
        expected = stream.logprobs[1 : 1 + count]
        assert row.logprobs.tolist() == [position.logprob for position in expected]
        assert np.array_equal(row.top_token_ids, [position.top_token_ids for position in expected])
        assert np.array_equal(row.top_logprobs, [position.top_logprobs for position in expected])


def test_a_result_names_its_plan_and_its_times() -> None:
    hand = hand_of(ListDrafter(1))
    hand.arrive(1)
    hand.frame(1, 6, propose=1, blocks=(0, 1, 2))
    first = hand.step()
    second = hand.step()
    assert (second.worker_id, second.session, second.step_seq) == ("a", 1, 1)
    assert first.verify_ns > 0
    assert first.draft_ns > 0
    assert first.idle_ns == 0
    assert second.idle_ns > 0


def test_an_empty_plan_is_answered_without_a_forward() -> None:
    model = ToyModel(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    result = hand_of(None, model).step()
    assert len(result.rows) == len(result.token_ids) == 0
    assert model.num_forwards == 0


# ---- rows come and go ----


def test_a_row_is_free_for_another_once_its_epoch_is_released() -> None:
    hand = hand_of(max_num_seqs=1)
    hand.arrive(1)
    hand.frame(1, 6, blocks=(0, 1))
    hand.step()
    hand.released.append(1)
    hand.arrive(2, (8, 8, 8), row=0)
    hand.frame(2, 3, blocks=(1,))
    result = hand.step()
    assert result.failures == ()
    assert returned(result) == [reference((8, 8, 8), 1)]


def test_two_epochs_never_share_a_row() -> None:
    hand = hand_of(max_num_seqs=1)
    hand.arrive(1)
    hand.step()
    hand.arrive(2, row=0)
    with pytest.raises(AssertionError, match="epoch 2 arrives at row 0"):
        hand.step()


def test_a_new_session_knows_no_row_of_the_one_before() -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.frame(1, 6, blocks=(0, 1))
    hand.step()
    hand.runner.begin_session(1)
    hand.step_seq = 0
    hand.frame(1, 1)
    [failure] = hand.step().failures
    assert "epoch 1 is not resident" in failure.message


def test_steps_out_of_order_are_refused() -> None:
    hand = hand_of()
    hand.step_seq = 1
    with pytest.raises(AssertionError, match="step 1 in place of 0"):
        hand.step()


def test_new_weights_take_effect_before_the_rows_of_their_plan() -> None:
    other = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK, last_token_weight=1.0)
    loaded: list[str] = []

    def swap(weights: str) -> Model:
        loaded.append(weights)
        return other

    hand = hand_of()
    hand.runner._swap = swap
    hand.arrive(1)
    hand.frame(1, 6, blocks=(0, 1))
    result = hand.step(weights="other")
    assert loaded == ["other"]
    fresh = ToyModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK, last_token_weight=1.0)
    assert returned(result) == [undisturbed(fresh, PROMPT, GREEDY, 1).token_ids]


def test_a_worker_that_cannot_swap_fails_the_step() -> None:
    with pytest.raises(ValueError, match="cannot swap its weights to other"):
        hand_of().step(weights="other")


# ---- one row fails alone ----


def test_a_row_with_broken_hidden_states_fails_alone_and_by_name_and_leaves_no_nan_behind() -> None:
    model = BrokenModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    hand = hand_of(None, model)
    hand.arrive(1)
    hand.arrive(2, (4, 60, 4, 4))
    hand.frame(1, 6, blocks=(0, 1))
    hand.frame(2, 3, reserved=0, blocks=(2,))
    result = hand.step()
    assert returned(result) == [reference()[:1], []]
    [failure] = result.failures
    assert failure.epoch == 2
    assert failure.message == "request r2: the hidden state at position 1 is not finite"
    assert torch.isfinite(model.kv_cache.value).all()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0), SamplingParams(num_logprobs=1)])
def test_a_row_with_broken_logits_fails_alone_and_ever_after(sampling: SamplingParams) -> None:
    hand = hand_of(None, BrokenModel(vocab_size=VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK))
    hand.arrive(1)
    hand.arrive(2, (4, 61), sampling=sampling)
    hand.frame(1, 6, blocks=(0, 1))
    hand.frame(2, 2, blocks=(2,))
    first = hand.step()
    assert returned(first) == [reference()[:1], []]
    hand.frame(2, 1)
    hand.frame(1, 1)
    second = hand.step()
    assert returned(second) == [[], reference()[1:2]]
    assert first.failures == second.failures
    assert first.failures[0].message == "request r2: the logits for position 2 are not finite"


def test_an_unknown_epoch_fails_alone() -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.frame(1, 6, blocks=(0, 1))
    hand.frame(3, 1, blocks=(2,))
    result = hand.step()
    assert returned(result) == [reference()[:1], []]
    assert [failure.epoch for failure in result.failures] == [3]


@pytest.mark.parametrize(
    ("num_scheduled", "reserved", "blocks", "message"),
    [
        (6, 0, (5, 6), "a chunk of 6 reaches token 6, but reserves none"),
        (5, 1, (5, 6), "6 tokens to compute, 5 scheduled"),
        (6, 1, (5,), "1 blocks of 4 cannot hold 6 tokens"),
        (6, 1, (5, NUM_BLOCKS), "block ids [5, 64] in a pool of 64 blocks"),
    ],
)
def test_trap_5_a_frame_the_protocol_does_not_allow_ends_that_request_alone(
    num_scheduled: int, reserved: int, blocks: Sequence[int], message: str
) -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.arrive(2)
    hand.frame(1, 6, blocks=(0, 1))
    hand.frame(2, num_scheduled, reserved=reserved, blocks=blocks)
    result = hand.step()
    assert returned(result) == [reference()[:1], []]
    [failure] = result.failures
    assert failure.epoch == 2
    assert message in failure.message


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((4, VOCAB), GREEDY, "token id 64 at position 1 is outside the vocabulary of 64"),
        ((4, -1), GREEDY, "token id -1 at position 1"),
        ((4, 5), SamplingParams(logit_bias=((99, 1.0),)), "logit_bias: token id 99"),
    ],
)
def test_an_arrival_that_cannot_be_computed_fails_alone(
    prompt: Sequence[int], sampling: SamplingParams, message: str
) -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.arrive(2, prompt, sampling=sampling)
    hand.frame(1, 6, blocks=(0, 1))
    hand.frame(2, 2, blocks=(2,))
    result = hand.step()
    assert returned(result) == [reference()[:1], []]
    assert message in result.failures[0].message


def test_a_row_that_would_read_foreign_kv_fails_alone_and_loudly() -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.arrive(2, (8, 8, 8, 8, 8), num_computed_tokens=4)
    hand.frame(1, 6, blocks=(0, 1))
    hand.frame(2, 1, blocks=(3, 4))
    result = hand.step()
    assert returned(result) == [reference()[:1], []]
    assert "request r2 (epoch 2) would read position 0 from slot 12" in result.failures[0].message


# ---- the batch ----


def test_the_batch_is_ragged_rows_by_true_positions_with_zero_tails() -> None:
    hand = hand_of(ListDrafter(50, 51))
    hand.arrive(1)
    hand.frame(1, 6, propose=2, blocks=(9, 3, 8))
    hand.step()
    hand.arrive(2, (8, 8, 8))
    hand.frame(2, 2, reserved=0, blocks=(7,))
    hand.step()
    one, two = hand.runner._rows[1], hand.runner._rows[2]
    frames = [
        Frame(index=0, row=two, start=2, stop=3, draft_token_ids=[], samples=True, num_propose=0),
        Frame(index=1, row=one, start=6, stop=9, draft_token_ids=[50, 51], samples=True, num_propose=0),
    ]
    batch = gather_batch(frames, hand.runner._table, torch.device("cpu"))
    assert batch.token_ids.tolist() == [8, one.token_ids[6], 50, 51]
    assert batch.positions.tolist() == [2, 6, 7, 8]
    assert batch.slot_mapping.tolist() == [7 * 4 + 2, 3 * 4 + 2, 3 * 4 + 3, 8 * 4]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4]
    assert batch.seq_lens.tolist() == [3, 9]
    assert batch.block_table.tolist() == [[7, 0, 0], [9, 3, 8]]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    dtypes = [getattr(batch, name).dtype for name in ("token_ids", "cu_seqlens_q", "block_table", "logits_indices")]
    assert dtypes == [torch.int64, torch.int32, torch.int32, torch.int64]


def test_rows_grow_with_the_longest_request_and_keep_what_they_hold() -> None:
    hand = hand_of()
    hand.arrive(1)
    hand.frame(1, 6, blocks=(0, 1))
    first = returned(hand.step())[0]
    hand.arrive(2, (8, 8), end=5000)
    hand.frame(1, 1)
    hand.frame(2, 2, blocks=(2,))
    assert [*first, *returned(hand.step())[0]] == reference()[:2]
