"""Products on AMX tiles: the right numbers, a row's bits its own, and oneDNN's where both can."""

import pytest
import torch

from worker import amx
from worker.linear import Linear
from worker.products import TileLinear, columns, dense, int8, pairs, tile_rows
from worker.quantized import Int8Linear, quantize

needs_tiles = pytest.mark.skipif(not amx.is_available(), reason="this processor has no AMX tiles")
ROWS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_tiles
@pytest.mark.parametrize("is_int8", [False, True], ids=("bfloat16", "int8"))
@pytest.mark.parametrize("has_bias", [False, True], ids=("no bias", "bias"))
def test_a_row_has_the_same_right_bits_in_any_company_and_with_any_number_of_threads(
    is_int8: bool, has_bias: bool
) -> None:
    weight, bias = random(96, 160), random(96, seed=1) if has_bias else None
    linear, x = TileLinear(weight, bias, is_int8=is_int8), random(70, 160, seed=2)
    exact = weight.double()
    if is_int8:
        rounded, scale = quantize(weight)
        exact = rounded.double() * scale.double()[:, None]
    whole = linear(x)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    assert torch.allclose(whole.double(), expected, rtol=1e-2, atol=1e-2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert torch.equal(linear(x[:rows]), whole[:rows]), (threads, rows)
                assert torch.equal(linear(x[-rows:]), whole[-rows:]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@needs_tiles
@pytest.mark.parametrize("shape", [(576, 960), (1536, 576), (64, 128)], ids=str)
def test_in_bfloat16_they_are_the_bits_of_onednn(shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    weight, x = random(outputs, inputs) / inputs**0.5, random(37, inputs, seed=1)
    assert torch.equal(TileLinear(weight)(x), Linear(weight)(x))


@needs_tiles
def test_few_rows_of_int8_are_summed_as_tiles_sum_even_where_terms_cancel_or_are_denormal() -> None:
    """The kernel for up to 4 rows uses no tiles; their order of additions is its own to keep."""
    weight, x = random(64, 256), random(40, 256, seed=1).float()
    large, partners = torch.randperm(256, generator=torch.Generator().manual_seed(2))[:170].chunk(2)
    weight[:, partners] = -weight[:, large]
    x[:, large] *= 4096
    x[:, partners] = x[:, large]
    x[8:16] *= 1e-38  # denormal, or their products are
    x[16:24] *= 1e-40
    x[24] = 0
    linear, x = TileLinear(weight, is_int8=True), x.bfloat16()
    whole = linear(x)
    for row in range(len(x)):
        for count in range(1, 5):
            assert torch.equal(linear(x[row : row + count]), whole[row : row + count]), (row, count)


@needs_tiles
def test_rows_that_are_not_finite_stay_alone() -> None:
    linear, x = TileLinear(random(64, 64)), random(5, 64, seed=1)
    expected = linear(x)
    x[2] = float("nan")
    out = linear(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_what_tiles_cannot_take_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(dense(random(48, 64))) is Linear
    assert type(dense(random(64, 64).float())) is Linear
    assert type(int8(random(64, 48))) is Int8Linear
    monkeypatch.setattr(amx, "is_available", lambda: False)
    assert type(dense(random(64, 64))) is Linear
    assert type(int8(random(64, 64))) is Int8Linear


def test_panels_keep_pairs_of_inputs_beside_each_other_or_all_outputs_of_an_input() -> None:
    weight = torch.arange(64 * 4).view(64, 4)
    assert pairs(weight).shape == (2, 2, 32, 2)
    assert pairs(weight)[1, 1, 5].tolist() == weight[37, 2:4].tolist()
    assert columns(weight).shape == (2, 4, 32)
    assert columns(weight)[1, 3].tolist() == weight[32:, 3].tolist()


def test_every_block_of_rows_has_its_tiles() -> None:
    assert tile_rows(1)[amx.ROWS_A] == tile_rows(1)[amx.SUM_A1] == 1
    assert tile_rows(20)[amx.ROWS_A] == 16
    assert tile_rows(20)[amx.SUM_B0] == 4
    assert tile_rows(20)[amx.COLUMNS_1] == 16
