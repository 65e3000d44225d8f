"""What row invariance costs: ms per step of the lean forward beside the same forward on plain operators.

    python -m tests.bench.forward DIRECTORY [--dtype bfloat16] [--threads 2] [--context 256]

Interleaved, median of rounds. The plain forward uses F.linear and one SDPA over padded requests, so its rows
depend on their company.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from worker import model as modelling
from worker.attention import KVCache
from worker.batch import Batch
from worker.fingerprint import make_batch, self_test
from worker.model import Model, load_model

BLOCK_SIZE = 16
DECODES = (1, 2, 4, 8, 16, 32, 64)
PREFILLS = (64, 256, 512)
NUM_DRAFTS = 4


class PlainLinear:
    """F.linear, rows and all."""

    tile = None
    is_exact = False
    pads_rows = False
    kernel = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PlainAttention:
    """Gather each request's blocks up to the longest, then one SDPA; every request brings as many tokens."""

    fingerprint = "plain"

    def __init__(self, kv_cache: KVCache, *, num_heads: int, windows: object = None) -> None:
        self._cache, self._num_heads = kv_cache, num_heads
        self._mask, self._blocks = torch.empty(0), torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        num_blocks = -(-int(batch.seq_lens.max()) // BLOCK_SIZE)
        self._blocks = batch.block_table[:, :num_blocks].long().flatten()
        positions = batch.positions.view(len(batch.seq_lens), 1, -1, 1)
        self._mask = torch.arange(num_blocks * BLOCK_SIZE) <= positions

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch
    ) -> torch.Tensor:
        num_reqs = len(batch.seq_lens)
        keys = self._store(self._cache.key[layer], key, batch)
        values = self._store(self._cache.value[layer], value, batch)
        queries = query.view(num_reqs, -1, self._num_heads, query.shape[-1]).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape)

    def _store(self, pool: torch.Tensor, new: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Put new rows into their slots; all rows of each request, [num_reqs, num_kv_heads, length, head_dim]."""
        pool.flatten(0, 1).index_copy_(0, batch.slot_mapping, new)
        pages = pool.flatten(1).index_select(0, self._blocks)
        return pages.view(len(batch.seq_lens), -1, *pool.shape[2:]).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="KV length of decoding requests")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_blocks = max(DECODES) * -(-options.context // BLOCK_SIZE) + max(PREFILLS) // BLOCK_SIZE
    invariant, plain = load_both(options.directory, getattr(torch, options.dtype), num_blocks)
    print(f"{options.dtype}, {options.threads} threads, context {options.context}; self-test: {self_test(invariant)}")
    for name, batch in batches(options.context, num_blocks):
        steps = [step(invariant, batch), unpadded(step(plain, batch))]
        ours, theirs = measure(steps, options.rounds)
        rate = f"{1000 * len(batch.token_ids) / ours:7.0f} tokens/s"
        print(f"{name:>22}: {ours:7.1f} ms, plain {theirs:7.1f} ms, {ours / theirs:4.2f}x, {rate}", flush=True)


def load_both(directory: Path, dtype: torch.dtype, num_blocks: int) -> tuple[Model, Model]:
    def load() -> Model:
        return load_model(
            directory, dtype=dtype, device="cpu", attention="cpu", num_blocks=num_blocks, block_size=BLOCK_SIZE
        )

    invariant = load()
    parts = {"QUANTIZATIONS": {None: PlainLinear}, "CpuAttention": PlainAttention}
    originals = {name: getattr(modelling, name) for name in parts}
    for name, part in parts.items():
        setattr(modelling, name, part)
    plain = load()
    for name, original in originals.items():
        setattr(modelling, name, original)
    return invariant, plain


def batches(context: int, num_blocks: int) -> list[tuple[str, Batch]]:
    """Decodes, verifies of 1 + K rows, and prefills from position 0; all rows sampled but a prefill's."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    width = -(-context // BLOCK_SIZE)

    def decode(num_reqs: int, num_tokens: int) -> Batch:
        tables = [order[i * width : (i + 1) * width] for i in range(num_reqs)]
        return make_batch([([7] * num_tokens, context - num_tokens, table) for table in tables], BLOCK_SIZE)

    found = [(f"decode {n}", decode(n, 1)) for n in DECODES]
    found += [(f"verify {n} x {1 + NUM_DRAFTS}", decode(n, 1 + NUM_DRAFTS)) for n in (1, 8)]
    return found + [(f"prefill {n}", make_batch([([7] * n, 0, order)], BLOCK_SIZE)) for n in PREFILLS]


def step(model: Model, batch: Batch) -> Callable[[], object]:
    return lambda: model.logits(model.forward(batch)[batch.logits_indices])


def unpadded(call: Callable[[], object]) -> Callable[[], object]:
    """The same step with as many rows as it has tokens."""

    def run() -> object:
        original, modelling.padded_rows = modelling.padded_rows, lambda num_rows: num_rows  # type: ignore[attr-defined]
        try:
            return call()
        finally:
            modelling.padded_rows = original  # type: ignore[attr-defined]

    return run


def measure(steps: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median ms of each, taken in turn so that both see the same neighbours."""
    times: list[list[float]] = [[] for _ in steps]
    for run in range(rounds + 1):
        for index, call in enumerate(steps):
            started = time.perf_counter()
            call()
            if run:  # the first round warms up
                times[index].append(1000 * (time.perf_counter() - started))
    return [statistics.median(each) for each in times]


if __name__ == "__main__":
    main()
