"""The runner of a worker whose rows live on the device: what a step confirms is written there by the step itself.

A plan is launched, and its answer read when it is there. Without a drafter the next plan is launched before that:
every sampling frame returns one token, so lengths are known and no token is needed. What needs the host's eyes is
waited for within its own step: drafters, who look at confirmed tokens (prompt lookup) or decide by numbers how far
to draft (models); the KV sanitizer, who hashes tokens; and rows with penalties, logit_bias, min_tokens or
logprobs, which `worker.sampler` samples in place of the device. Those are counted and told in the log. Answers are
those of `worker.runner.Runner`, token for token and word for word.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from scheduler.step import Arrival, Int32Array, StepPlan, StepResult
from worker.drafter import Drafter, VerifiedStep
from worker.frames import Frame
from worker.kernels.rows import BROKEN_HIDDEN, Acceptance, DeviceRows
from worker.kernels.sampling import FAILED
from worker.kernels.step import PADDED_SIZES, DeviceStep, Executed, HostPlan, Resample
from worker.kernels.transfers import OnItsWay, Write, scatter, to_device
from worker.model import Model
from worker.rows import RowState
from worker.runner import Runner
from worker.sampler import verify
from worker.sanitizer import KVSanitizer

log = logging.getLogger(__name__)

UNREAD = -1  # stands in the host's table for a token that only the device knows yet; no embedding takes it


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchedStep:
    """A step on its way through the device."""

    runner: "DeviceRunner"
    plan: StepPlan
    frames: list[Frame]
    failures: dict[int, str]  # by epoch: of rows that failed before this step or in it
    started_ns: int
    ended_ns: int | None = None
    is_ahead: bool = False  # its rows were moved on before their tokens were known
    executed: Executed | None = None  # None: there was nothing to compute
    answer: OnItsWay | None = None  # the values of its Acceptance
    host_sampled: list[tuple[Frame, int]] = field(default_factory=list)  # with the first of its samples
    errors: dict[int, Exception] = field(default_factory=dict)  # by epoch: why the host could not sample
    settled: StepResult | None = None

    @property
    def is_settled(self) -> bool:
        """Whether its result is there."""
        return self.settled is not None

    def wait(self) -> None:
        """Until the device has carried it out. From any thread."""
        assert self.answer is not None
        self.answer.wait()
        if self.ended_ns is None:
            self.ended_ns = time.perf_counter_ns()

    def result(self) -> StepResult:
        """Its result, and with it those of all steps before; on the thread of the steps."""
        if self.settled is None:
            self.runner.settle(self)
        assert self.settled is not None
        return self.settled


class DeviceRunner(Runner):
    """A `Runner` over `DeviceStep`, for models whose attention is Triton's."""

    def __init__(
        self,
        *,
        worker_id: str,
        model: Model,
        drafter: Drafter | None,
        max_num_seqs: int,
        sanitizer: KVSanitizer | None,
        swap: Callable[[str], Model] | None = None,
    ) -> None:
        """As `Runner`."""
        super().__init__(
            worker_id=worker_id, model=model, drafter=drafter, max_num_seqs=max_num_seqs, sanitizer=sanitizer, swap=swap
        )
        self.num_host_sampled = 0  # frames that the host sampled while the device waited
        self._state = DeviceRows.empty(
            max_num_seqs=max_num_seqs,
            max_model_len=model.max_model_len,
            block_size=self._block_size,
            device=model.device,
        )
        self._device_step = DeviceStep(
            model,
            self._state,
            max_drafts=self.max_drafts,
            kv_cache=model.kv_cache,
            padded_sizes=(*(size for size in PADDED_SIZES if size < max_num_seqs), max_num_seqs),
        )
        self._nothing = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._new_blocks: list[Write] = []
        self._pending: deque[LaunchedStep] = deque()  # launched and not settled, in order

    def begin_session(self, session: int) -> None:
        """Forget every row and every step; the pool counts as empty."""
        super().begin_session(session)
        self._pending.clear()
        self._new_blocks.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the next plan of the session. Whatever it raises has broken the session."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Hand the next plan of the session to the device. Whatever this or the result raises has broken it."""
        started_ns = time.perf_counter_ns()
        self._count(plan)
        self._prepare(plan)
        if self._pending and any(needs_host(self._rows.get(epoch)) for epoch in plan.epochs.tolist()):
            # The host must know which samples are whose, and a row that has failed has none.
            self.settle(self._pending[-1])
        frames = self._admit(self._frames(plan))
        scatter(self._state.block_table, self._new_blocks)
        self._new_blocks.clear()
        step = LaunchedStep(
            runner=self, plan=plan, frames=frames, failures=self._failures(plan.epochs), started_ns=started_ns
        )
        if frames:
            step.executed = self._device_step.execute(self._host_plan(frames), self._resample(step))
        step.answer = OnItsWay(self._nothing if step.executed is None else step.executed.acceptance.values)
        self._pending.append(step)
        if self.drafter is None and self._sanitizer is None and not step.host_sampled:
            self._move_on(step)
        else:
            self.settle(step)
        return step

    # ---- what the plan says ----

    def _prepare(self, plan: StepPlan) -> None:
        super()._prepare(plan)
        if plan.weights is not None:
            self._device_step.use(self.model)

    def _seat(self, arrival: Arrival, taken: dict[int, int]) -> None:
        super()._seat(arrival, taken)
        row, capacity = self._rows[arrival.epoch], self._state.token_ids.shape[1]
        if row.failure is None and max(row.end, row.num_tokens) > capacity:
            self._fail(row, f"it ends at position {max(row.end, row.num_tokens)}, past max_model_len {capacity}")
        if row.failure is None:
            self._state.seat(
                row.row,
                row.token_ids,
                num_computed=row.num_computed_tokens,
                end=row.end,
                sampling=arrival.sampling,
            )

    def _append_blocks(self, row: RowState, block_ids: Int32Array) -> None:
        first = row.num_blocks
        if first + len(block_ids) > self._state.block_table.shape[1]:
            raise ValueError(f"{first + len(block_ids)} blocks for a request that ends at position {row.end}")
        super()._append_blocks(row, block_ids)
        if len(block_ids):
            self._new_blocks.append((row.row, first, block_ids))

    def _host_plan(self, frames: list[Frame]) -> HostPlan:
        """The frames, whose rows the device knows."""
        columns = [
            (frame.row.row, frame.stop - frame.start, len(frame.draft_token_ids), frame.num_samples) for frame in frames
        ]
        rows, num_scheduled, num_drafts, reserved = np.array(columns, np.int32).T
        return HostPlan(
            rows=rows,
            num_scheduled=num_scheduled,
            num_drafts=num_drafts,
            reserved=reserved,
            max_seq_len=max(frame.stop for frame in frames),
            state_layers=() if self.drafter is None else tuple(self.drafter.state_layers),
        )

    def _move_on(self, step: LaunchedStep) -> None:
        """Rows of frames without drafts stand where the step will leave them; their tokens are read later."""
        step.is_ahead = True
        for frame in step.frames:
            frame.row.num_computed_tokens = frame.stop
            if frame.samples:
                assert not frame.draft_token_ids
                frame.row.append_tokens([UNREAD])

    # ---- samples of the host ----

    def _resample(self, step: LaunchedStep) -> Resample | None:
        """The host's part in sampling; None: it has none."""
        first = 0
        for frame in step.frames:
            if frame.samples and needs_host(frame.row):
                step.host_sampled.append((frame, first))
            first += frame.num_samples
        return partial(self._sample_on_host, step) if step.host_sampled else None

    def _sample_on_host(self, step: LaunchedStep, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Put the host's tokens in place of the device's, which accepts from them what the host accepted."""
        if self.num_host_sampled == 0:
            log.info("steps wait for the host to sample rows with penalties, logit_bias, min_tokens or logprobs")
        self.num_host_sampled += len(step.host_sampled)
        index = np.concatenate([np.arange(first, first + frame.num_samples) for frame, first in step.host_sampled])
        values = OnItsWay(logits.index_select(0, to_device(index, logits.device))).wait().numpy()
        writes: list[Write] = []
        for frame, first in step.host_sampled:
            row, token_ids = frame.row, [FAILED]
            assert row.sampler is not None
            try:
                mine, values = values[: frame.num_samples], values[frame.num_samples :]
                verified = verify(row.sampler, mine, row.num_tokens, frame.draft_token_ids)
            except Exception as error:
                # Whatever is wrong with one row's logits or parameters is that row's alone.
                step.errors[row.epoch] = error
            else:
                token_ids, frame.logprobs = verified
            writes.append((0, first, np.array(token_ids, np.int32)))
        scatter(sampled[None], writes)

    # ---- the answer ----

    def settle(self, step: LaunchedStep) -> None:
        """Read the answers of the steps up to this one, in order."""
        assert step in self._pending, f"step {step.plan.step_seq} of an earlier session"
        while step.settled is None:
            self._settle(self._pending.popleft())

    @torch.inference_mode()
    def _settle(self, step: LaunchedStep) -> None:
        step.wait()
        assert step.ended_ns is not None
        if step.executed is not None:
            self._read(step)
        verified_ns = step.ended_ns if step.is_ahead else time.perf_counter_ns()
        if step.executed is not None and self.drafter is not None:
            batch, states = step.executed.batch, step.executed.states
            verify_ns = verified_ns - step.started_ns
            self._propose(
                self.drafter, VerifiedStep(frames=step.frames, batch=batch, states=states, verify_ns=verify_ns)
            )
        ended_ns = verified_ns if self.drafter is None else time.perf_counter_ns()
        began_ns, before_ns = step.started_ns, self._ended_ns
        self._ended_ns = ended_ns
        if before_ns is not None and before_ns > began_ns:
            began_ns = before_ns  # launched while the step before was under way: the device never idled
        step.settled = self._result(
            step.plan,
            step.frames,
            {epoch: step.failures[epoch] for epoch in step.plan.epochs.tolist() if epoch in step.failures},
            verify_ns=max(verified_ns - began_ns, 0),
            draft_ns=ended_ns - verified_ns,
            idle_ns=0 if before_ns is None else began_ns - before_ns,
        )

    def _read(self, step: LaunchedStep) -> None:
        """What became of every frame."""
        assert step.executed is not None
        assert step.answer is not None
        acceptance = Acceptance.of(step.answer.wait(), step.executed.acceptance.num_tokens.shape[0])
        columns = (acceptance.token_ids, acceptance.num_tokens, acceptance.failed, acceptance.failed_position)
        for frame, token_ids, num_tokens, failed, position in zip(
            step.frames, *(column[: len(step.frames)].tolist() for column in columns), strict=True
        ):
            if failed:
                self._break(step, frame, failed, position)
            elif num_tokens:
                self._confirm(step, frame, token_ids[:num_tokens])
            elif not frame.samples and frame.row.failure is None:
                frame.row.num_computed_tokens = frame.stop

    def _break(self, step: LaunchedStep, frame: Frame, failed: int, position: int) -> None:
        """The row has failed, on the device already; so it has for every step launched since."""
        row = frame.row
        if failed == BROKEN_HIDDEN:
            self._fail(row, f"the hidden state at position {position} is not finite")
            if self._sanitizer is not None:
                self._sanitizer.unwrite(row, frame.stop)
        else:
            self._fail(row, step.errors.get(row.epoch, f"the logits for position {position} are not finite"))
        assert row.failure is not None
        for waiting in (step, *self._pending):
            waiting.failures[row.epoch] = row.failure

    def _confirm(self, step: LaunchedStep, frame: Frame, token_ids: list[int]) -> None:
        row, frame.token_ids = frame.row, token_ids
        if not step.is_ahead:
            row.num_computed_tokens = row.num_tokens + len(token_ids) - 1
            row.append_tokens(token_ids)
        elif self._rows.get(row.epoch) is row:  # else the row is another's by now
            row.table.token_ids[row.row, frame.stop : frame.stop + 1] = token_ids

    def _propose(self, drafter: Drafter, step: VerifiedStep) -> None:
        super()._propose(drafter, step)
        rows = [frame.row for frame in step.frames if frame.row.draft_token_ids and frame.token_ids]
        drafts = [(row, np.array(row.draft_token_ids, np.int32)) for row in rows]
        scatter(self._state.token_ids, [(row.row, row.num_tokens, token_ids) for row, token_ids in drafts])
        scatter(
            self._state.num_drafts[:, None],
            [(row.row, 0, np.array([len(token_ids)], np.int32)) for row, token_ids in drafts],
        )


def needs_host(row: RowState | None) -> bool:
    """Whether the tokens of this row take more than the device's sampler knows, or their numbers are asked for."""
    if row is None or row.sampler is None:
        return False
    return row.sampler.sampling.num_logprobs is not None or row.sampler.processes(row.num_tokens)
