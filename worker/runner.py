"""One worker step: verify the pending drafts and sample, in one forward over all rows, then draft anew.

`execute` is a pure function of the plan and of what earlier plans of the session left behind. A row that
cannot be carried out fails alone, by name; anything else that raises fails the step. Knows nothing about
sessions' repeats and gaps (worker.session does), Ray or gRPC.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from scheduler.step import Arrival, Int32Array, Int64Array, RowFailure, RowLogprobs, StepPlan, StepResult
from worker.batch import Batch
from worker.drafter import Drafter, VerifiedStep
from worker.frames import Frame, gather_batch
from worker.model import Model
from worker.rows import RowState, RowTable
from worker.sampler import Verified, verify
from worker.sanitizer import KVSanitizer, KVViolation


class Standing(NamedTuple):
    """Where a row stands, as far as that is known before the steps under way have answered."""

    num_computed_tokens: int  # before the last of `most_tokens`, unless nothing is under way
    least_tokens: int
    most_tokens: int
    draft_token_ids: list[int]  # as many as there may be


class Runner:
    """Executes the plans of one session after another on one model and its KV pool."""

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
        """swap: loads other weights over the same pool shape; without it plans that swap fail."""
        self.worker_id = worker_id
        self.model = model
        self.drafter = drafter
        self.max_num_seqs = max_num_seqs
        self._sanitizer = sanitizer
        self._swap = swap
        self._block_size = model.kv_cache.block_size
        self._session: int | None = None
        self._next_step_seq = 0
        self._ended_ns: int | None = None
        self._rows: dict[int, RowState] = {}  # by epoch
        self._table = RowTable(max_num_seqs, self._block_size)

    @property
    def max_drafts(self) -> int:
        """Drafts it can propose for one row; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.max_drafts

    @property
    def drop_last_hit_block(self) -> bool:
        """Whether the drafter's KV at the end of a prefix hit depends on the token after it."""
        return self.drafter is not None and self.drafter.drop_last_hit_block

    def begin_session(self, session: int) -> None:
        """Forget every row; the pool counts as empty."""
        self._session = session
        self._next_step_seq = 0
        self._ended_ns = None
        self._rows.clear()
        if self.drafter is not None:
            self.drafter.begin_session()
        if self._sanitizer is not None:
            self._sanitizer.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the next plan of the session. Whatever it raises has broken the session."""
        started_ns = time.perf_counter_ns()
        idle_ns = 0 if self._ended_ns is None else started_ns - self._ended_ns
        self._count(plan)
        self._prepare(plan)
        frames = self._admit(self._frames(plan))
        step = self._verify(frames, started_ns) if frames else None
        verified_ns = time.perf_counter_ns()
        if step is not None and self.drafter is not None:
            self._propose(self.drafter, step)
        self._ended_ns = time.perf_counter_ns()
        return self._result(
            plan,
            frames,
            self._failures(plan.epochs),
            verify_ns=verified_ns - started_ns,
            draft_ns=self._ended_ns - verified_ns,
            idle_ns=idle_ns,
        )

    # ---- what the plan says ----

    def _count(self, plan: StepPlan) -> None:
        """It is the next one."""
        assert plan.session == self._session, f"session {plan.session} in session {self._session}"
        assert plan.step_seq == self._next_step_seq, f"step {plan.step_seq} in place of {self._next_step_seq}"
        self._next_step_seq += 1

    def _prepare(self, plan: StepPlan) -> None:
        """Weights, released epochs, arrivals: in this order, before the rows."""
        if plan.weights is not None:
            if self._swap is None:
                raise ValueError(f"this worker cannot swap its weights to {plan.weights}")
            self.model = self._swap(plan.weights)
        for epoch in plan.released_epochs.tolist():
            self._rows.pop(epoch, None)
            if self.drafter is not None:
                self.drafter.forget(epoch)
            if self._sanitizer is not None:
                self._sanitizer.forget(epoch)
        taken = {row.row: row.epoch for row in self._rows.values()} if plan.arrivals else {}
        for arrival in plan.arrivals:
            self._seat(arrival, taken)

    def _seat(self, arrival: Arrival, taken: dict[int, int]) -> None:
        assert 0 <= arrival.row < self.max_num_seqs, f"row {arrival.row} of {self.max_num_seqs}"
        assert arrival.row not in taken, f"epoch {arrival.epoch} arrives at row {arrival.row}, epoch {taken} has it"
        taken[arrival.row] = arrival.epoch
        self._rows[arrival.epoch] = RowState.of(arrival, self._table, self.model.config.vocab_size)

    def _frames(self, plan: StepPlan) -> list[Frame]:
        """The rows that have something to compute, in plan order. Rows that cannot be carried out fail."""
        frames: list[Frame] = []
        offsets = plan.block_offsets.tolist()
        columns = (plan.epochs, plan.num_scheduled, plan.num_drafts, plan.reserved, plan.num_propose)
        for index, (epoch, num_scheduled, num_drafts, reserved, num_propose) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            row = self._rows.get(epoch)
            if row is None or row.failure is not None:
                continue  # answered in the result
            try:
                self._append_blocks(row, plan.block_ids[offsets[index] : offsets[index + 1]])
                frame = self._frame(index, row, num_scheduled, num_drafts, reserved, num_propose)
            except ValueError as error:
                self._fail(row, error)
                continue
            if frame is not None:
                frames.append(frame)
        return frames

    def _append_blocks(self, row: RowState, block_ids: Int32Array) -> None:
        if len(block_ids) == 0:
            return
        if int(block_ids.min()) < 0 or int(block_ids.max()) >= self.model.kv_cache.num_blocks:
            raise ValueError(f"block ids {block_ids.tolist()} in a pool of {self.model.kv_cache.num_blocks} blocks")
        row.append_blocks(block_ids)

    def _frame(
        self, index: int, row: RowState, num_scheduled: int, num_drafts: int, reserved: int, num_propose: int
    ) -> Frame | None:
        """The frame by true positions, or None for a row that has reached its end. Raises ValueError."""
        start, least, most, drafts = self._standing(row)
        if reserved == 0:
            stop, drafts = start + num_scheduled, []
            if stop >= most:
                raise ValueError(f"a chunk of {num_scheduled} reaches token {most}, but reserves none")
        else:
            if least >= row.end:
                return None
            drafts = drafts[: max(min(num_drafts, row.end - least - 1), 0)]
            stop = most + len(drafts)
            if stop - start > num_scheduled:
                raise ValueError(f"{stop - start} tokens to compute, {num_scheduled} scheduled")
            beyond = max(stop - (row.end - 1), 0)
            start, stop = start - beyond, stop - beyond
        if stop > row.num_blocks * self._block_size:
            raise ValueError(f"{row.num_blocks} blocks of {self._block_size} cannot hold {stop} tokens")
        return Frame(
            index=index,
            row=row,
            start=start,
            stop=stop,
            draft_token_ids=drafts,
            samples=reserved > 0,
            num_propose=num_propose,
        )

    def _standing(self, row: RowState) -> Standing:
        """Where the row stands when the next step begins."""
        return Standing(row.num_computed_tokens, row.num_tokens, row.num_tokens, row.draft_token_ids)

    def _fail(self, row: RowState, error: Exception | str) -> None:
        row.failure = f"request {row.request_id}: {error}"
        row.draft_token_ids = []

    # ---- verify ----

    def _admit(self, frames: list[Frame]) -> list[Frame]:
        """The frames whose every read the sanitizer finds in order."""
        sanitizer = self._sanitizer
        if sanitizer is None:
            return frames
        for frame in frames:
            sanitizer.write(frame.row, frame.stop)
        admitted: list[Frame] = []
        # After all writes: two rows of this step that share a slot are found too.
        for frame in frames:
            try:
                sanitizer.check(frame.row, frame.stop)
            except KVViolation as violation:
                self._fail(frame.row, violation)
            else:
                admitted.append(frame)
        for frame in frames:
            if frame.row.failure is not None:
                sanitizer.unwrite(frame.row, frame.stop)
        return admitted

    @torch.inference_mode()
    def _verify(self, frames: list[Frame], started_ns: int) -> VerifiedStep:
        """One forward over all frames; then every frame that samples accepts what it can."""
        batch = gather_batch(frames, self._table, self.model.device)
        layers = () if self.drafter is None else self.drafter.state_layers
        if layers:
            hidden, states = self.model.forward_with_states(batch, layers)
        else:
            hidden = self.model.forward(batch)
            states = hidden[:, :0]
        self._fail_poisoned(frames, hidden, batch)
        if len(batch.logits_indices):
            self._sample(frames, self.model.logits(hidden.index_select(0, batch.logits_indices)))
        for frame in frames:
            if not frame.samples and frame.row.failure is None:
                frame.row.num_computed_tokens = frame.stop
        return VerifiedStep(frames=frames, batch=batch, states=states, verify_ns=time.perf_counter_ns() - started_ns)

    def _fail_poisoned(self, frames: list[Frame], hidden: torch.Tensor, batch: Batch) -> None:
        """Rows whose hidden states are not finite fail, and leave no such KV: a masked 0 * NaN would
        poison whoever gets their blocks next."""
        finite = torch.isfinite(hidden.sum(dim=1, dtype=torch.float32)).cpu().numpy()
        if finite.all():
            return
        bounds = batch.cu_seqlens_q.tolist()
        for index, frame in enumerate(frames):
            wrong = np.flatnonzero(~finite[bounds[index] : bounds[index + 1]])
            if len(wrong):
                slots = batch.slot_mapping[bounds[index] : bounds[index + 1]]
                self._fail(frame.row, f"the hidden state at position {frame.start + int(wrong[0])} is not finite")
                self.model.kv_cache.key.flatten(1, 2)[:, slots] = 0
                self.model.kv_cache.value.flatten(1, 2)[:, slots] = 0
                if self._sanitizer is not None:
                    self._sanitizer.unwrite(frame.row, frame.stop)

    def _sample(self, frames: list[Frame], logits: torch.Tensor) -> None:
        """logits: [num_samples, vocab_size] float32, frame after frame."""
        best, finite, host = _argmax(logits, any(_wants_values(frame) for frame in frames))
        offset = 0
        for frame in frames:
            rows = slice(offset, offset + frame.num_samples)
            offset += frame.num_samples
            row = frame.row
            if not frame.samples or row.failure is not None:
                continue
            assert row.sampler is not None
            try:
                if row.sampler.is_plain:
                    verified = _accept(best[rows], finite[rows], frame.draft_token_ids, row.num_tokens)
                else:
                    assert host is not None
                    verified = verify(row.sampler, host[rows], row.num_tokens, frame.draft_token_ids)
            except Exception as error:
                # Whatever is wrong with one row's logits or parameters is that row's alone.
                self._fail(row, error)
                continue
            frame.token_ids, frame.logprobs = verified
            row.num_computed_tokens = row.num_tokens + len(verified.token_ids) - 1
            row.append_tokens(verified.token_ids)

    # ---- draft ----

    def _propose(self, drafter: Drafter, step: VerifiedStep) -> None:
        """Drafts for the next frame of every row that sampled, from its confirmed tokens."""
        rows: list[RowState] = []
        limits: list[int] = []
        for frame in step.frames:
            limit = min(frame.num_propose, frame.row.end - frame.row.num_tokens - 1)
            if frame.token_ids and limit > 0:
                rows.append(frame.row)
                limits.append(limit)
        drafter.observe(step)
        for row, limit, drafts in zip(rows, limits, drafter.propose(rows, limits), strict=True):
            assert len(drafts) <= limit, f"{len(drafts)} drafts where {limit} were wanted"
            row.hold_drafts(_inside_vocabulary(drafts, self.model.config.vocab_size))

    # ---- answer ----

    def _result(
        self,
        plan: StepPlan,
        frames: list[Frame],
        failures: dict[int, str],
        *,
        verify_ns: int,
        draft_ns: int,
        idle_ns: int,
    ) -> StepResult:
        num_tokens = np.zeros(len(plan.rows), np.int32)
        num_verified = np.zeros(len(plan.rows), np.int32)
        token_ids: list[int] = []
        logprobs: list[RowLogprobs] = []
        for frame in frames:
            if not frame.token_ids:
                continue
            num_tokens[frame.index] = len(frame.token_ids)
            num_verified[frame.index] = len(frame.draft_token_ids)
            token_ids.extend(frame.token_ids)
            if frame.logprobs:
                logprobs.append(_row_logprobs(frame))
        return StepResult(
            worker_id=self.worker_id,
            session=plan.session,
            step_seq=plan.step_seq,
            rows=plan.rows,
            epochs=plan.epochs,
            num_tokens=num_tokens,
            num_verified=num_verified,
            token_ids=np.array(token_ids, np.int32),
            failures=tuple(RowFailure(epoch=epoch, message=message) for epoch, message in failures.items()),
            logprobs=tuple(logprobs),
            verify_ns=verify_ns,
            draft_ns=draft_ns,
            idle_ns=idle_ns,
        )

    def _failures(self, epochs: Int64Array) -> dict[int, str]:
        """What this plan's rows failed of, now or earlier: by epoch, in the plan's order."""
        failures: dict[int, str] = {}
        for epoch in epochs.tolist():
            row = self._rows.get(epoch)
            message = f"epoch {epoch} is not resident on worker {self.worker_id}" if row is None else row.failure
            if message is not None:
                failures[epoch] = message
        return failures


def _argmax(logits: torch.Tensor, wants_values: bool) -> tuple[list[int], list[bool], np.ndarray | None]:
    """Per row the best token (the lowest id of equals) and whether its logit is finite; the logits if wanted."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised and promises the first of equals; torch's takes 100 times as long here.
        host = logits.numpy()
        best = host.argmax(axis=1)
        return best.tolist(), np.isfinite(host[np.arange(len(host)), best]).tolist(), host
    device_best = torch.argmax(logits, dim=1)
    finite = torch.isfinite(logits.gather(1, device_best[:, None])[:, 0])
    return device_best.tolist(), finite.tolist(), logits.cpu().numpy() if wants_values else None


