"""One verify step wholly on the device, captured once per padded batch size in a CUDA graph where there is one.

The host sends a plan (upper bounds and rows) and receives an acceptance; nothing in between waits for a value.
Decode plans are padded to a fixed ladder of sizes, so that their launches can be recorded and replayed. Chunks,
resumed rows and devices without graphs run the same body eagerly. Knows nothing of sessions or drafters.
"""

import bisect
import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from scheduler.step import Int32Array
from worker.batch import Batch
from worker.kernels.rows import Acceptance, DeviceRows, PlanColumns, accept_drafts, gather_frames
from worker.kernels.sampling import sample

logger = logging.getLogger(__name__)

PADDED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIN_GRAPH_LEN = 1024  # contexts are padded to powers of two from here: longer tables cost idle programs


class Forward(Protocol):
    """A model as a step needs it."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """[num_tokens, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPlan:
    """A step's plan, [num_reqs] int32 each: upper bounds only."""

    rows: Int32Array
    num_scheduled: Int32Array
    num_drafts: Int32Array
    reserved: Int32Array
    max_seq_len: int  # no row is longer after this step


class _Key(NamedTuple):
    """What is fixed in a captured graph."""

    num_reqs: int
    max_seq_len: int


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    columns: torch.Tensor  # [4, num_reqs] int32, the graph's input
    acceptance: Acceptance  # the graph's output, overwritten by its next replay


class DeviceStep:
    """Executes plans over rows that live on the device."""

    def __init__(
        self,
        model: Forward,
        state: DeviceRows,
        *,
        max_drafts: int,
        padded_sizes: tuple[int, ...] = PADDED_SIZES,
        use_graphs: bool | None = None,  # None: where the device has them
    ) -> None:
        self.model = model
        self.state = state
        self.max_drafts = max_drafts
        self.device = state.token_ids.device
        self.use_graphs = self.device.type == "cuda" if use_graphs is None else use_graphs
        if self.use_graphs and self.device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device, not {self.device}")
        self._padded_sizes = padded_sizes
        self._graphs: dict[_Key, _Graph | None] = {}  # None: could not be captured
        self._pool = torch.cuda.graph_pool_handle() if self.use_graphs else None  # one: only one graph runs at a time

    def execute(self, plan: HostPlan) -> Acceptance:
        """Carry out a plan. Its tensors belong to the step until the next plan of the same padded size.

        Rows of the acceptance beyond `len(plan.rows)` are padding.
        """
        key = self._decode_key(plan)
        if key is None:
            num_tokens, num_samples = int(plan.num_scheduled.sum()), int(plan.reserved.sum())
            columns = self._sent(plan, len(plan.rows))
            return self._body(columns, num_tokens, num_samples, self._padded_len(plan.max_seq_len))
        columns = self._sent(plan, key.num_reqs)
        graph = self._graph(key, columns) if self.use_graphs else None
        if graph is None:
            return self._decode(columns, key)
        graph.columns.copy_(columns, non_blocking=True)
        graph.graph.replay()
        return graph.acceptance

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return sum(graph is not None for graph in self._graphs.values())

    def _decode_key(self, plan: HostPlan) -> _Key | None:
        """The graph for this plan, or None if a row may need more than one token and its drafts."""
        num_reqs = len(plan.rows)
        is_decode = bool((plan.reserved > 0).all()) and bool((plan.num_scheduled <= 1 + self.max_drafts).all())
        size = bisect.bisect_left(self._padded_sizes, num_reqs)
        if not is_decode or size == len(self._padded_sizes):
            return None
        return _Key(self._padded_sizes[size], self._padded_len(plan.max_seq_len))

    def _padded_len(self, max_seq_len: int) -> int:
        capacity = self.state.block_table.shape[1] * self.state.block_size
        return min(max(MIN_GRAPH_LEN, 1 << (max_seq_len - 1).bit_length()), capacity)

    def _sent(self, plan: HostPlan, num_reqs: int) -> torch.Tensor:
        """The plan's columns on the device, [4, num_reqs] int32. A fresh pinned buffer every time: the copy of
        an earlier step may still be reading the last one."""
        columns = np.zeros((4, num_reqs), np.int32)
        columns[0] = -1
        columns[:, : len(plan.rows)] = (plan.rows, plan.num_scheduled, plan.num_drafts, plan.reserved)
        host = torch.from_numpy(columns)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _decode(self, columns: torch.Tensor, key: _Key) -> Acceptance:
        """The body for a decode plan of a padded size."""
        num_tokens = key.num_reqs * (1 + self.max_drafts)
        return self._body(columns, num_tokens, num_tokens, key.max_seq_len)

    def _body(self, columns: torch.Tensor, num_tokens: int, num_samples: int, max_seq_len: int) -> Acceptance:
        """Everything a step does on the device. Reads no value on the host."""
        plan = PlanColumns(rows=columns[0], num_scheduled=columns[1], num_drafts=columns[2], reserved=columns[3])
        frames = gather_frames(
            self.state, plan, num_tokens=num_tokens, num_samples=num_samples, max_seq_len=max_seq_len
        )
        hidden = self.model.forward(frames.batch)
        sampled = torch.empty(num_samples, dtype=torch.int32, device=self.device)
        if num_samples:
            logits = self.model.logits(hidden.index_select(0, frames.batch.logits_indices))
            sample(logits, frames.sample_rows, frames.sample_positions, self.state.sampling, sampled)
        return accept_drafts(self.state, plan, frames, sampled, max_drafts=self.max_drafts)

    # ---- graphs ----

    def _graph(self, key: _Key, columns: torch.Tensor) -> _Graph | None:
        """The graph of a key, captured on first use; None where capture failed before."""
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(key, columns)
            except RuntimeError as error:
                # Slower, not wrong: the same body runs eagerly.
                logger.warning("no CUDA graph for %d requests, running without: %s", key.num_reqs, error)
                self._graphs[key] = None
        return self._graphs[key]

    def _capture(self, key: _Key, columns: torch.Tensor) -> _Graph:
        """Record the body. It runs once before on padding only, so that kernels compile outside the capture
        and no row moves."""
        static = torch.zeros_like(columns)
        static[0] = -1
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._decode(static, key)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            acceptance = self._decode(static, key)
        return _Graph(graph, static, acceptance)
