"""Products whose rows keep their bits in any company, for any row count, packing and thread count."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from worker.linear import Linear, RowTile, padded_rows, row_counts

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((576, 960), (1536, 576), (64, 128), (96, 48))  # in, out


@pytest.fixture(params=(1, 2), ids=("one thread", "two threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(
    threads: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs, outputs = shape
    linear = Linear(random(outputs, inputs, dtype=dtype) / inputs**0.5)
    assert linear.is_exact
    x = random(700, inputs, dtype=dtype, seed=1)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 129, 300, 513):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_keeps_its_bits_wherever_it_stands(dtype: torch.dtype) -> None:
    linear = Linear(random(96, 64, dtype=dtype))
    x = random(90, 64, dtype=dtype, seed=1)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order]), linear(x)[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_bias_are_those_of_the_plain_one(dtype: torch.dtype) -> None:
    weight, bias, x = random(96, 64, dtype=dtype), random(96, dtype=dtype, seed=1), random(7, 64, dtype=dtype, seed=2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(
        Linear(weight, bias)(x).double(), expected, rtol=1e-2, atol=0.1 if dtype != torch.float32 else 1e-4
    )


def test_more_rows_than_the_tile_run_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Linear(random(96, 64))
    x = random(45, 64, seed=1)
    whole = linear(x)
    counts: list[int] = []
    product = linear._product
    monkeypatch.setattr(linear, "tile", RowTile(rows=16, exact=True))

    def counted(x: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return product(x)

    monkeypatch.setattr(linear, "_product", counted)
    assert torch.equal(linear(x), whole)
    assert counts == [16, 16, 16]


def test_only_row_counts_of_the_probed_ladder_are_multiplied() -> None:
    assert {padded_rows(rows) for rows in range(1, 513)} == set(row_counts(512))
    assert all(0 <= padded_rows(rows) - rows < 32 for rows in range(1, 2000))


def test_a_shape_is_probed_once_per_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    Linear(random(80, 48))
    monkeypatch.setattr(Linear, "_probe", lambda *_: pytest.fail("probed again"))
    Linear(random(80, 48, seed=1))
