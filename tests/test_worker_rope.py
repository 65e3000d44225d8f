"""RoPE of every scaling against transformers' tables; factors fixed at load; settings that cannot be read."""

from collections.abc import Mapping

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.rope import Rope, RopeConfig, inverse_frequencies, parse_rope, rotate

HEAD_DIM = 32
LONG = [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)]
SHORT = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with mscale": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7,
                         "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn with attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0,
                 "original_max_position_embeddings": 64},
    "longrope without factor": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                                "original_max_position_embeddings": 64},
}  # fmt: skip


def settings(scaling: Mapping[str, object]) -> dict[str, object]:
    return {"max_position_embeddings": 256, "rope_theta": 5000.0, "rope_scaling": dict(scaling)}


def theirs(scaling: Mapping[str, object], seq_len: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM, num_attention_heads=2, head_dim=HEAD_DIM, max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, **scaling},
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, torch.device("cpu"), seq_len=seq_len)
    return frequencies, factor


@pytest.mark.parametrize("max_model_len", [64, 256, 1000])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers_for_the_longest_sequence(name: str, max_model_len: int) -> None:
    expected, factor = theirs(SCALINGS[name], max_model_len)
    ours, our_factor = inverse_frequencies(
        parse_rope(settings(SCALINGS[name])),
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        max_model_len=max_model_len,
    )
    assert torch.allclose(ours, expected, rtol=1e-6)
    assert our_factor == pytest.approx(factor)


def test_both_spellings_of_a_config_give_one_rope() -> None:
    old = {"max_position_embeddings": 256, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
    assert parse_rope(old) == parse_rope(new)
    assert parse_rope({"rope_theta": 7.0, "rope_scaling": None}) == RopeConfig(theta=7.0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "proportional"}, "rope type 'proportional' is not supported"),
        ({"rope_type": "linear"}, "rope type linear needs factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "rope type llama3 needs high_freq_factor"),
        ({"rope_type": "linear", "factor": "two"}, "rope setting factor must be a number, got 'two'"),
        ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": LONG}, "short_factor must be a list of numbers"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_a_rope_that_cannot_be_served_is_refused_by_name(scaling: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rope(settings(scaling))


def test_longrope_factors_of_another_head_size_are_refused() -> None:
    config = RopeConfig(kind="longrope", short_factor=(1.0,), long_factor=(1.0,), original_max_position_embeddings=64)
    with pytest.raises(ValueError, match="1 factors for a head size of 32"):
        inverse_frequencies(config, head_dim=32, max_position_embeddings=256, max_model_len=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotation_is_that_of_transformers_and_of_each_row_alone(dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig(), head_dim=HEAD_DIM, max_position_embeddings=512, max_model_len=512)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((300, 3, HEAD_DIM), generator=generator).to(dtype)
    positions = torch.randint(0, 512, (300,), generator=generator)
    whole = rotate(x, *rope(positions))
    angles = positions[:, None, None].double() * rope.inverse_frequencies.double().repeat(2)
    first, second = x.double().chunk(2, -1)
    expected = x.double() * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
    assert torch.allclose(whole.double(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-4)
    for rows in (1, 2, 3, 5, 17, 64, 150):
        assert torch.equal(rotate(x[:rows], *rope(positions[:rows])), whole[:rows])
        assert torch.equal(rotate(x[-rows:], *rope(positions[-rows:])), whole[-rows:])
