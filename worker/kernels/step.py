"""One verify step wholly on the device, captured once per padded batch size in CUDA graphs where there are any.

The host sends a plan (upper bounds and rows) and receives an acceptance; nothing in between waits for a value.
Decode plans are padded to fixed ladders of sizes, so that their launches can be recorded and replayed. Chunks,
resumed rows and devices without graphs run the same body eagerly. A step has two halves, the model's forward and
what is made of its logits: where the host must see logits, only the second half runs eagerly. Knows nothing of
sessions or drafters.
"""

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from scheduler.step import Int32Array
from worker.attention import KVCache
from worker.batch import Batch
from worker.kernels.rows import (
    Acceptance,
    DeviceRows,
    FrameBatch,
    PlanColumns,
    accept_drafts,
    clear_broken,
    gather_frames,
)
from worker.kernels.sampling import sample
from worker.kernels.transfers import to_device

logger = logging.getLogger(__name__)

PADDED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIN_GRAPH_LEN = 1024  # contexts are padded to powers of two from here: longer tables cost idle programs

# Called with the logits [num_samples, vocab_size] float32 and the tokens sampled of them [num_samples] int32, which
# it may change.
Resample = Callable[[torch.Tensor, torch.Tensor], None]
# Called with the rows [num_reqs] int32 (-1: padding), the most drafts wanted of each [num_reqs] int32, and what was
# accepted, into which it writes its drafts. Part of the graphs: it may read no value on the host.
Propose = Callable[[torch.Tensor, torch.Tensor, Acceptance], None]


class Forward(Protocol):
    """A model as a step needs it."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """[num_tokens, hidden_size]."""
        ...

    def forward_with_states(self, batch: Batch, layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and what entered these layers: [num_tokens, len(layers) * hidden_size]."""
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
    num_propose: Int32Array | None = None  # drafts for the next step, at most; None: none
    state_layers: tuple[int, ...] = ()  # of the model: what enters them is wanted


class Executed(NamedTuple):
    """What a plan gave. Rows of the acceptance beyond `len(plan.rows)`, and states beyond its tokens, are padding.

    The acceptance belongs to the step until the next plan of the same padded size: copy it in stream order.
    """

    acceptance: Acceptance
    states: torch.Tensor  # [num_tokens, len(state_layers) * hidden_size]
    batch: Batch


class _Sizes(NamedTuple):
    """What is fixed in a captured graph."""

    num_reqs: int
    num_tokens: int
    num_samples: int
    max_seq_len: int
    state_layers: tuple[int, ...]


class _Computed(NamedTuple):
    """The first half of a step."""

    frames: FrameBatch
    hidden: torch.Tensor  # [num_samples, hidden_size] of the positions to sample
    finite: torch.Tensor  # [num_tokens] int32, 0 where a token's hidden states are broken
    states: torch.Tensor  # [num_tokens, len(state_layers) * hidden_size]


class _Graphs(NamedTuple):
    columns: torch.Tensor  # [5, num_reqs] int32, the graphs' input
    forward: torch.cuda.CUDAGraph
    computed: _Computed  # output of the first graph and input of the second
    conclude: torch.cuda.CUDAGraph
    acceptance: Acceptance  # output of the second, overwritten by its next replay


