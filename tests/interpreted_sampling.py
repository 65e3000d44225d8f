"""The sampling kernel under Triton's interpreter. Run by test_worker_kernels.py in a process of its own."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from scheduler.request import SamplingParams
from worker.kernels import sampling as kernels
from worker.kernels.sampling import FAILED, SamplingColumns, sample, sample_reference
from worker.sampler import gumbel

VOCAB_SIZE = 300


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_kernel(seed, position, noise, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0) * TILE
    values = kernels._gumbel(tl.load(seed).to(tl.uint64, bitcast=True), tl.load(position), start, TILE)
    tl.store(noise + start + tl.arange(0, TILE), values)


def sampled_by_kernel(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, columns: SamplingColumns
) -> torch.Tensor:
    sampled = torch.full(rows.shape, -777, dtype=torch.int32)
    sample(logits, rows, positions, columns, sampled)
    return sampled


def random_columns(num_rows: int, generator: np.random.Generator) -> SamplingColumns:
    columns = SamplingColumns.empty(num_rows, "cpu")
    for row in range(num_rows):
        columns.write(
            row,
            SamplingParams(
                temperature=float(generator.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
                top_p=float(generator.choice([1.0, 1.0, 0.9, 0.5, 0.01])),
                top_k=int(generator.choice([0, 0, 1, 2, 20, 299, 1000])),
                min_p=float(generator.choice([0.0, 0.0, 0.05, 1.0])),
                seed=int(generator.integers(0, 2**64, dtype=np.uint64)),
            ),
        )
    return columns


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1])
def test_noise_has_the_bits_of_the_hosts_noise(seed: int) -> None:
    noise = torch.full((512,), math.nan, dtype=torch.float64)
    column = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))
    gumbel_kernel[(4,)](column, torch.tensor([1234567]), noise, TILE=128)
    assert np.array_equal(noise.numpy(), gumbel(seed, 1234567, np.arange(512)))


@pytest.mark.parametrize("values", ["normal", "ties", "masked"])
@pytest.mark.parametrize("seed", range(3))
def test_samples_equal_the_host_samplers(seed: int, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_VOCAB_TILE", 128)  # three tiles, the last one ragged
    generator = np.random.default_rng(seed)
    columns = random_columns(6, generator)
    logits = torch.from_numpy(generator.normal(0, 3, (6, VOCAB_SIZE)).astype(np.float32))
    if values == "ties":
        logits = logits.round()
    if values == "masked":
        logits[torch.from_numpy(generator.random(logits.shape) < 0.9)] = -math.inf
        logits[:, 7] = -0.0
        logits[:, 9] = 0.0
    rows = torch.from_numpy(generator.permutation(6).astype(np.int32))
    positions = torch.from_numpy(generator.integers(0, 1 << 20, 6))
    expected = sample_reference(logits, rows, positions, columns)
    assert sampled_by_kernel(logits, rows, positions, columns).tolist() == expected.tolist()


def test_ties_go_to_the_lowest_id_in_the_argmax_and_in_every_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_VOCAB_TILE", 64)
    columns = SamplingColumns.empty(4, "cpu")
    columns.write(0, SamplingParams(temperature=0.0))
    columns.write(1, SamplingParams(temperature=1.0, top_k=1))
    columns.write(2, SamplingParams(temperature=1.0, top_p=0.001))
    columns.write(3, SamplingParams(temperature=1.0, top_k=3, top_p=0.3))
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:, 70:] = 2.0
    rows, positions = torch.arange(4, dtype=torch.int32), torch.arange(4)
    assert sampled_by_kernel(logits, rows, positions, columns).tolist() == [70] * 4


def test_a_seed_of_its_own_decides_each_rows_token() -> None:
    columns = SamplingColumns.empty(40, "cpu")
    for row in range(40):
        columns.write(row, SamplingParams(temperature=1.0, seed=row % 20))
    rows = torch.arange(40, dtype=torch.int32)
    sampled = sampled_by_kernel(torch.zeros(40, VOCAB_SIZE), rows, torch.full((40,), 5), columns)
    assert torch.equal(sampled[:20], sampled[20:])
    assert len(set(sampled.tolist())) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_logits_without_a_finite_best_fail_their_position_alone(fault: float, temperature: float) -> None:
    columns = SamplingColumns.empty(1, "cpu")
    columns.write(0, SamplingParams(temperature=temperature, top_k=3, top_p=0.9))
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, 5 if not math.isinf(fault) or fault > 0 else slice(None)] = fault
    logits[:, 200] = torch.where(torch.isneginf(logits[:, 200]), logits[:, 200], 30.0)
    sampled = sampled_by_kernel(logits, torch.zeros(3, dtype=torch.int32), torch.arange(3), columns)
    assert sampled.tolist() == [200, FAILED, 200]


def test_padding_samples_nothing() -> None:
    columns = SamplingColumns.empty(1, "cpu")
    logits = torch.full((2, VOCAB_SIZE), math.nan)
    sampled = sampled_by_kernel(logits, torch.tensor([-1, -1], dtype=torch.int32), torch.zeros(2).long(), columns)
    assert sampled.tolist() == [FAILED, FAILED]
