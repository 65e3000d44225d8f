"""The attention and store kernels under Triton's interpreter. Run by test_worker_kernels.py in a process of its own."""

import math

import pytest
import torch

from tests.kernel_batches import PagedBatch, paged_batch
from worker.attention import KVCache
from worker.batch import Batch
from worker.kernels.attention import (
    AttentionShape,
    is_interpreting,
    paged_attention,
    paged_attention_reference,
    plan_launch,
)
from worker.kernels.backend import TritonAttention
from worker.kernels.store import store_kv, store_kv_reference
from worker.kernels.tuning import attention_tiles

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attend(batch: PagedBatch, shape: AttentionShape, *, query_len: int = 4, workspace: int = 1 << 30) -> torch.Tensor:
    """The kernel's output into a poisoned buffer."""
    num_tokens, num_reqs = batch.query.shape[0], batch.seq_lens.shape[0]
    launch = plan_launch(
        shape,
        tiles=attention_tiles(head_dim=shape.head_dim, group=shape.group, query_len=query_len, dtype=shape.dtype),
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_seq_len=batch.block_table.shape[1] * shape.block_size,
        device=batch.query.device,
        max_workspace_bytes=workspace,
    )
    for partial in (launch.partial_out, launch.partial_max, launch.partial_sum):
        partial.fill_(math.nan)
    out = torch.full(batch.query.shape, math.nan, dtype=shape.dtype)
    paged_attention(
        batch.query, batch.key_cache, batch.value_cache, out,
        batch.cu_seqlens_q, batch.seq_lens, batch.block_table, shape, launch,
    )  # fmt: skip
    return out


def reference(batch: PagedBatch, shape: AttentionShape) -> torch.Tensor:
    return paged_attention_reference(
        batch.query, batch.key_cache, batch.value_cache,
        batch.cu_seqlens_q, batch.seq_lens, batch.block_table, shape,
    )  # fmt: skip


def shape_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    softcap: float | None = None,
    split: int = 64,
) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
        split_size=split,
    )


def batch_of(shape: AttentionShape, query_lens: list[int], context_lens: list[int], seed: int) -> PagedBatch:
    return paged_batch(
        query_lens=query_lens,
        context_lens=context_lens,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
        seed=seed,
        window=shape.sliding_window,
    )


