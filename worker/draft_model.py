"""An independent smaller model as drafter, with a KV cache group of its own: own shape, own pool, own block tables.

Its tokens, tables and positions are rows of a second RowTable, so batches and the sanitizer work on both groups
alike. Losing its KV costs speed only: a row without it drafts nothing, catches up and drafts again. No block of
the target is ever taken. Knows nothing about plans or verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.drafter import Drafter, draft_tokens
from worker.frames import Frame, gather_batch
from worker.model import Model
from worker.rows import RowState, RowTable
from worker.sanitizer import KVSanitizer

RETENTIONS = ("request", "step")
CATCH_UP_TOKENS = 512  # of one step, all rows together: a long prompt must not hold up everyone's tokens


@dataclass(slots=True, eq=False)
class Seat:
    """One row's place in the draft model's KV. `shadow` counts as confirmed what was so when it last drafted."""

    row: RowState
    shadow: RowState  # in the draft group; its computed tokens end with drafts that may have been rejected
    limit: int = 0  # drafts wanted in this step
    last_used: int = 0  # step


class DraftModelDrafter(Drafter):
    """Drafts with another model of the same vocabulary."""

    def __init__(
        self,
        model: Model,
        *,
        max_drafts: int,
        max_num_seqs: int,
        vocab_size: int,
        retention: str = "request",
        window: int = 128,
        max_model_len: int | None = None,
        sanitizer: KVSanitizer | None = None,
    ) -> None:
        """model: over a pool of its own. vocab_size: of the target. window: last tokens seen under retention "step".

        max_model_len: no drafts at or past this position; at most the model's own. sanitizer: of its pool.
        """
        if retention not in RETENTIONS:
            raise ValueError(f"draft_kv_retention {retention!r} is unknown; known: {', '.join(RETENTIONS)}")
        if model.config.vocab_size < vocab_size:
            raise ValueError(
                f"the draft model has {model.config.vocab_size} tokens, its target {vocab_size}: another tokenizer"
            )
        if retention == "step" and window + max_drafts > model.max_model_len:
            raise ValueError(f"a window of {window} tokens is beyond the draft model's {model.max_model_len}")
        self._limit_drafts(max_drafts, max_model_len)
        self.model = model
        self._vocab_size = vocab_size
        self._window = window if retention == "step" else None
        if self._window is None:
            self._max_model_len = min(max_model_len or model.max_model_len, model.max_model_len)
        self._sanitizer = sanitizer
        self._block_size = model.kv_cache.block_size
        self._table = RowTable(max_num_seqs, self._block_size)
        self._free = list(range(model.kv_cache.num_blocks))
        self._seats: dict[int, Seat] = {}  # by epoch
        self._step = 0
        self.num_evictions = 0

    @property
    def num_free_blocks(self) -> int:
        """Of its pool."""
        return len(self._free)

    def begin_session(self) -> None:
        """Forget every row."""
        for epoch in list(self._seats):
            self.forget(epoch)
        if self._sanitizer is not None:
            self._sanitizer.reset()

    def forget(self, epoch: int) -> None:
        """An epoch has left this worker, or loses its draft KV."""
        seat = self._seats.pop(epoch, None)
        if seat is not None:
            self._free += seat.shadow.block_ids.tolist()
        if self._sanitizer is not None:
            self._sanitizer.forget(epoch)

    @torch.inference_mode()
    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        """Per row at most `num_propose` tokens; none while its KV is missing."""
        self._step += 1
        drafts: dict[int, list[int]] = {row.epoch: [] for row in rows}
        seats: list[Seat] = []
        for row, wanted in zip(rows, num_propose, strict=True):
            limit = self._most_drafts(row.num_tokens, wanted)
            if limit > 0:
                seats.append(self._seated(row, limit))
            elif self._max_model_len is not None and row.num_tokens >= self._max_model_len:
                self.forget(row.epoch)  # it never drafts again
        frames = self._catch_up(seats)
        step = 0
        while frames:
            frames = self._draft(frames, drafts, step)
            step += 1
        if self._window is not None:
            for seat in seats:
                self.forget(seat.row.epoch)
        return [drafts[row.epoch] for row in rows]

    # ---- its rows ----

    def _seated(self, row: RowState, limit: int) -> Seat:
        """The row's seat, told its confirmed tokens: KV of drafts that came true is kept."""
        self._table.hold(row.end)
        seat = self._seats.get(row.epoch)
        if seat is None:
            seat = self._seats[row.epoch] = Seat(row, _shadow(row, self._table))
        seat.limit, seat.last_used = limit, self._step
        shadow, seen = seat.shadow, row.token_ids[-self._window :] if self._window else row.token_ids
        # Drafts past what was accepted are not looked at: they may be there, and the row shorter.
        known, computed = shadow.num_tokens, min(shadow.num_computed_tokens, len(seen))
        mine = self._table.token_ids[row.row]
        wrong = np.flatnonzero(mine[known:computed] != seen[known:computed])
        if len(wrong):
            computed = known + int(wrong[0])
        mine[known : len(seen)] = seen[known:]
        shadow.num_tokens = len(seen)
        # The last token is always computed: its logits are the first draft's.
        shadow.num_computed_tokens = min(computed, len(seen) - 1)
        return seat

    def _catch_up(self, seats: Sequence[Seat]) -> list[Frame]:
        """What each row must compute before it can draft, as far as tokens and blocks go."""
        frames: list[Frame] = []
        room = CATCH_UP_TOKENS
        for seat in seats:
            shadow = seat.shadow
            stop = min(shadow.num_tokens, shadow.num_computed_tokens + room)
            samples = stop == shadow.num_tokens
            if stop == shadow.num_computed_tokens:
                continue
            if not self._take_blocks(shadow, stop + seat.limit - 1 if samples else stop):
                self.forget(shadow.epoch)  # holding on to too few would keep others from drafting as well
                continue
            room -= stop - shadow.num_computed_tokens
            frames.append(_frame(seat, stop, samples=samples))
        return frames

    def _take_blocks(self, shadow: RowState, num_tokens: int) -> bool:
        """Blocks for so many tokens, from rows that do not draft in this step if need be, the longest idle first."""
        missing = -(-num_tokens // self._block_size) - shadow.num_blocks
        if missing <= 0:
            return True
        idle = [seat for seat in self._seats.values() if seat.last_used < self._step]
        idle.sort(key=lambda seat: seat.last_used, reverse=True)
        if missing > len(self._free) + sum(seat.shadow.num_blocks for seat in idle):
            return False
        while missing > len(self._free):
            self.forget(idle.pop().row.epoch)
            self.num_evictions += 1
        blocks, self._free = self._free[:missing], self._free[missing:]
        shadow.append_blocks(np.array(blocks, np.int32))
        return True

    # ---- one forward ----

    def _draft(self, frames: list[Frame], drafts: dict[int, list[int]], step: int) -> list[Frame]:
        """Compute the frames and sample a draft for each that is caught up; the frames that come next."""
        logits = self._forward(frames)
        drafting = [self._seats[frame.row.epoch] for frame in frames if frame.samples]
        if logits is None or not drafting:
            return []
        rows = [seat.row for seat in drafting]
        positions = [row.num_tokens + step for row in rows]
        following: list[Frame] = []
        sampled, verdicts = draft_tokens(rows, logits, positions, None), self._verdicts(rows, logits)
        for seat, token_id, (keep, go_on) in zip(drafting, sampled, verdicts, strict=True):
            mine = drafts[seat.row.epoch]
            if token_id < 0 or not keep:
                continue
            mine.append(token_id)
            if go_on and len(mine) < seat.limit:
                position = seat.shadow.num_tokens + step
                self._table.token_ids[seat.shadow.row, position] = token_id
                following.append(_frame(seat, position + 1, samples=True))
        return following

    def _forward(self, frames: Sequence[Frame]) -> torch.Tensor | None:
        """[num_samples, vocab_size] float32, or None: its numbers are no good and nothing of them is kept."""
        sanitizer = self._sanitizer
        if sanitizer is not None:
            for frame in frames:
                sanitizer.write(frame.row, frame.stop)
            for frame in frames:
                sanitizer.check(frame.row, frame.stop)
        batch = gather_batch(frames, self._table, self.model.device)
        hidden = self.model.forward(batch)
        if not bool(torch.isfinite(hidden.sum(dtype=torch.float32))):
            # A masked 0 * NaN would poison whoever gets these blocks next.
            for pool in (self.model.kv_cache.key, self.model.kv_cache.value):
                pool.flatten(1, 2)[:, batch.slot_mapping] = 0
            for frame in frames:
                if sanitizer is not None:
                    sanitizer.unwrite(frame.row, frame.stop)
                self.forget(frame.row.epoch)
            return None
        for frame in frames:
            frame.row.num_computed_tokens = frame.stop
        if not len(batch.logits_indices):
            return hidden[:0]
        return self.model.logits(hidden.index_select(0, batch.logits_indices))[:, : self._vocab_size]


def _shadow(row: RowState, table: RowTable) -> RowState:
    """The row as the draft group sees it, before it has seen anything."""
    return RowState(
        table=table,
        row=row.row,
        epoch=row.epoch,
        request_id=row.request_id,
        end=row.end,
        namespace=row.namespace,
        num_prompt_tokens=row.num_prompt_tokens,
        num_tokens=0,
        num_computed_tokens=0,
        sampler=row.sampler,
    )


def _frame(seat: Seat, stop: int, *, samples: bool) -> Frame:
    """Compute the row's tokens up to `stop`."""
    return Frame(
        index=0,
        row=seat.shadow,
        start=seat.shadow.num_computed_tokens,
        stop=stop,
        draft_token_ids=[],
        samples=samples,
        num_propose=0,
    )