class DeviceStep:
    """Executes plans over rows that live on the device."""

    def __init__(
        self,
        model: Forward,
        state: DeviceRows,
        *,
        max_drafts: int,
        kv_cache: KVCache | None = None,
        propose: Propose | None = None,
        padded_sizes: tuple[int, ...] = PADDED_SIZES,
        use_graphs: bool | None = None,  # None: where the device has them
    ) -> None:
        """kv_cache: the model's, cleared of what broken hidden states left; None: left as it is.

        propose: drafts on the device at the end of each step; None: nobody does.
        """
        self.state = state
        self.max_drafts = max_drafts
        self.device = state.token_ids.device
        self.use_graphs = self.device.type == "cuda" if use_graphs is None else use_graphs
        if self.use_graphs and self.device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device, not {self.device}")
        self._kv_cache = kv_cache
        self._propose = propose
        self._padded_sizes = padded_sizes
        self.use(model)

    def use(self, model: Forward) -> None:
        """Compute with this model from now on: graphs of another one are dropped."""
        if self.use_graphs:
            torch.cuda.synchronize(self.device)  # the last replay reads the weights that may go now
        self.model = model
        self._graphs: dict[_Sizes, _Graphs | None] = {}  # None: could not be captured
        self._pool = torch.cuda.graph_pool_handle() if self.use_graphs else None  # one: only one graph runs at a time

    @torch.inference_mode()
    def execute(self, plan: HostPlan, resample: Resample | None = None) -> Executed:
        """Carry out a plan."""
        sizes = self._padded(plan)
        if sizes is None:
            num_tokens, num_samples = int(plan.num_scheduled.sum()), int(plan.reserved.sum())
            max_seq_len = self._padded_len(plan.max_seq_len)
            sizes = _Sizes(len(plan.rows), num_tokens, num_samples, max_seq_len, plan.state_layers)
            graphs, columns = None, self._sent(plan, len(plan.rows))
        else:
            columns = self._sent(plan, sizes.num_reqs)
            graphs = self._captured(sizes) if self.use_graphs else None
        if graphs is None:
            computed = self._forward(columns, sizes)
            return Executed(self._conclude(columns, computed, resample), computed.states, computed.frames.batch)
        graphs.columns.copy_(columns, non_blocking=True)
        graphs.forward.replay()
        if resample is None:
            graphs.conclude.replay()
            acceptance = graphs.acceptance
        else:
            acceptance = self._conclude(columns, graphs.computed, resample)
        return Executed(acceptance, graphs.computed.states.clone(), graphs.computed.frames.batch)

    @property
    def num_graphs(self) -> int:
        """Padded sizes captured so far."""
        return sum(graphs is not None for graphs in self._graphs.values())

    # ---- sizes ----

    def _padded(self, plan: HostPlan) -> _Sizes | None:
        """The sizes of a decode plan, or None if a row may need more than one token and its drafts."""
        if not (plan.reserved > 0).all() or int(plan.num_scheduled.max()) > 1 + self.max_drafts:
            return None
        place = bisect.bisect_left(self._padded_sizes, len(plan.rows))
        if place == len(self._padded_sizes):
            return None
        num_reqs, width = self._padded_sizes[place], self._padded_width(int(plan.num_scheduled.max()))
        num_tokens = num_reqs * width
        return _Sizes(num_reqs, num_tokens, num_tokens, self._padded_len(plan.max_seq_len), plan.state_layers)

    def _padded_width(self, num_scheduled: int) -> int:
        """Tokens of each request: one, and a power of two drafts, or as many as there can be."""
        if num_scheduled <= 1:
            return 1
        return 1 + min(1 << (num_scheduled - 2).bit_length(), self.max_drafts)

    def _padded_len(self, max_seq_len: int) -> int:
        capacity = self.state.block_table.shape[1] * self.state.block_size
        return min(max(MIN_GRAPH_LEN, 1 << (max_seq_len - 1).bit_length()), capacity)

    def _sent(self, plan: HostPlan, num_reqs: int) -> torch.Tensor:
        """The plan's columns on the device, [5, num_reqs] int32."""
        columns = np.zeros((5, num_reqs), np.int32)
        columns[0] = -1
        columns[:4, : len(plan.rows)] = (plan.rows, plan.num_scheduled, plan.num_drafts, plan.reserved)
        if plan.num_propose is not None:
            columns[4, : len(plan.rows)] = plan.num_propose
        return to_device(columns, self.device)

    # ---- the body: reads no value on the host, but for `resample` ----

    def _forward(self, columns: torch.Tensor, sizes: _Sizes) -> _Computed:
        frames = gather_frames(
            self.state,
            _plan(columns),
            num_tokens=sizes.num_tokens,
            num_samples=sizes.num_samples,
            max_seq_len=sizes.max_seq_len,
        )
        if sizes.state_layers:
            hidden, states = self.model.forward_with_states(frames.batch, sizes.state_layers)
        else:
            hidden = self.model.forward(frames.batch)
            states = hidden[:, :0]
        finite = torch.isfinite(hidden.sum(dim=1, dtype=torch.float32)).int()
        return _Computed(frames, hidden.index_select(0, frames.batch.logits_indices), finite, states)

    def _conclude(self, columns: torch.Tensor, computed: _Computed, resample: Resample | None) -> Acceptance:
        frames, plan = computed.frames, _plan(columns)
        sampled = torch.empty(frames.sample_rows.shape, dtype=torch.int32, device=self.device)
        if len(sampled):
            logits = self.model.logits(computed.hidden)
            sample(logits, frames.sample_rows, frames.sample_positions, self.state.sampling, sampled)
            if resample is not None:
                resample(logits, sampled)
        acceptance = accept_drafts(
            self.state, plan, frames, sampled, finite=computed.finite, max_drafts=self.max_drafts
        )
        if self._kv_cache is not None:
            clear_broken(acceptance, frames.batch, self._kv_cache)
        if self._propose is not None:
            self._propose(plan.rows, columns[4], acceptance)
        return acceptance

    # ---- graphs ----

    def _captured(self, sizes: _Sizes) -> _Graphs | None:
        """The graphs of these sizes, captured on first use; None where capture failed before."""
        if sizes not in self._graphs:
            try:
                self._graphs[sizes] = self._capture(sizes)
            except RuntimeError as error:
                # Slower, not wrong: the same body runs eagerly.
                logger.warning("no CUDA graph for %d requests, running without: %s", sizes.num_reqs, error)
                self._graphs[sizes] = None
        return self._graphs[sizes]

    def _capture(self, sizes: _Sizes) -> _Graphs:
        """Record both halves. They run once before on padding only, so that kernels compile outside the capture
        and no row moves."""
        static = torch.zeros((5, sizes.num_reqs), dtype=torch.int32, device=self.device)
        static[0] = -1
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._conclude(static, self._forward(static, sizes), None)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        # Another thread of this process may load weights to swap to: its calls must not end the capture.
        forward, conclude = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, capture_error_mode="thread_local"):
            computed = self._forward(static, sizes)
        with torch.cuda.graph(conclude, pool=self._pool, capture_error_mode="thread_local"):
            acceptance = self._conclude(static, computed, None)
        return _Graphs(static, forward, computed, conclude, acceptance)


def _plan(columns: torch.Tensor) -> PlanColumns:
    """The first of [5, num_reqs] int32 by name."""
    return PlanColumns(rows=columns[0], num_scheduled=columns[1], num_drafts=columns[2], reserved=columns[3])