def _wants_values(frame: Frame) -> bool:
    return frame.samples and frame.row.sampler is not None and not frame.row.sampler.is_plain


def _accept(best: list[int], finite: list[bool], draft_token_ids: list[int], position: int) -> Verified:
    """Greedy verification: the longest prefix of drafts that equals the argmaxes, and one token more."""
    num_accepted = 0
    while num_accepted < len(draft_token_ids) and draft_token_ids[num_accepted] == best[num_accepted]:
        num_accepted += 1
    kept = num_accepted + 1
    if not all(finite[:kept]):
        raise FloatingPointError(f"the logits for position {position + finite.index(False)} are not finite")
    return Verified(best[:kept], [])


def _inside_vocabulary(token_ids: list[int], vocab_size: int) -> list[int]:
    """The drafts before the first that the target has no embedding for (a draft model may be padded wider)."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            return token_ids[:index]
    return token_ids


def _row_logprobs(frame: Frame) -> RowLogprobs:
    return RowLogprobs(
        row_index=frame.index,
        logprobs=np.array([position.logprob for position in frame.logprobs], np.float32),
        top_token_ids=np.stack([position.top_token_ids for position in frame.logprobs]),
        top_logprobs=np.stack([position.top_logprobs for position in frame.logprobs]),
    )
