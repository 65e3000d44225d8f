"""The CPU attention against a float64 reference, and bit by bit against itself in other company."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from worker.attention import THREAD_WORK, CpuAttention, KVCache, shared
from worker.batch import Batch
from worker.fingerprint import make_batch
from worker.operators import RMSNorm, silu_mul

DTYPES = (torch.bfloat16, torch.float32)
LENGTH = 188


@pytest.fixture(params=(1, 2), ids=("one thread", "two threads"), autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One request's queries, keys and values at every position."""

    query: torch.Tensor  # [LENGTH, num_heads, head_dim]
    key: torch.Tensor  # [LENGTH, num_kv_heads, head_dim]
    value: torch.Tensor


class Bench:
    """A backend over a small pool, and sequences to run through it in any chunks and company."""

    def __init__(
        self,
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        num_sequences: int = 3,
    ) -> None:
        num_heads, num_kv_heads = heads
        blocks = -(-LENGTH // block_size)
        self.cache = KVCache(
            num_layers=1, num_blocks=num_sequences * blocks, block_size=block_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim, dtype=dtype,
        )  # fmt: skip
        self.backend = CpuAttention(self.cache, num_heads=num_heads, windows=(window,))
        self.window = window
        generator = torch.Generator().manual_seed(0)

        def noise(heads: int) -> torch.Tensor:
            return torch.randn((LENGTH, heads, head_dim), generator=generator).to(dtype)

        self.sequences = [
            Sequence(query=2 * noise(num_heads), key=noise(num_kv_heads), value=noise(num_kv_heads))
            for _ in range(num_sequences)
        ]
        order = torch.randperm(num_sequences * blocks, generator=generator).tolist()
        self.tables = [order[i * blocks : (i + 1) * blocks] for i in range(num_sequences)]

    def run(self, *ranges: tuple[int, int, int]) -> list[torch.Tensor]:
        """Each (sequence, start, stop) in one step; the outputs of each."""
        batch = self.batch(*ranges)
        self.backend.prepare(batch)
        query, key, value = (
            torch.cat([getattr(self.sequences[i], name)[start:stop] for i, start, stop in ranges])
            for name in ("query", "key", "value")
        )
        out = self.backend(query, key, value, 0, batch)
        return list(out.split([stop - start for _, start, stop in ranges]))

    def batch(self, *ranges: tuple[int, int, int]) -> Batch:
        return make_batch(
            [([0] * (stop - start), start, self.tables[i]) for i, start, stop in ranges], self.cache.block_size
        )

    def expected(self, i: int) -> torch.Tensor:
        """Causal attention in float64, [LENGTH, num_heads, head_dim]."""
        sequence = self.sequences[i]
        group = sequence.query.shape[1] // sequence.key.shape[1]
        key, value = (x.double().repeat_interleave(group, 1) for x in (sequence.key, sequence.value))
        scores = torch.einsum("qhd,khd->hqk", sequence.query.double(), key) * sequence.query.shape[2] ** -0.5
        behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        hidden = behind < 0
        if self.window is not None:
            hidden |= behind >= self.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 32), ((9, 3), 64), ((4, 4), 64), ((8, 2), 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_is_causal_attention_over_the_block_table(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    bench = Bench(heads=heads, head_dim=head_dim, dtype=dtype, window=window)
    [out] = bench.run((0, 0, LENGTH))
    assert torch.allclose(out.double(), bench.expected(0), atol=0.03 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window"),
    [
        ((4, 2), 32, 16, None),
        ((9, 3), 64, 32, None),
        ((8, 2), 128, 8, None),
        ((4, 4), 64, 128, 50),
        ((6, 3), 48, 64, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_chunking_and_company(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int, window: int | None
) -> None:
    bench = Bench(heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, window=window)
    whole = [bench.run((i, 0, LENGTH))[0] for i in range(3)]
    rng = random.Random(0)
    for _ in range(3):
        done = [0, 0, 0]
        while any(stop < LENGTH for stop in done):
            chosen = [i for i in range(3) if done[i] < LENGTH and rng.random() < 0.8]
            sizes = {i: rng.choice((1, 1, 2, 5, 9, 17, 40, 130)) for i in chosen}
            ranges = [(i, done[i], min(done[i] + sizes[i], LENGTH)) for i in rng.sample(chosen, len(chosen))]
            if not ranges:
                continue
            for (i, start, stop), out in zip(ranges, bench.run(*ranges), strict=True):
                assert torch.equal(out, whole[i][start:stop]), (ranges, i)
                done[i] = stop


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rejected_drafts_leave_no_trace(dtype: torch.dtype) -> None:
    bench = Bench(dtype=dtype)
    [whole] = bench.run((0, 0, LENGTH))
    bench.run((0, 0, 100))
    # The garbage of sequence 1 in the slots of 100..104 is overwritten by the step that computes them.
    bench.tables[1] = bench.tables[0]
    bench.run((1, 100, 105))
    [row] = bench.run((0, 100, 101))
    assert torch.equal(row, whole[100:101])


def test_block_tables_give_the_same_bits_whatever_blocks_they_name() -> None:
    bench, other = Bench(), Bench(block_size=32)
    other.tables.reverse()
    assert torch.equal(bench.run((0, 0, LENGTH))[0], other.run((0, 0, LENGTH))[0])
    assert torch.equal(bench.run((0, 150, 155))[0], other.run((0, 150, 155))[0])


def test_items_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    [whole] = bench.run((0, 0, LENGTH))
    monkeypatch.setattr("worker.attention.ITEM_ROWS", 2)
    monkeypatch.setattr("worker.attention.THREAD_WORK", 1)
    assert torch.equal(bench.run((0, 0, LENGTH))[0], whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_key_of_a_row_is_never_read(dtype: torch.dtype) -> None:
    bench = Bench(dtype=dtype)
    [whole] = bench.run((0, 0, LENGTH))
    bench.cache.key.fill_(torch.nan)
    bench.cache.value.fill_(torch.nan)
    assert torch.equal(bench.run((0, 0, LENGTH))[0], whole)


def test_an_unusable_head_size_or_head_count_is_refused_by_name() -> None:
    def cache(head_dim: int) -> KVCache:
        return KVCache(
            num_layers=1, num_blocks=2, block_size=24, num_kv_heads=2, head_dim=head_dim, dtype=torch.float32
        )

    with pytest.raises(ValueError, match="head size 24 is not a multiple of 16"):
        CpuAttention(cache(24), num_heads=4)
    with pytest.raises(ValueError, match="num_heads 3 is not a multiple of num_kv_heads 2"):
        CpuAttention(cache(32), num_heads=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 96, 576])
def test_norm_and_activation_of_a_row_do_not_depend_on_the_others(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((260, width), generator=generator)
    gate_up = torch.randn((260, 2 * width), generator=generator).to(dtype)
    norm = RMSNorm(torch.rand(width, generator=generator), eps=1e-5, dtype=dtype)
    normed, activated = norm(x), silu_mul(gate_up)
    for rows in (4, 8, 12, 32, 64, 160, 256):
        assert torch.equal(norm(x[:rows]), normed[:rows])
        assert torch.equal(norm(x[-rows:]), normed[-rows:])
        assert torch.equal(silu_mul(gate_up[:rows]), activated[:rows])


def test_threads_share_a_lone_request_s_heads_and_many_requests_work_evenly() -> None:
    torch.set_num_threads(2)
    big = 2 * THREAD_WORK
    assert shared(np.array([2 * big, big])).tolist() == [[0, 1], [1, 2]]
    assert shared(np.array([big] * 4)).tolist() == [[0, 2], [2, 4]]
    assert shared(np.array([1, 1])).tolist() == [[0, 2]]  # too little for two
    torch.set_num_threads(1)
    assert shared(np.array([big] * 4)).tolist() == [[0, 4]]
