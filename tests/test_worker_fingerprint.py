"""Fingerprints: equal for equal numbers only; the self-test finds rows that depend on their company."""


import pytest
import torch

from worker.attention import AttentionBackend
from worker.batch import Batch
from worker.fingerprint import fingerprint, self_test
from worker.linear import RowTile
from worker.model import Model, ModelConfig, random_model

TINY = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(*, seed: int = 0, dtype: torch.dtype = torch.float32, num_blocks: int = 32, max_model_len: int = 256) -> Model:
    return random_model(TINY, seed=seed, dtype=dtype, num_blocks=num_blocks, block_size=16, max_model_len=max_model_len)


class CompanyDependent:
    """Attention whose rows get a little more for every other row of the step."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.fingerprint = backend.fingerprint

    def prepare(self, batch: Batch) -> None:
        self._backend.prepare(batch)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch
    ) -> torch.Tensor:
        return self._backend(query, key, value, layer, batch) * (1.0 + 1e-6 * len(query))


def test_equal_numbers_have_equal_fingerprints_whatever_the_pool() -> None:
    assert fingerprint(tiny()) == fingerprint(tiny(num_blocks=7))


def test_whatever_changes_the_numbers_changes_the_fingerprint() -> None:
    prints = {fingerprint(tiny()), fingerprint(tiny(seed=1)), fingerprint(tiny(dtype=torch.bfloat16))}
    torch.set_num_threads(2)
    prints.add(fingerprint(tiny()))
    assert len(prints) == 4
    assert all("threads=" in each and "torch=" in each and "weights=" in each for each in prints)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_invariant_model_passes_and_leaves_the_pool_zeroed(dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    assert self_test(model) == []
    assert not model.kv_cache.key.any()
    assert not model.kv_cache.value.any()


def test_rows_that_depend_on_their_company_are_found_and_named() -> None:
    model = tiny()
    model.attention = CompanyDependent(model.attention)
    complaints = self_test(model)
    assert any(line.startswith("a row alone differs from one chunk at position ") for line in complaints)
    assert all("in float32: a row depends on its company with 1 threads" in line for line in complaints)


def test_a_product_without_an_exact_row_count_is_named_with_its_shape() -> None:
    model = tiny()
    model.linears["layers.1.down"].tile = RowTile(rows=4, exact=False)
    model.linears["layers.0.down"].tile = RowTile(rows=4, exact=False)
    assert self_test(model) == [
        "product layers.0.down [64, 96] in float32: a row depends on its company with 1 threads"
    ]


def test_short_models_and_small_pools_are_tested_as_far_as_they_reach() -> None:
    assert self_test(tiny(max_model_len=20)) == []
    assert self_test(tiny(num_blocks=2)) == []
    assert self_test(tiny(num_blocks=1)) == ["a pool of 1 blocks is too small for the self-test"]
