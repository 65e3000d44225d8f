"""Weights of 8 bits: what they lose, and that a row's bits are its own."""

import pytest
import torch

from worker.fingerprint import fingerprint, make_batch, self_test
from worker.model import Model, ModelConfig, random_model
from worker.quantized import Int8Linear, quantize

DTYPES = (torch.float32, torch.bfloat16)
TINY = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=("no bias", "bias"))
def test_products_are_those_of_the_rounded_weight_whatever_the_rows_and_threads(
    dtype: torch.dtype, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn((100, 48), generator=generator).to(dtype), torch.randn(100, generator=generator)
    x = torch.randn((37, 48), generator=generator).to(dtype)
    linear = Int8Linear(weight, bias.to(dtype) if has_bias else None)
    rounded, scale = quantize(weight)
    expected = x.double() @ (rounded.double() * scale.double()[:, None]).T
    out = linear(x)
    if has_bias:
        expected += bias.to(dtype).double()
    assert torch.allclose(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 3, 4, 5, 16, 17, 36):
                assert torch.equal(linear(x[:rows]), out[:rows])
                assert torch.equal(linear(x[-rows:]), out[-rows:])
    finally:
        torch.set_num_threads(before)


def test_rounding_keeps_half_a_step_and_rows_of_zeros() -> None:
    weight = torch.randn((8, 32), generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    rounded, scale = quantize(weight)
    assert ((rounded * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    assert rounded.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127, 127]


def test_shapes_the_kernel_cannot_take_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="quantization int8: a product of 24 inputs and 8 outputs"):
        Int8Linear(torch.zeros(8, 24))
    with pytest.raises(ValueError, match="quantization 'int4' is unknown; known: int8"):
        tiny("int4")


def test_a_quantized_model_keeps_its_rows_and_says_what_it_is() -> None:
    model = tiny("int8")
    assert self_test(model) == []
    assert "quantization=int8" in fingerprint(model)
    plain = tiny(None)
    assert "quantization" not in fingerprint(plain)
    batch = make_batch([([1, 2, 3, 4, 5], 0, [0])], 16)
    logits, expected = (m.logits(m.forward(batch)) for m in (model, plain))
    assert not torch.equal(logits, expected)
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.999


def tiny(quantization: str | None) -> Model:
    return random_model(TINY, seed=0, dtype=torch.float32, num_blocks=32, block_size=16, quantization=quantization)
