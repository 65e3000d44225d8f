"""Fake workers: the row semantics of a real one over a paged shadow of the KV cache and the toy model.

Every slot is checked before it is read: it must hold exactly what the request believes was written there,
under the namespace it arrived with and the weights of now. Whatever a plan asks that a real worker could
not do faithfully is a `Violation`. Knows nothing about networks or time.
"""

import random
from dataclasses import dataclass

import numpy as np

from scheduler.step import Arrival, RowFailure, StepPlan, StepResult
from tests.simulate.toy import VOCABULARY, Violation, chain, extend, kv_key, next_token, stops

GARBAGE = -1  # what a failed row leaves in the slots it was to write


class StepCrash(RuntimeError):
    """A whole step failed, as planned by the weather."""


class WorkerCrash(RuntimeError):
    """The worker dies while running this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How one fake worker misbehaves; probabilities per row or per step."""

    row_fails: float = 0.0
    step_fails: float = 0.0
    drafts_spoiled: float = 0.3  # per draft
    drafter_fails: float = 0.1  # per proposal: fewer drafts or none


class ShadowRow:
    """One epoch on a worker. The first `num_computed` tokens have their KV written."""

    __slots__ = (
        "blocks", "end", "ends", "epoch", "hashes", "hit_unread", "key", "kv", "max_verify", "message", "min_tokens",
        "num_prompt", "pending", "request_id", "seed", "token_ids", "version",
    )  # fmt: skip

    def __init__(self, arrival: Arrival, version: int, salt: int) -> None:
        prompt: list[int] = arrival.prompt_token_ids.tolist()
        self.epoch = arrival.epoch
        self.request_id = arrival.request_id
        self.token_ids = prompt + arrival.output_token_ids.tolist()
        self.hashes = chain(self.token_ids)
        self.num_prompt = len(prompt)
        self.end = arrival.end
        self.seed = arrival.sampling.seed
        self.min_tokens = arrival.sampling.min_tokens
        self.ends = stops(arrival.sampling)
        self.version = version
        self.key = kv_key(arrival.namespace, version, salt)
        self.kv = [value ^ self.key for value in self.hashes[: arrival.num_computed_tokens]]
        self.hit_unread = True  # the draft KV of the prefix hit was not looked at yet
        self.blocks: list[int] = []
        self.pending: list[int] = []
        self.max_verify = 0  # drafts the frame before was asked to propose
        self.message: str | None = None  # why every frame of this epoch fails

    def sample(self, prefix: int, position: int) -> int:
        """The token at `position`, all before it being hashed in `prefix`."""
        masked = position - self.num_prompt < self.min_tokens
        return next_token(prefix, self.version, self.seed, self.ends, masked)


