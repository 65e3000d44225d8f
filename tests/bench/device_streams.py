"""A few requests driven over device rows, and the same requests on the host: equal streams or a wrong kernel.

Shared by the kernel tests under the interpreter and by the GPU script's end-to-end check.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scheduler.request import SamplingParams
from tests.oracle import undisturbed
from worker.kernels.rows import DeviceRows
from worker.kernels.step import PADDED_SIZES, DeviceStep, HostPlan
from worker.model import Model, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRequest:
    """Token ids in, a number of tokens out."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams

    @property
    def end(self) -> int:
        """No token at or past this position."""
        return len(self.prompt) + self.max_tokens


def tiny_config() -> ModelConfig:
    """A model small enough for the interpreter, with grouped heads."""
    return ModelConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )


def tiny_requests(count: int, generator: np.random.Generator, *, max_tokens: int = 7) -> list[TinyRequest]:
    """Greedy and sampled requests of different lengths."""
    return [
        TinyRequest(
            prompt=generator.integers(3, 320, int(generator.integers(1, 40))).tolist(),
            max_tokens=int(generator.integers(1, max_tokens)) + 2,
            sampling=SamplingParams(
                temperature=float(generator.choice([0.0, 0.8])),
                top_k=int(generator.choice([0, 50])),
                top_p=float(generator.choice([1.0, 0.9])),
                seed=int(generator.integers(0, 1 << 63)),
            ),
        )
        for _ in range(count)
    ]


def host_stream(model: Model, request: TinyRequest) -> list[int]:
    """The request alone, one token at a time, sampled by the host: its outputs."""
    return undisturbed(model, request.prompt, request.sampling, request.max_tokens).token_ids


class DeviceStreams:
    """Requests on device rows, planned with upper bounds as a scheduler would plan them."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[TinyRequest],
        *,
        max_drafts: int,
        device: str,
        padded_sizes: tuple[int, ...] = PADDED_SIZES,
        use_graphs: bool | None = None,
    ) -> None:
        self.requests = requests
        self.max_drafts = max_drafts
        self.outputs: list[list[int]] = [[] for _ in requests]
        self.num_accepted = self.num_verified = 0
        block_size = model.kv_cache.block_size
        longest = max(request.end for request in requests)
        self.state = DeviceRows.empty(
            max_num_seqs=len(requests), max_model_len=longest + 1, block_size=block_size, device=device
        )
        blocks_per_row = self.state.block_table.shape[1]
        assert len(requests) * blocks_per_row <= model.kv_cache.num_blocks
        blocks = torch.arange(model.kv_cache.num_blocks - 1, -1, -1, dtype=torch.int32)
        self.state.block_table.copy_(blocks[: len(requests) * blocks_per_row].view(len(requests), -1))
        for row, request in enumerate(requests):
            self.state.token_ids[row, : len(request.prompt)] = torch.tensor(request.prompt, dtype=torch.int32)
            self.state.num_tokens[row] = len(request.prompt)
            self.state.end[row] = request.end
            self.state.sampling.write(row, request.sampling)
        self._computed = [0] * len(requests)
        self._device_step = DeviceStep(
            model, self.state, max_drafts=max_drafts, padded_sizes=padded_sizes, use_graphs=use_graphs
        )

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far."""
        return self._device_step.num_graphs

    @property
    def done(self) -> bool:
        """Whether every request has all its tokens."""
        pairs = zip(self.outputs, self.requests, strict=True)
        return all(len(tokens) == request.max_tokens for tokens, request in pairs)

    def draft(self, expected: Sequence[Sequence[int]], generator: np.random.Generator, *, spoil: float) -> None:
        """Pending drafts from the known continuation, each spoiled with some probability."""
        for row, (request, tokens) in enumerate(zip(self.requests, self.outputs, strict=True)):
            room = min(self.max_drafts, request.max_tokens - len(tokens) - 1)
            if not tokens or room < 1:
                continue
            drafts = np.array(expected[row][len(tokens) : len(tokens) + room], np.int32)
            drafts[generator.random(room) < spoil] = 0
            length = len(request.prompt) + len(tokens)
            self.state.token_ids[row, length : length + room] = torch.from_numpy(drafts).to(self.state.token_ids.device)
            self.state.num_drafts[row] = room

    def step(self, generator: np.random.Generator) -> None:
        """One step over a random subset of the unfinished rows, prompts in random chunks."""
        unfinished = [row for row, request in enumerate(self.requests) if len(self.outputs[row]) < request.max_tokens]
        rows = [row for row in unfinished if generator.random() < 0.8] or unfinished
        columns: list[tuple[int, int, int, int]] = []
        for row in rows:
            missing = len(self.requests[row].prompt) + len(self.outputs[row]) - self._computed[row]
            if missing > 1 and generator.random() < 0.5:
                columns.append((row, int(generator.integers(1, missing)), 0, 0))
            else:
                drafts = self.max_drafts if self.outputs[row] else 0
                columns.append((row, missing + drafts, drafts, 1 + drafts))
        self._execute(np.array(columns, np.int32).T)

    def _execute(self, columns: np.ndarray) -> None:
        rows, num_scheduled, num_drafts, reserved = columns
        longest = max(self._computed[row] + n for row, n in zip(rows.tolist(), num_scheduled.tolist(), strict=True))
        acceptance = self._device_step.execute(
            HostPlan(
                rows=rows, num_scheduled=num_scheduled, num_drafts=num_drafts, reserved=reserved, max_seq_len=longest
            )
        ).acceptance
        token_ids, num_tokens = acceptance.token_ids.tolist(), acceptance.num_tokens.tolist()
        num_verified = acceptance.num_verified.tolist()
        assert not acceptance.failed.any()
        for req, row in enumerate(rows.tolist()):
            if reserved[req] == 0:
                self._computed[row] += int(num_scheduled[req])
                continue
            self.outputs[row] += token_ids[req][: num_tokens[req]]
            self.num_verified += num_verified[req]
            self.num_accepted += num_tokens[req] - 1
            self._computed[row] = len(self.requests[row].prompt) + len(self.outputs[row]) - 1
