"""The study of shared noise: what it measures lies where theory says it must."""

from pathlib import Path

import numpy as np
import pytest

from scheduler.step import Int64Array
from tests import tiny_tokenizer
from tests.bench.noise import Acceptance, Contexts, benchmark, distributions, parse
from tests.heads import Sketch, save_head
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def contexts_of(count: int, *, spread: float, token_ids: Int64Array | None = None) -> Contexts:
    """A drafter whose logits are the target's with so much noise."""
    rng = np.random.default_rng(3)
    target = (2.0 * rng.standard_normal((count, 32))).astype(np.float32)
    drafter = (target + spread * rng.standard_normal(target.shape)).astype(np.float32)
    return Contexts(
        positions=range(5, 5 + count),
        target=target,
        drafter=drafter if token_ids is None else drafter[:, token_ids],
        token_ids=token_ids,
    )


@pytest.mark.parametrize(("spread", "temperature"), [(0.3, 1.0), (1.0, 0.8), (2.5, 1.0)])
def test_shared_noise_accepts_between_the_bound_and_the_optimum(spread: float, temperature: float) -> None:
    found = Acceptance(temperature=temperature)
    found.add(contexts_of(60, spread=spread), draws=40)
    assert found.num_contexts == 60
    assert found.bound - 0.03 <= found.shared <= found.optimum + 0.03
    assert found.optimum == pytest.approx(1.0 - found.total_variation)


def test_a_drafter_that_is_the_target_is_always_right_with_shared_noise_only() -> None:
    found = Acceptance(temperature=1.0)
    found.add(contexts_of(20, spread=0.0), draws=10)
    assert found.shared == found.bound == found.optimum == 1.0
    assert found.greedy < 0.9


def test_tokens_a_drafter_cannot_draft_have_no_probability() -> None:
    token_ids = np.array([1, 4, 9, 30], np.int64)
    contexts = contexts_of(3, spread=0.5, token_ids=token_ids)
    p, q = distributions(contexts, 1, 0.8)
    assert p.sum() == pytest.approx(1.0)
    assert np.flatnonzero(q).tolist() == token_ids.tolist()
    found = Acceptance(temperature=0.8)
    found.add(contexts, draws=20)
    assert found.shared <= found.optimum + 0.1


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_head_and_a_draft_model_are_read_on_the_targets_own_answers(method: str, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    config = save_tiny_model(target)
    tiny_tokenizer.save(target)
    if method == "eagle3":
        save_head(Sketch(target=config), other)
    else:
        save_tiny_model(other)  # the same weights as the target's
    flag = "--head" if method == "eagle3" else "--draft-model"
    words = ["--model", str(target), flag, str(other), "--threads", "1", "--prompts", "2", "--max-tokens", "8"]
    result = benchmark(parse([*words, "--draws", "2", "--temperatures", "1.0"]))
    [row] = result["rows"]
    assert (result["method"], row["num_contexts"]) == (method, 16)
    assert 0.0 <= row["bound"] <= row["optimum"] <= 1.0
    if method == "draft_model":
        # Not 1: a draft is one of the 256 likeliest tokens, and here 320 are about as likely.
        assert row["shared"] > 0.9
        assert row["total_variation"] == pytest.approx(0.0, abs=1e-4)
