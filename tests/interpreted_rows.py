"""Row state on the device, under Triton's interpreter. Run by test_worker_kernels.py in a process of its own."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from worker.attention import KVCache
from worker.kernels.lookup import look_up, look_up_reference
from worker.kernels.rows import (
    BROKEN_HIDDEN,
    Acceptance,
    DeviceRows,
    PlanColumns,
    accept_drafts,
    accept_drafts_reference,
    clear_broken,
    gather_frames,
    gather_frames_reference,
)
from worker.kernels.sampling import FAILED

MAX_DRAFTS = 4
POISON = -777


def rows_of(num_rows: int, generator: np.random.Generator) -> DeviceRows:
    """Rows at random points of their lives: before, in and after prefill, near their end, at it."""
    state = DeviceRows.empty(max_num_seqs=num_rows, max_model_len=96, block_size=16, device="cpu")
    state.token_ids.copy_(torch.from_numpy(generator.integers(0, 1000, state.token_ids.shape)))
    state.block_table.copy_(torch.from_numpy(generator.permutation(state.block_table.numel()).reshape(num_rows, -1)))
    for row in range(num_rows):
        length = int(generator.integers(1, 60))
        state.num_tokens[row] = length
        state.num_computed[row] = length - 1 if generator.random() < 0.6 else int(generator.integers(0, length))
        state.end[row] = length + int(generator.choice([0, 1, 2, 5, 30]))
        state.num_drafts[row] = int(generator.integers(0, MAX_DRAFTS + 1))
        if generator.random() < 0.1:
            state.end[row] = 0  # it has failed
    return state


def plan_of(state: DeviceRows, rows: list[int], generator: np.random.Generator) -> PlanColumns:
    """Chunks for rows still in prefill, sampling frames for most; row -1 is padding."""
    num_scheduled, num_drafts, reserved = [], [], []
    for row in rows:
        missing = int(state.num_tokens[row] - state.num_computed[row])
        is_chunk = missing > 1 and generator.random() < 0.5
        drafts = 0 if is_chunk else int(generator.integers(0, MAX_DRAFTS + 1))
        num_scheduled.append(int(generator.integers(1, missing)) if is_chunk else missing + drafts)
        num_drafts.append(drafts)
        reserved.append(0 if is_chunk else 1 + drafts)
    columns = (torch.tensor(column, dtype=torch.int32) for column in (rows, num_scheduled, num_drafts, reserved))
    return PlanColumns(**dict(zip(("rows", "num_scheduled", "num_drafts", "reserved"), columns, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_frames_and_acceptance_equal_the_reference(seed: int) -> None:
    generator = np.random.default_rng(seed)
    state = rows_of(9, generator)
    plan = plan_of(state, [*generator.permutation(9)[: int(generator.integers(1, 9))].tolist(), -1], generator)
    expected = gather_frames_reference(state, plan)
    num_tokens, num_samples = len(expected.batch.token_ids), len(expected.sample_rows)
    frames = gather_frames(state, plan, num_tokens=num_tokens + 7, num_samples=num_samples + 3)
    for field in dataclasses.fields(frames.batch):
        got, want = getattr(frames.batch, field.name), getattr(expected.batch, field.name)
        assert torch.equal(got[: len(want)], want), field.name
    assert torch.equal(frames.cu_samples, expected.cu_samples)
    assert torch.equal(frames.sample_rows[:num_samples], expected.sample_rows)
    assert torch.equal(frames.sample_positions[:num_samples], expected.sample_positions)
    assert frames.batch.slot_mapping[num_tokens:].tolist() == [-1] * 7
    assert frames.sample_rows[num_samples:].tolist() == [-1] * 3

    sampled = samples_near_the_drafts(state, frames.sample_rows, frames.sample_positions, generator)
    finite = torch.from_numpy((generator.random(num_tokens + 7) > 0.02).astype(np.int32))
    expected_state = copy.deepcopy(state)
    want_acceptance = accept_drafts_reference(
        expected_state, plan, expected, sampled, finite=finite, max_drafts=MAX_DRAFTS
    )
    acceptance = accept_drafts(state, plan, frames, sampled, finite=finite, max_drafts=MAX_DRAFTS)
    for field in dataclasses.fields(acceptance):
        assert torch.equal(getattr(acceptance, field.name), getattr(want_acceptance, field.name)), field.name
    for name in ("token_ids", "block_table", "num_tokens", "num_computed", "num_drafts", "end"):
        assert torch.equal(getattr(state, name), getattr(expected_state, name)), name


def samples_near_the_drafts(
    state: DeviceRows, rows: torch.Tensor, positions: torch.Tensor, generator: np.random.Generator
) -> torch.Tensor:
    """Mostly what the drafts say, sometimes another token, rarely a failure."""
    sampled = torch.full(rows.shape, POISON, dtype=torch.int32)
    for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if row >= 0:
            kind = generator.random()
            sampled[index] = int(state.token_ids[row, position]) + (kind > 0.7)
            if kind > 0.95:
                sampled[index] = FAILED
    return sampled


@pytest.mark.parametrize(
    ("drafts", "samples", "emitted"),
    [([1, 2, 3], [1, 5, 3, 4], [1, 5]), ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]), ([], [5], [5])],
)
def test_the_longest_prefix_that_equals_the_samples_is_accepted_and_one_token_more(
    drafts: list[int], samples: list[int], emitted: list[int]
) -> None:
    state = DeviceRows.empty(max_num_seqs=2, max_model_len=32, block_size=16, device="cpu")
    state.num_tokens[1], state.num_computed[1], state.end[1], state.num_drafts[1] = 10, 9, 32, len(drafts)
    state.token_ids[1, 10 : 10 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    plan = PlanColumns(
        rows=torch.tensor([1], dtype=torch.int32),
        num_scheduled=torch.tensor([4], dtype=torch.int32),
        num_drafts=torch.tensor([3], dtype=torch.int32),
        reserved=torch.tensor([4], dtype=torch.int32),
    )
    frames = gather_frames(state, plan, num_tokens=4, num_samples=4)
    sampled = torch.tensor(samples + [POISON] * (4 - len(samples)), dtype=torch.int32)
    acceptance = accept_drafts(state, plan, frames, sampled, finite=torch.ones(4, dtype=torch.int32), max_drafts=3)
    num_tokens = int(acceptance.num_tokens[0])
    assert acceptance.token_ids[0, :num_tokens].tolist() == emitted
    assert int(acceptance.num_verified[0]) == len(drafts)
    assert state.token_ids[1, 10 : 10 + num_tokens].tolist() == emitted
    assert (int(state.num_tokens[1]), int(state.num_computed[1])) == (10 + num_tokens, 9 + num_tokens)


def test_a_row_at_its_end_writes_nothing_and_answers_nothing() -> None:
    state = DeviceRows.empty(max_num_seqs=1, max_model_len=32, block_size=16, device="cpu")
    state.num_tokens[0], state.num_computed[0], state.end[0], state.num_drafts[0] = 10, 9, 10, 2
    plan = PlanColumns(
        rows=torch.tensor([0], dtype=torch.int32),
        num_scheduled=torch.tensor([3], dtype=torch.int32),
        num_drafts=torch.tensor([2], dtype=torch.int32),
        reserved=torch.tensor([3], dtype=torch.int32),
    )
    frames = gather_frames(state, plan, num_tokens=3, num_samples=3)
    sampled, finite = torch.full((3,), POISON, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    acceptance = accept_drafts(state, plan, frames, sampled, finite=finite, max_drafts=2)
    assert frames.batch.slot_mapping.tolist() == [-1, -1, -1]
    assert acceptance.num_tokens.tolist() == [0]
    assert (int(state.num_tokens[0]), int(state.num_computed[0])) == (10, 9)


def test_a_row_with_broken_hidden_states_fails_leaves_zeros_and_computes_nothing_more() -> None:
    state = DeviceRows.empty(max_num_seqs=2, max_model_len=32, block_size=16, device="cpu")
    state.block_table.copy_(torch.tensor([[3, 1], [2, 0]]))
    state.num_tokens.copy_(torch.tensor([20, 5]))
    state.num_computed.copy_(torch.tensor([14, 2]))
    state.end.fill_(32)
    columns = (torch.tensor(column, dtype=torch.int32) for column in ([0, 1], [4, 3], [0, 0], [0, 1]))
    plan = PlanColumns(**dict(zip(("rows", "num_scheduled", "num_drafts", "reserved"), columns, strict=True)))
    frames = gather_frames(state, plan, num_tokens=7, num_samples=1)
    kv_cache = KVCache(num_layers=2, num_blocks=4, block_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    kv_cache.key.fill_(1.0)
    kv_cache.value.fill_(math.nan)
    finite = torch.tensor([1, 0, 0, 1, 1, 1, 1], dtype=torch.int32)  # positions 15 and 16 of the chunk
    acceptance = accept_drafts(state, plan, frames, torch.tensor([7], dtype=torch.int32), finite=finite, max_drafts=2)
    clear_broken(acceptance, frames.batch, kv_cache)
    assert acceptance.failed.tolist() == [BROKEN_HIDDEN, 0]
    assert acceptance.failed_position.tolist() == [15, -1]
    assert acceptance.num_tokens.tolist() == [0, 1]
    wrote = [3 * 16 + 14, 3 * 16 + 15, 16, 17]
    for pool, kept in ((kv_cache.key, 1.0), (kv_cache.value, math.nan)):
        slots = pool.flatten(1, 2)
        assert not slots[:, wrote].any()
        slots[:, wrote] = kept
        assert torch.equal(slots.nan_to_num(-1.0), torch.full_like(slots, kept).nan_to_num(-1.0))
    again = gather_frames(state, plan, num_tokens=7, num_samples=1)
    assert again.batch.cu_seqlens_q.tolist() == [0, 0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_lookup_on_the_device_drafts_what_the_host_s_search_finds(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_rows, max_drafts = 12, 5
    state = DeviceRows.empty(max_num_seqs=num_rows, max_model_len=96, block_size=16, device="cpu")
    state.token_ids.copy_(torch.from_numpy(generator.integers(0, 3 + seed, state.token_ids.shape)))
    state.num_tokens.copy_(torch.from_numpy(generator.integers(1, 80, num_rows)))
    state.end.copy_(state.num_tokens + torch.from_numpy(generator.choice([1, 3, 9], num_rows)))
    rows = torch.tensor([*generator.permutation(num_rows)[:-1].tolist(), -1], dtype=torch.int32)
    num_propose = torch.from_numpy(generator.integers(0, 8, num_rows).astype(np.int32))
    acceptance = Acceptance.zeros(num_rows, max_drafts, "cpu")
    acceptance.num_tokens.copy_((rows >= 0) & torch.from_numpy(generator.random(num_rows) < 0.9))
    expected_state, expected = copy.deepcopy(state), copy.deepcopy(acceptance)
    limits = {"shortest": 1 + seed, "longest": 2 + seed}
    look_up(state, rows, num_propose, acceptance, **limits)
    look_up_reference(expected_state, rows, num_propose, expected, **limits)
    assert acceptance.num_drafts.tolist() == expected.num_drafts.tolist()
    for drafts, wanted, count in zip(acceptance.draft_ids, expected.draft_ids, expected.num_drafts, strict=True):
        assert drafts[:count].tolist() == wanted[:count].tolist()
    for name in ("token_ids", "num_tokens", "num_drafts"):
        assert torch.equal(getattr(state, name), getattr(expected_state, name)), name
    assert expected.num_drafts.any()
    assert not expected.num_drafts.all()