class ShadowWorker:
    """A StepExecutor for worker.session.SessionQueue."""

    def __init__(
        self,
        *,
        worker_id: str,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_drafts: int,
        drop_last_hit_block: bool,
        max_num_batched_tokens: int,
        faults: Faults,
        rng: random.Random,
        salts: dict[str, int],
        poisoned: set[str],
    ) -> None:
        self.worker_id = worker_id
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_drafts = max_drafts
        self.drop_last_hit_block = drop_last_hit_block
        self.max_num_batched_tokens = max_num_batched_tokens
        self.faults = faults
        self.rng = rng
        self.salts = salts  # request_id -> cache salt, known to the world only
        self.poisoned = poisoned  # request ids that kill every worker they run on
        self.version = 0  # of the weights; a crash returns to 0
        self.session = -1
        self.rows: dict[int, ShadowRow] = {}
        self.shadow: list[list[int]] = []
        self.draft_shadow: list[list[int]] = []
        self.num_stale_draft_slots = 0  # in prefix hits: they cost acceptance only
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_drafter_failures = 0

    def begin_session(self, session: int) -> None:
        """Forget every row; what the pool holds is garbage."""
        self.session = session
        self.rows = {}
        empty = [0] * self.block_size
        self.shadow = [empty.copy() for _ in range(self.num_blocks)]
        if self.drop_last_hit_block:
            self.draft_shadow = [empty.copy() for _ in range(self.num_blocks)]

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step: weights, released epochs, arrivals, rows."""
        if plan.weights is not None:
            self.version = int(plan.weights)
        self._release(plan.released_epochs.tolist())
        for arrival in plan.arrivals:
            self._seat(arrival)
        if self.rng.random() < self.faults.step_fails:
            raise StepCrash("a step failed")
        return self._run(plan)

    def _release(self, epochs: list[int]) -> None:
        if not epochs:
            return
        row_by_epoch = {seated.epoch: row for row, seated in self.rows.items()}
        for epoch in epochs:
            if epoch not in row_by_epoch:
                raise Violation(f"{self.worker_id}: released epoch {epoch}, which has no row")
            del self.rows[row_by_epoch[epoch]]

    def _seat(self, arrival: Arrival) -> None:
        who = arrival.request_id
        if arrival.row in self.rows:
            raise Violation(f"{self.worker_id}: {who} arrives in row {arrival.row}, which was not released", who)
        if not 0 <= arrival.row < self.max_num_seqs:
            raise Violation(f"{self.worker_id}: {who} arrives in row {arrival.row} of {self.max_num_seqs}", who)
        if who in self.poisoned:
            raise WorkerCrash(who)
        self.rows[arrival.row] = ShadowRow(arrival, self.version, self.salts[who])

    def _run(self, plan: StepPlan) -> StepResult:
        frames = self._frames(plan)
        written_by: dict[int, int] = {}  # block -> epoch that writes it in this step
        for frame in frames:
            self._check_context(frame)
            self._claim_blocks(frame, written_by)
        if written_by:
            for frame in frames:
                self._check_conflicts(frame, written_by)
        failures = []
        num_tokens, num_verified, token_ids = [], [], []
        for frame in frames:
            answer = self._run_row(frame)
            if frame.row.message is not None:
                failures.append(RowFailure(epoch=frame.row.epoch, message=frame.row.message))
            num_tokens.append(len(answer))
            num_verified.append(0 if frame.row.message is not None else frame.num_verified)
            token_ids.extend(answer)
        return StepResult(
            worker_id=self.worker_id,
            session=plan.session,
            step_seq=plan.step_seq,
            rows=plan.rows,
            epochs=plan.epochs,
            num_tokens=np.array(num_tokens, np.int32),
            num_verified=np.array(num_verified, np.int32),
            token_ids=np.array(token_ids, np.int32),
            failures=tuple(failures),
            verify_ns=1000,
            draft_ns=100,
            idle_ns=10,
        )

    def _frames(self, plan: StepPlan) -> list["Frame"]:
        """The plan's rows with their true numbers, their blocks appended."""
        offsets: list[int] = plan.block_offsets.tolist()
        block_ids: list[int] = plan.block_ids.tolist()
        if offsets[-1] != len(block_ids) or len(offsets) != len(plan.rows) + 1:
            raise Violation(f"{self.worker_id}: step {plan.step_seq} has block offsets that fit nothing")
        if int(plan.num_scheduled.sum()) > self.max_num_batched_tokens:
            raise Violation(f"{self.worker_id}: step {plan.step_seq} is over the token budget")
        columns = (plan.rows, plan.epochs, plan.num_scheduled, plan.num_drafts, plan.reserved, plan.num_propose)
        frames = []
        seen = set()
        for index, (row, epoch, n, k, reserved, propose) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            seated = self.rows.get(row)
            if seated is None or seated.epoch != epoch or row in seen:
                raise Violation(f"{self.worker_id}: step {plan.step_seq} plans row {row} for epoch {epoch} in vain")
            seen.add(row)
            if n < 1 or reserved != (0 if reserved == 0 else 1 + k) or (reserved == 0 and k):
                raise Violation(f"{seated.request_id}: n={n} K={k} reserved={reserved}", seated.request_id)
            if seated.version != self.version:
                raise Violation(f"{seated.request_id}: epoch {epoch} outlived a weight swap", seated.request_id)
            seated.blocks.extend(block_ids[offsets[index] : offsets[index + 1]])
            frames.append(Frame(seated, n, k, reserved, propose, self.max_drafts))
        return frames

    def _check_context(self, frame: "Frame") -> None:
        """Every slot this row reads, prefix hits included, holds what the row believes."""
        row, size = frame.row, self.block_size
        if row.message is not None:
            return
        if frame.stop > len(row.blocks) * size:
            raise Violation(
                f"{row.request_id}: writes up to {frame.stop} with {len(row.blocks)} blocks", row.request_id
            )
        kv, shadow = row.kv, self.shadow
        start, stop = 0, len(kv)
        for block in row.blocks:
            if start >= stop:
                break
            held = shadow[block]
            believed = kv[start : start + size]
            if held != believed and held[: len(believed)] != believed:
                raise Violation(
                    f"{self.worker_id}: {row.request_id} (epoch {row.epoch}) reads block {block} at positions "
                    f"{start}..{start + len(believed) - 1} of {len(row.token_ids)}: not what it believes",
                    row.request_id,
                )
            start += size
        if self.drop_last_hit_block and row.hit_unread:
            self._check_draft_context(row)
        row.hit_unread = False

    def _check_draft_context(self, row: ShadowRow) -> None:
        """The draft head's KV at position p depends on the token at p + 1."""
        size = self.block_size
        for position in range(len(row.kv)):
            held = self.draft_shadow[row.blocks[position // size]][position % size]
            if held == row.hashes[position + 1] ^ row.key:
                continue
            # The next block may be published by another request than this one, which went on differently.
            self.num_stale_draft_slots += 1
            if position % size != size - 1:
                raise Violation(f"{row.request_id}: draft KV of a hit is stale at {position}", row.request_id)

    def _claim_blocks(self, frame: "Frame", written_by: dict[int, int]) -> None:
        row, size = frame.row, self.block_size
        if frame.stop <= frame.start or row.message is not None:
            return
        for block in row.blocks[frame.start // size : (frame.stop - 1) // size + 1]:
            if written_by.setdefault(block, row.epoch) != row.epoch:
                raise Violation(f"{row.request_id}: block {block} is written twice in a step", row.request_id)

    def _check_conflicts(self, frame: "Frame", written_by: dict[int, int]) -> None:
        row = frame.row
        if row.message is not None:
            return
        for block in row.blocks[: -(-frame.start // self.block_size)]:
            if written_by.get(block, row.epoch) != row.epoch:
                raise Violation(f"{row.request_id}: reads block {block} while it is written", row.request_id)

    def _run_row(self, frame: "Frame") -> list[int]:
        """Compute, verify, sample, propose; the tokens to answer."""
        row = frame.row
        if row.message is not None:
            return []
        if self.rng.random() < self.faults.row_fails:
            row.message = f"row of epoch {row.epoch} failed"
            self._write(row, frame.start, [GARBAGE] * (frame.stop - frame.start))
            return []
        if not frame.reserved:
            self._compute(row, frame.stop)
            return []
        if frame.stop <= frame.start:  # the request's end was reached before this frame
            return []
        drafts = row.pending[: frame.num_verified]
        length = len(row.token_ids)
        self._compute(row, length)
        sampled, accepted = self._verify(row, drafts)
        self.num_accepted += accepted
        self.num_rejected += len(drafts) - accepted
        row.pending = self._propose(row, frame.propose)
        return sampled

    def _compute(self, row: ShadowRow, stop: int) -> None:
        """Write the KV of confirmed tokens up to `stop`."""
        start = len(row.kv)
        row.kv.extend([value ^ row.key for value in row.hashes[start:stop]])
        self._write(row, start, row.kv[start:stop])
        if self.drop_last_hit_block:
            self._write_draft(row, start)

    def _verify(self, row: ShadowRow, drafts: list[int]) -> tuple[list[int], int]:
        """Sample after each draft; confirmed are the longest prefix of drafts that were right and one more."""
        length = len(row.token_ids)
        prefix = row.hashes[-1]
        sampled = [row.sample(prefix, length)]
        written = []
        right = True
        for index, draft in enumerate(drafts):
            prefix = extend(prefix, draft)
            written.append(prefix ^ row.key)
            right = right and draft == sampled[-1]
            if right:
                sampled.append(row.sample(prefix, length + index + 1))
        accepted = len(sampled) - 1
        self._write(row, length, written)
        row.kv.extend(written[:accepted])
        for token in sampled:
            row.token_ids.append(token)
            row.hashes.append(extend(row.hashes[-1], token))
        if self.drop_last_hit_block:
            self._write_draft(row, length - 1)
        return sampled, accepted

    def _write(self, row: ShadowRow, start: int, values: list[int]) -> None:
        size = self.block_size
        for position, value in enumerate(values, start):
            self.shadow[row.blocks[position // size]][position % size] = value

    def _write_draft(self, row: ShadowRow, start: int) -> None:
        """The draft head follows the target: position p once the token at p + 1 is known."""
        size = self.block_size
        for position in range(max(start, 0), min(len(row.kv), len(row.hashes) - 1)):
            value = row.hashes[position + 1] ^ row.key
            self.draft_shadow[row.blocks[position // size]][position % size] = value

    def _propose(self, row: ShadowRow, num_propose: int) -> list[int]:
        """The true continuation, spoiled now and then; sometimes less of it than asked."""
        length = len(row.token_ids)
        num_propose = min(num_propose, row.end - length - 1)
        if num_propose <= 0:
            return []
        # A drafter with KV of its own writes its inputs: the last token and all drafts but the last.
        if length + num_propose - 2 >= len(row.blocks) * self.block_size:
            raise Violation(
                f"{row.request_id}: proposes {num_propose} drafts at length {length} with {len(row.blocks)} blocks",
                row.request_id,
            )
        rng = self.rng
        if rng.random() < self.faults.drafter_fails:
            num_propose = rng.randrange(num_propose)
            self.num_drafter_failures += 1
        prefix = row.hashes[-1]
        drafts = []
        for index in range(num_propose):
            draft = row.sample(prefix, length + index)
            if rng.random() < self.faults.drafts_spoiled:
                draft = (draft + 1) % VOCABULARY
            drafts.append(draft)
            prefix = extend(prefix, draft)
        return drafts


class Frame:
    """One row of a plan with its true numbers: it writes slots `[start, stop)`."""

    __slots__ = ("num_verified", "propose", "reserved", "row", "start", "stop")

    def __init__(self, row: ShadowRow, n: int, k: int, reserved: int, propose: int, max_drafts: int) -> None:
        self.row = row
        self.reserved = reserved
        self.propose = propose
        self.start = len(row.kv)
        length = len(row.token_ids)
        who = row.request_id
        if not reserved:
            self.num_verified = 0
            self.stop = self.start + n
            if self.stop >= length and row.message is None:
                raise Violation(f"{who}: a chunk of {n} at {self.start} reaches its length {length}", who)
            return
        if k > row.max_verify and row.message is None:
            raise Violation(f"{who}: verifies {k} drafts, the frame before proposed {row.max_verify}", who)
        if propose > max_drafts:
            raise Violation(f"{who}: asked for {propose} drafts, the drafter has {max_drafts}", who)
        row.max_verify = propose
        if length >= row.end:
            self.num_verified = 0
            self.stop = self.start
            return
        self.num_verified = min(len(row.pending), k, row.end - length - 1)
        self.stop = length + self.num_verified
        if self.stop - self.start > n and row.message is None:
            raise Violation(f"{who}: computes {self.stop - self.start} tokens, {n} were scheduled", who)
