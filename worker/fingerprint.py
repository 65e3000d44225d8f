"""Which workers give bitwise equal logits, and whether this one keeps its own promise.

A request resumes only on a worker of an equal fingerprint. The self-test runs the loaded model at start-up:
rows alone, among drafts, in chunks and beside another request must be the same bits. Knows nothing about
requests or sessions; the pool must be empty.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from worker.attention import CpuAttention
from worker.batch import Batch
from worker.model import Model

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
TEST_TOKENS = 152
INTERPRETED_TOKENS = 20  # Triton's interpreter takes milliseconds per program
NUM_DRAFTS = 4
Request = tuple[Sequence[int], int, Sequence[int]]  # token ids, position of the first, block ids


def fingerprint(model: Model) -> str:
    """Everything that decides a model's numbers, in words: equal strings, equal bits."""
    rope = model.rope.inverse_frequencies.cpu().numpy().tobytes() + str(model.rope.attention_factor).encode()
    parts = (
        f"weights={model.weights_hash[:32]}",
        f"dtype={_dtype(model)}",
        *([f"quantization={model.quantization}"] if model.quantization else []),
        f"attention=({model.attention.fingerprint})",
        f"rope={hashlib.sha256(rope).hexdigest()[:16]}",
        f"tiles=({_tiles(model)})",
        f"torch={torch.__version__}",
        _cpu() if model.device.type == "cpu" else f"gpu={torch.cuda.get_device_name(model.device)}",
    )
    return " ".join(parts)


def self_test(model: Model) -> list[str]:
    """What breaks row invariance here, one line each; empty when every row kept its bits.

    Computes a sequence in the first blocks of the pool and zeroes them again: a second or less.
    """
    complaints: list[str] = []
    for shape, names in _names_by_shape(model).items():
        if not model.linears[names[0]].is_exact:
            complaints.append(f"product {names[0]} {list(shape)} in {_dtype(model)}: {_reason(model)}")
    return complaints + _Trial(model).complaints()


def _names_by_shape(model: Model) -> dict[tuple[int, int], list[str]]:
    names: dict[tuple[int, int], list[str]] = {}
    for name, linear in model.linears.items():
        names.setdefault((linear.out_features, linear.in_features), []).append(name)
    return names


def _tiles(model: Model) -> str:
    kernels = {shape: model.linears[names[0]].kernel for shape, names in _names_by_shape(model).items()}
    return " ".join(f"{n}x{k}:{kernel}" for (n, k), kernel in sorted(kernels.items()))


def _cpu() -> str:
    """Vendor, instruction sets that kernels are chosen by, and threads."""
    vendor, flags = "", set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("vendor_id", "CPU implementer"):
            vendor = value.strip()
        elif name.strip() in ("flags", "Features"):
            flags = set(value.split())
    known = "+".join(flag for flag in CPU_FLAGS if flag in flags)
    limits = "".join(f" {name}={os.environ[name]}" for name in ISA_VARIABLES if name in os.environ)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu=({vendor} {known} {capability}{limits}) threads={torch.get_num_threads()}"


def _dtype(model: Model) -> str:
    return str(model.dtype).removeprefix("torch.")


def _reason(model: Model) -> str:
    if model.device.type != "cpu":
        return f"a row depends on its company on {model.device.type}"
    return f"a row depends on its company with {torch.get_num_threads()} threads"


class _Trial:
    """One sequence computed in several ways, in the first blocks of the pool."""

    def __init__(self, model: Model) -> None:
        self._model = model
        size = model.kv_cache.block_size
        is_interpreted = model.device.type == "cpu" and not isinstance(model.attention, CpuAttention)
        wanted = INTERPRETED_TOKENS if is_interpreted else TEST_TOKENS
        # One half of the pool for the sequence, the other for its company.
        self._length = min(wanted, model.max_model_len, model.kv_cache.num_blocks // 2 * size)
        num_blocks = -(-self._length // size)
        self._own, self._others = range(num_blocks), range(num_blocks, 2 * num_blocks)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.config.vocab_size, (2, self._length), generator=generator)
        self._tokens, self._other_tokens = tokens.tolist()

    def complaints(self) -> list[str]:
        """One line for each way that gave other bits than the whole sequence in one chunk."""
        tail, cut = self._length - NUM_DRAFTS - 1, self._length // 3
        if cut < 1 or tail < 1:
            return [f"a pool of {self._model.kv_cache.num_blocks} blocks is too small for the self-test"]
        whole = self._run(0, self._length)
        ways = {
            "two chunks": [self._run(0, cut), self._run(cut, self._length)],
            f"a row among {NUM_DRAFTS} drafts": [self._run(tail, self._length)],
            "a row beside a prefill": [self._run(tail, self._length, company=self._length)],
            "a row alone": [self._run(i, i + 1) for i in range(tail, self._length)],
            "a row beside another": [self._run(i, i + 1, company=1) for i in range(tail, self._length)],
        }
        for pool in (self._model.kv_cache.key, self._model.kv_cache.value):
            pool[:, : 2 * len(self._own)] = 0
        return [line for way, parts in ways.items() for line in self._compare(way, torch.cat(parts), whole)]

    def _compare(self, way: str, out: torch.Tensor, whole: torch.Tensor) -> list[str]:
        wrong = (out != whole[-len(out) :]).any(1).nonzero().flatten().tolist()
        if not wrong:
            return []
        position = self._length - len(out) + wrong[0]
        return [f"{way} differs from one chunk at position {position} in {_dtype(self._model)}: {_reason(self._model)}"]

    def _run(self, start: int, stop: int, *, company: int = 0) -> torch.Tensor:
        """[stop - start, hidden_size + vocab_size] of tokens [start, stop), after `company` tokens of another.

        Logits of the sequence's last rows only, zeros elsewhere: few rows of a worker need them.
        """
        requests: list[Request] = [(self._other_tokens[:company], 0, self._others)] if company else []
        requests.append((self._tokens[start:stop], start, self._own))
        hidden = self._model.forward(make_batch(requests, self._model.kv_cache.block_size, self._model.device))[
            company:
        ]
        logits = torch.zeros(len(hidden), self._model.config.vocab_size, device=hidden.device)
        first = max(self._length - NUM_DRAFTS - 1 - start, 0)
        if first < len(hidden):
            logits[first:] = self._model.logits(hidden[first:])
        return torch.cat((hidden.float(), logits), 1)


def make_batch(requests: Sequence[Request], block_size: int, device: torch.device | str = "cpu") -> Batch:
    """A Batch of requests given as (token ids, position of the first, block ids of the whole sequence)."""
    width = max(len(blocks) for _, _, blocks in requests)
    positions = [range(start, start + len(tokens)) for tokens, start, _ in requests]
    bounds = torch.tensor([0, *(len(tokens) for tokens, _, _ in requests)]).cumsum(0)

    def flat(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        token_ids=flat([token for tokens, _, _ in requests for token in tokens]),
        positions=flat([position for row in positions for position in row]),
        slot_mapping=flat(
            [
                blocks[position // block_size] * block_size + position % block_size
                for row, (_, _, blocks) in zip(positions, requests, strict=True)
                for position in row
            ]
        ),
        cu_seqlens_q=bounds.to(device, torch.int32),
        seq_lens=torch.tensor([row.stop for row in positions], dtype=torch.int32, device=device),
        block_table=torch.tensor(
            [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in requests], dtype=torch.int32, device=device
        ),
        logits_indices=bounds[1:].to(device) - 1,
    )
