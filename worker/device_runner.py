"""The runner of a worker whose rows live on the device: what a step confirms is written there by the step itself.

A plan is launched, and its answer is read when it is there. Without a drafter, or with prompt lookup, which works on
the device, the next plan is launched before that: until the answer is read a row is known by bounds, as the scheduler
knows it. What needs the host is waited for within its own step: drafters that are models, or that choose how many
drafts pay, since they decide by numbers on the host; the KV sanitizer, which hashes tokens; and rows with penalties,
logit_bias, min_tokens or logprobs, which `worker.sampler` samples in place of the device. Those are counted and told
in the log. Answers are those of `worker.runner.Runner`, token for token and word for word.
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
from worker.drafter import Drafter, NgramDrafter, VerifiedStep
from worker.frames import Frame
from worker.kernels.lookup import look_up
from worker.kernels.rows import BROKEN_HIDDEN, Acceptance, DeviceRows
from worker.kernels.sampling import FAILED
from worker.kernels.step import PADDED_SIZES, DeviceStep, Executed, HostPlan, Propose, Resample
from worker.kernels.transfers import OnItsWay, Write, scatter, to_device
from worker.model import Model
from worker.rows import RowState
from worker.runner import Runner, Standing
from worker.sampler import verify
from worker.sanitizer import KVSanitizer

log = logging.getLogger(__name__)

UNREAD = -1  # a draft that only the device knows


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchedStep:
    """A step on its way through the device."""

    runner: "DeviceRunner"
    plan: StepPlan
    frames: list[Frame]
    failures: dict[int, str]  # by epoch: of rows that failed before this step or in it
    started_ns: int
    ended_ns: int | None = None
    by_epoch: dict[int, Frame] = field(default_factory=dict)  # its frames
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
        propose: Propose | None = None
        if isinstance(drafter, NgramDrafter):
            shortest, longest = drafter.lengths
            propose = partial(look_up, self._state, shortest=shortest, longest=longest)
        self._is_host_drafted = drafter is not None and propose is None
        self._device_step = DeviceStep(
            model,
            self._state,
            max_drafts=self.max_drafts,
            kv_cache=model.kv_cache,
            propose=propose,
            padded_sizes=(*(size for size in PADDED_SIZES if size < max_num_seqs), max_num_seqs),
        )
        self._nothing = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._new_blocks: list[Write] = []
        self._pending: deque[LaunchedStep] = deque()  # launched and not settled, in order

    @property
    def num_graphs(self) -> int:
        """Padded sizes captured in CUDA graphs so far."""
        return self._device_step.num_graphs

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
            # The host must know the drafts, and which samples are whose: a row that has failed has none.
            self.settle(self._pending[-1])
        frames = self._admit(self._frames(plan))
        scatter(self._state.block_table, self._new_blocks)
        self._new_blocks.clear()
        step = LaunchedStep(
            runner=self,
            plan=plan,
            frames=frames,
            by_epoch={frame.row.epoch: frame for frame in frames},
            failures=self._failures(plan.epochs),
            started_ns=started_ns,
        )
        if frames:
            step.executed = self._device_step.execute(self._host_plan(frames), self._resample(step))
        step.answer = OnItsWay(self._nothing if step.executed is None else step.executed.acceptance.values)
        self._pending.append(step)
        if self._is_host_drafted or self._sanitizer is not None or step.host_sampled:
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
            num_propose=np.array([frame.num_propose for frame in frames], np.int32),
            state_layers=() if self.drafter is None else tuple(self.drafter.state_layers),
        )

    def _standing(self, row: RowState) -> Standing:
        computed, least, most, drafts = super()._standing(row)
        for step in self._pending:
            frame = step.by_epoch.get(row.epoch)
            if frame is not None and frame.samples:
                least, most = least + 1, most + frame.num_samples
                computed, drafts = most - 1, [UNREAD] * self.max_drafts
            elif frame is not None:
                computed = frame.stop
        return Standing(computed, least, most, drafts)

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
        verified_ns = ended_ns = step.ended_ns
        if step.executed is not None and self._is_host_drafted and self.drafter is not None:
            verified_ns = time.perf_counter_ns()
            self._propose(
                self.drafter,
                VerifiedStep(
                    frames=step.frames,
                    batch=step.executed.batch,
                    states=step.executed.states,
                    verify_ns=verified_ns - step.started_ns,
                ),
            )
            ended_ns = time.perf_counter_ns()
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
        assert step.answer is not None
        answer = Acceptance.of(step.answer.wait(), self.max_drafts)
        columns = (answer.num_tokens, answer.num_verified, answer.failed, answer.failed_position, answer.num_drafts)
        token_ids, draft_ids = answer.token_ids.numpy(), answer.draft_ids.numpy()
        for index, (frame, num_tokens, num_verified, failed, position, num_drafts) in enumerate(
            zip(step.frames, *(column[: len(step.frames)].tolist() for column in columns), strict=True)
        ):
            row = frame.row
            if row.epoch in step.failures:
                continue
            if failed:
                self._break(step, row, self._why(step, frame, failed, position))
            elif num_tokens:
                del frame.draft_token_ids[num_verified:]
                self._confirm(frame, token_ids[index, :num_tokens].tolist(), draft_ids[index, :num_drafts].tolist())
            elif not frame.samples:
                row.num_computed_tokens = frame.stop
            elif row.num_tokens < row.end:
                self._break(step, row, f"more tokens to compute than the {frame.stop - frame.start} scheduled")

    def _why(self, step: LaunchedStep, frame: Frame, failed: int, position: int) -> Exception | str:
        """What broke a row on the device."""
        if failed != BROKEN_HIDDEN:
            return step.errors.get(frame.row.epoch, f"the logits for position {position} are not finite")
        if self._sanitizer is not None:
            self._sanitizer.unwrite(frame.row, frame.stop)
        return f"the hidden state at position {position} is not finite"

    def _break(self, step: LaunchedStep, row: RowState, error: Exception | str) -> None:
        """The row has failed; so it has for every step launched since."""
        self._fail(row, error)
        assert row.failure is not None
        for waiting in (step, *self._pending):
            waiting.failures[row.epoch] = row.failure

    def _confirm(self, frame: Frame, token_ids: list[int], draft_token_ids: list[int]) -> None:
        row, frame.token_ids = frame.row, token_ids
        if self._rows.get(row.epoch) is row:  # else it is gone, and its place in the table is another's
            row.num_computed_tokens = row.num_tokens + len(token_ids) - 1
            row.append_tokens(token_ids)
            if draft_token_ids:
                row.hold_drafts(draft_token_ids)

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