def random_case(seed: int, dtype: torch.dtype) -> tuple[AttentionShape, PagedBatch]:
    """Heads, sizes, window, cap and lengths drawn from the seed; every head and block size comes up."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    num_kv_heads = pick(1, 2, 3)
    shape = shape_of(
        num_kv_heads * pick(1, 3, 4),
        num_kv_heads,
        (32, 64, 80, 96, 128, 256)[seed % 6],
        (16, 32, 64)[seed % 3],
        dtype,
        window=pick(0, 0, 1, 33, 90) or None,
        softcap=float(pick(0, 0, 7)) or None,
        split=pick(64, 128),
    )
    kinds = [(1, pick(0, 1, 70, 150)), (5, pick(0, 59, 64, 140)), (pick(17, 30), pick(0, 100)), (1, pick(15, 16, 63))]
    kinds = kinds[: pick(1, 2, 3, 4)]
    query_lens, context_lens = [list(column) for column in zip(*kinds, strict=True)]
    return shape, batch_of(shape, query_lens, context_lens, seed)


def test_these_tests_run_under_the_interpreter() -> None:
    assert is_interpreting()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("seed", range(6))
def test_attention_equals_the_float64_reference_and_touches_no_foreign_slot(seed: int, dtype: torch.dtype) -> None:
    shape, batch = random_case(seed, dtype)
    out = attend(batch, shape)
    torch.testing.assert_close(out.double(), reference(batch, shape), rtol=0, atol=TOLERANCE[dtype] * 3)


@pytest.mark.parametrize("seed", [2, 4])
def test_bfloat16_is_upcast_where_the_interpreter_would_multiply_its_bits(seed: int) -> None:
    shape, batch = random_case(seed, torch.bfloat16)
    torch.testing.assert_close(attend(batch, shape).double(), reference(batch, shape), rtol=0, atol=5e-2)


@pytest.mark.parametrize("window", [None, 33])
def test_a_row_is_bitwise_the_same_alone_and_in_a_batch(window: int | None) -> None:
    shape = shape_of(6, 2, 64, 16, torch.float32, window=window)
    batch = batch_of(shape, [1, 5, 20, 1], [170, 59, 44, 0], seed=1)
    together = attend(batch, shape)
    bounds = batch.cu_seqlens_q.tolist()
    for req in range(4):
        assert torch.equal(attend(batch.alone(req), shape), together[bounds[req] : bounds[req + 1]])


@pytest.mark.parametrize("window", [None, 33])
def test_a_row_is_bitwise_the_same_decoded_verified_and_prefilled(window: int | None) -> None:
    shape = shape_of(6, 2, 64, 16, torch.float32, window=window)
    batch = batch_of(shape, [40], [100], seed=2)
    if window:  # earlier rows of the chunk see blocks that the last rows' window has left
        assert reference(batch, shape).isfinite().all()
    prefilled = attend(batch, shape)
    for count in (1, 5, 17):
        assert torch.equal(attend(batch.last_tokens(0, count), shape), prefilled[-count:])


def test_splits_in_parallel_and_splits_in_one_program_give_the_same_bits() -> None:
    shape = shape_of(8, 2, 64, 16, torch.float32)
    batch = batch_of(shape, [1, 5], [150, 70], seed=3)
    assert torch.equal(attend(batch, shape), attend(batch, shape, workspace=0))


def test_taller_tiles_change_no_bit_under_the_interpreter() -> None:
    shape = shape_of(8, 2, 64, 16, torch.float16)
    batch = batch_of(shape, [1, 30], [100, 20], seed=4)
    assert torch.equal(attend(batch, shape, query_len=1), attend(batch, shape, query_len=1000))


def test_block_size_changes_no_bit() -> None:
    outs: list[torch.Tensor] = []
    for block_size in (16, 64):
        shape = shape_of(4, 2, 32, block_size, torch.float32)
        outs.append(attend(batch_of(shape, [3, 1], [100, 17], seed=5), shape))
    assert torch.equal(*outs)


def test_rows_of_padded_tokens_are_left_as_they_are() -> None:
    shape = shape_of(4, 2, 32, 16, torch.float32)
    batch = batch_of(shape, [2, 1], [5, 9], seed=6)
    padded = PagedBatch(
        query=torch.cat([batch.query, torch.full_like(batch.query, math.nan)]),
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        cu_seqlens_q=batch.cu_seqlens_q,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
    )
    out = attend(padded, shape)
    assert torch.equal(out[:3], attend(batch, shape))
    assert out[3:].isnan().all()


def test_a_request_without_tokens_is_skipped() -> None:
    shape = shape_of(4, 2, 32, 16, torch.float32)
    batch = batch_of(shape, [2, 1], [5, 9], seed=7)
    with_empty = PagedBatch(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        cu_seqlens_q=batch.cu_seqlens_q[[0, 0, 1, 1, 2, 2]],
        seq_lens=torch.tensor([0, 7, 0, 10, 0], dtype=torch.int32),
        block_table=batch.block_table[[0, 0, 0, 1, 0]],
        slot_mapping=batch.slot_mapping,
    )
    assert torch.equal(attend(with_empty, shape), attend(batch, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_store_writes_its_slots_and_no_other(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(9, 7 * 48, generator=generator).to(dtype)
    key, value = fused[:, :96].view(9, 2, 48), fused[:, 96:192].view(9, 2, 48)
    slots = torch.randperm(80, generator=generator)[:9]
    slots[3] = -1  # a padded token
    stored, expected = ([torch.full((5, 16, 2, 48), 7.0).to(dtype) for _ in range(2)] for _ in range(2))
    store_kv(key, value, stored[0], stored[1], slots)
    store_kv_reference(key, value, expected[0], expected[1], slots)
    assert torch.equal(torch.stack(stored), torch.stack(expected))


def test_the_backend_stores_and_attends_layer_by_layer_with_a_window_of_each_layers_own() -> None:
    cache = KVCache(num_layers=2, num_blocks=8, block_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32)
    backend = TritonAttention(cache, num_heads=4, windows=(None, 4), row_invariant=True)
    batch = Batch(
        token_ids=torch.zeros(5, dtype=torch.int64),
        positions=torch.tensor([0, 1, 2, 3, 0]),
        slot_mapping=torch.tensor([48, 49, 50, 51, 96]),
        cu_seqlens_q=torch.tensor([0, 4, 5], dtype=torch.int32),
        seq_lens=torch.tensor([4, 1], dtype=torch.int32),
        block_table=torch.tensor([[3, 0], [6, 0]], dtype=torch.int32),
        logits_indices=torch.tensor([3, 4]),
    )
    backend.prepare(batch)
    generator = torch.Generator().manual_seed(1)
    for layer, window in enumerate((None, 4)):
        query = torch.randn(5, 4, 32, generator=generator)
        key, value = torch.randn(2, 5, 2, 32, generator=generator)
        out = backend(query, key, value, layer, batch)
        assert torch.equal(cache.key[layer].flatten(0, 1)[batch.slot_mapping], key)
        assert torch.equal(cache.value[layer].flatten(0, 1)[batch.slot_mapping], value)
        expected = paged_attention_reference(
            query, cache.key[layer], cache.value[layer], batch.cu_seqlens_q, batch.seq_lens, batch.block_table,
            shape_of(4, 2, 32, 16, torch.float32, window=window),
        )  # fmt: skip
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "head size 24"),
        ({"block_size": 24}, "block size 24"),
        ({"num_heads": 3}, "num_heads 3"),
        ({"split_size": 100}, "split size 100"),
    ],
)
def test_shapes_the_kernel_cannot_do_are_refused_by_name(changes: dict[str, int], message: str) -> None:
    sizes = {"num_heads": 4, "head_dim": 32, "block_size": 16, "split_size": 512} | changes
    cache = KVCache(
        num_layers=1,
        num_blocks=2,
        block_size=sizes["block_size"],
        num_kv_heads=2,
        head_dim=sizes["head_dim"],
        dtype=torch.float32,
    )
    with pytest.raises(ValueError, match=message):
        TritonAttention(cache, num_heads=sizes["num_heads"], split_size=sizes["split_size"])
