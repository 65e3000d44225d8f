"""EAGLE-3 self-speculation: a one-layer head drafts from the target's own hidden states.

Li, Wei, Zhang, Zhang 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (arXiv 2503.01840). Pair p of a row is the hidden states at position p beside the
token at p + 1; its output predicts the token at p + 2 and stands in for the hidden states at p + 1, which
nobody knows yet when a second token is drafted. Pair p has slot p of the target's own block table in a KV
layer of the head's: no block is ever allocated for it. Knows nothing about plans or verification.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from scheduler.step import Int32Array
from worker.attention import CpuAttention, KVCache
from worker.batch import Batch
from worker.compiled_layers import PARTS, CompiledLayers, LayerParts
from worker.drafter import Drafter, VerifiedStep, draft_tokens
from worker.eagle3_checkpoint import HeadConfig, read_head
from worker.frames import Frame, gather_batch
from worker.hf_model import read_shared
from worker.linear import padded_rows
from worker.model import Model, attention_backend, fused
from worker.operators import RMSNorm, rotate, silu_mul
from worker.products import TileLinear, dense
from worker.rope import Rope
from worker.rows import RowState

NO_TOKEN: Final = -1


class Eagle3Head:
    """The head's network and its layer of KV, over the slots of the target's pool."""

    def __init__(self, config: HeadConfig, weights: Mapping[str, torch.Tensor], target: Model) -> None:
        """weights: as `worker.eagle3_checkpoint.read_head` gives them, shared ones included."""
        device, dtype, eps = target.device, target.dtype, config.rms_norm_eps
        weights = {name: tensor.to(device, dtype) for name, tensor in weights.items() if tensor.is_floating_point()}
        self.config, self.dtype = config, dtype
        self.kv_cache = KVCache(
            num_layers=1,
            num_blocks=target.kv_cache.num_blocks,
            block_size=target.kv_cache.block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=str(device),
        )
        backend = "cpu" if isinstance(target.attention, CpuAttention) else "triton"
        self.attention = attention_backend(backend, self.kv_cache, num_heads=config.num_heads)
        self.rope = Rope(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=target.max_model_len,
            device=str(device),
        )

        def norm(name: str) -> RMSNorm | None:
            weight = weights.get(f"{name}.weight")
            return None if weight is None else RMSNorm(weight, eps=eps, dtype=dtype)

        def needed(name: str) -> RMSNorm:
            found = norm(name)
            assert found is not None, name
            return found

        self._embedding = weights["embed_tokens.weight"]
        self._states_norm = norm("input_norm")
        self._state_norms = [needed(f"fc_norm.{i}") for i in range(config.num_states)] if config.fc_norm else []
        product = partial(fused, dense, weights)
        self._fc = product("fc")
        self._embedding_norm, self._hidden_norm = needed("layers.0.input_layernorm"), needed("layers.0.hidden_norm")
        self._qkv = product(*(f"layers.0.self_attn.{name}_proj" for name in "qkv"))
        self._query_norm, self._key_norm = norm("layers.0.self_attn.q_norm"), norm("layers.0.self_attn.k_norm")
        self._output = product("layers.0.self_attn.o_proj")
        self._mlp_norm = needed("layers.0.post_attention_layernorm")
        self._gate_up = product("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")
        self._down = product("layers.0.mlp.down_proj")
        self._norm, self._head = needed("norm"), product("lm_head")
        self._compiled = self._compile()
        self._pads_rows = any(
            linear.pads_rows for linear in (self._fc, self._qkv, self._output, self._gate_up, self._down, self._head)
        )

    def _compile(self) -> CompiledLayers | None:
        linears = dict(zip(PARTS, (self._qkv, self._output, self._gate_up, self._down), strict=True))
        tiles = {name: linear for name, linear in linears.items() if isinstance(linear, TileLinear)}
        if len(tiles) < len(linears) or not isinstance(self.attention, CpuAttention):
            return None
        norms = (self._query_norm, self._key_norm) if self._query_norm and self._key_norm else None
        layer = LayerParts(tiles, None, self._mlp_norm, norms)
        return CompiledLayers([layer], self.config, input_size=self._qkv.in_features)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [n, num_states * target_hidden_size] as what the layer reads: [n, hidden_size]."""
        if self._states_norm is not None:
            states = self._states_norm(states)
        if self._state_norms:
            parts = states.chunk(self.config.num_states, -1)
            states = torch.cat([norm(part) for norm, part in zip(self._state_norms, parts, strict=True)], -1)
        return self._fc(states)

    def forward(self, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        """One pair per token of the batch; [n, hidden_size] features of the next position. Writes the head's KV."""
        num_tokens = batch.token_ids.shape[0]
        positions, token_ids = batch.positions, batch.token_ids
        if self._pads_rows:
            padding = padded_rows(num_tokens) - num_tokens
            positions, token_ids = F.pad(positions, (0, padding)), F.pad(token_ids, (0, padding))
            features = F.pad(features, (0, 0, 0, padding))
        self.attention.prepare(batch)
        cos, sin = self.rope(positions)
        embedded = F.embedding(token_ids, self._embedding)
        normed = self._hidden_norm(features)
        residual = (normed if self.config.norm_before_residual else features).float()
        inputs = torch.cat((self._embedding_norm(embedded), normed), -1)
        if self._compiled is not None and isinstance(self.attention, CpuAttention):
            addend = torch.empty(features.shape, dtype=self.dtype)
            self._compiled.run(0, 1, residual, addend, cos, sin, self.attention, inputs)
            return residual.add_(addend)[:num_tokens].to(self.dtype)
        residual = residual + self._output(self._attend(self._qkv(inputs), cos, sin, batch))
        residual = residual + self._down(silu_mul(self._gate_up(self._mlp_norm(residual))))
        return residual[:num_tokens].to(self.dtype)

    def _attend(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows, num_tokens, config = len(qkv), batch.token_ids.shape[0], self.config
        # What is not finite must not stay in a slot: a masked 0 * NaN would poison the block's next owner.
        heads = qkv.nan_to_num_().view(rows, -1, config.head_dim)
        query, key, value = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm.on_heads(query), self._key_norm.on_heads(key)
        query, key = rotate(query, cos, sin)[:num_tokens], rotate(key, cos, sin)[:num_tokens]
        out = self.attention(query, key, value[:num_tokens], 0, batch).reshape(num_tokens, -1)
        return F.pad(out, (0, 0, 0, rows - num_tokens))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[n, draft_vocab_size] float32 of what `forward` gave."""
        return self._head(self._norm(features)).float()

    def next_features(self, features: torch.Tensor) -> torch.Tensor:
        """What stands in for the hidden states of the next position."""
        return self._norm(features) if self.config.norm_output else features


@dataclass(slots=True, eq=False)
class Waiting:
    """Verified positions of one row whose pairs are not in the head's KV yet."""

    row: RowState
    start: int  # the first of them; past `stop`: the head has not seen the tokens before it
    stop: int
    first_block: int  # of the row's blocks: from here on the head's layer has no gap
    states: list[torch.Tensor] = field(default_factory=list)  # [stop - start] rows in all


class Eagle3Drafter(Drafter):
    """Drafts with a head. Its KV at verified positions comes from true hidden states only.

    Pairs are computed when the row drafts, or when a block of it is full: a block that others may find in the
    prefix cache is whole in the head's layer too. Its last pair is made with the token after the block: a row that goes
    on with another one makes it anew before it drafts, from the states kept for that (of rows in one step that share a
    block and go on differently, the last one's pair counts for all).
    In steps whose states nobody kept, blocks stay without pairs. A row drafts from what follows its last such block,
    at true positions: keys and values of one layer depend on their own pair only, so those that are there are right.
    """

    def __init__(self, head: Eagle3Head, *, max_drafts: int, max_model_len: int | None = None) -> None:
        """max_model_len: no drafts at or past this position."""
        self._limit_drafts(max_drafts, max_model_len)
        self.state_layers = head.config.state_layers
        self._head = head
        self._block_size = head.kv_cache.block_size
        self._waiting: dict[int, Waiting] = {}  # by epoch
        self._due: dict[int, None] = {}  # epochs whose pairs must not wait any longer
        # By block: the token that its last pair was made with; NO_TOKEN where pairs are missing.
        self._token_after: Int32Array = np.full(head.kv_cache.num_blocks, NO_TOKEN, np.int32)
        self._last_states: dict[int, torch.Tensor] = {}  # by block, of its last position: [num_states * hidden_size]

    def begin_session(self) -> None:
        """Forget every row."""
        self._waiting.clear()
        self._due.clear()
        self._token_after[:] = NO_TOKEN
        self._last_states.clear()

    def forget(self, epoch: int) -> None:
        """An epoch has left this worker."""
        self._waiting.pop(epoch, None)
        self._due.pop(epoch, None)

    def observe(self, step: VerifiedStep) -> None:
        """Keep the true hidden states of every position that was verified, if the step has them."""
        has_states = step.states.shape[1] > 0
        first = 0
        for frame in step.frames:
            row, start = frame.row, first
            first += frame.stop - frame.start
            if row.failure is not None:
                self.forget(row.epoch)
                continue
            waiting = self._waiting.get(row.epoch)
            if waiting is None:
                waiting = Waiting(row, frame.start, frame.start, self._first_block(row, frame.start))
                self._waiting[row.epoch] = waiting
            assert waiting.stop == frame.start, f"states of {waiting.stop}, then of {frame.start}"
            waiting.stop = row.num_computed_tokens
            size = self._block_size
            self._token_after[row.block_ids[frame.start // size : -(-waiting.stop // size)]] = NO_TOKEN
            if not has_states:
                self._miss(waiting)
                continue
            unseen = max(waiting.start - frame.start, 0)
            waiting.states.append(step.states[start + unseen : start + waiting.stop - frame.start])
            if waiting.start // size < waiting.stop // size:
                self._due[row.epoch] = None

    def _first_block(self, row: RowState, num_tokens: int) -> int:
        """Of a row that arrives with so many tokens in the prefix cache."""
        first = num_tokens // self._block_size
        gaps = np.flatnonzero(self._token_after[row.block_ids[:first]] == NO_TOKEN)
        return int(gaps[-1]) + 1 if len(gaps) else 0

    def _miss(self, waiting: Waiting) -> None:
        """The row goes on from its next block."""
        self._due.pop(waiting.row.epoch, None)
        waiting.states.clear()
        waiting.first_block = -(-waiting.stop // self._block_size)
        waiting.start = waiting.first_block * self._block_size

    @torch.inference_mode()
    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        """Per row at most `num_propose` tokens."""
        drafts: list[list[int]] = [[] for _ in rows]
        limits = [self._limit(row, wanted) for row, wanted in zip(rows, num_propose, strict=True)]
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        writing = [self._waiting[rows[index].epoch] for index in drafting]
        epochs = {waiting.row.epoch for waiting in writing}
        writing += [self._waiting[epoch] for epoch in self._due if epoch not in epochs]
        self._due.clear()
        if not writing:
            return drafts
        features = self._write(writing, len(drafting))
        step = 0
        while drafting:
            asked = [rows[index] for index in drafting]
            positions = [row.num_tokens + step for row in asked]
            logits = self._head.logits(features)
            sampled = draft_tokens(asked, logits, positions, self._head.config.token_ids)
            verdicts = self._verdicts(asked, logits)
            kept = []
            for place, (index, token_id, (keep, go_on)) in enumerate(zip(drafting, sampled, verdicts, strict=True)):
                if token_id >= 0 and keep:
                    drafts[index].append(token_id)
                    if go_on and len(drafts[index]) < limits[index]:
                        kept.append(place)
            drafting = [drafting[place] for place in kept]
            step += 1
            if drafting:
                pairs = [(rows[index], drafts[index][-1]) for index in drafting]
                features = self._head.next_features(features[kept])
                features = self._head.forward(features, self._step_batch(pairs, step))
        return drafts

    def _limit(self, row: RowState, wanted: int) -> int:
        """Drafts for a row: the last one but one is fed to the head and needs a slot."""
        waiting = self._waiting[row.epoch]
        if waiting.start >= waiting.stop:
            return 0
        return min(self._most_drafts(row.num_tokens, wanted), row.num_blocks * self._block_size - row.num_tokens + 2)

    def _write(self, writing: Sequence[Waiting], num_drafting: int) -> torch.Tensor:
        """Write the pairs that waited; [num_drafting, hidden_size] of the last pair of each of the first rows."""
        drafting = writing[:num_drafting]
        foreign = [(waiting, index) for waiting in drafting for index in self._foreign_blocks(waiting)]
        frames = [_frame(waiting.row, waiting.start, waiting.stop, samples=True) for waiting in writing]
        states = [part for waiting in writing for part in waiting.states]
        for waiting, index in foreign:
            end = (index + 1) * self._block_size
            frames.append(_frame(waiting.row, end - 1, end, samples=False))
            states.append(self._last_states[int(waiting.row.block_ids[index])][None])
        batch = gather_batch(frames, writing[0].row.table, self._head.kv_cache.key.device, ahead=1)
        batch = self._without_gaps(batch, [*writing, *(waiting for waiting, _ in foreign)])
        out = self._head.forward(self._head.features(torch.cat(states)), batch)
        for waiting, index in foreign:
            self._mark(waiting.row, index)
        for waiting in writing:
            self._mark_whole(waiting)
        return out.index_select(0, batch.logits_indices)[:num_drafting]

    def _foreign_blocks(self, waiting: Waiting) -> list[int]:
        """Of those before what waits: blocks whose last pair was made for a row that goes on with another token."""
        row, size, first, end = waiting.row, self._block_size, waiting.first_block, waiting.start // self._block_size
        if first >= end:
            return []
        tokens_after = row.token_ids[size * (first + 1) :: size][: end - first]
        found: list[int] = np.flatnonzero(self._token_after[row.block_ids[first:end]] != tokens_after).tolist()
        return [first + index for index in found]

    def _mark_whole(self, waiting: Waiting) -> None:
        """All that waited is written."""
        size, start = self._block_size, waiting.start
        whole = range(start // size, waiting.stop // size)
        if whole:
            states = torch.cat(waiting.states)
            for index in whole:
                last = (index + 1) * size - 1
                self._last_states[int(waiting.row.block_ids[index])] = states[last - start].clone()
                self._mark(waiting.row, index)
        waiting.start = waiting.stop
        waiting.states.clear()

    def _mark(self, row: RowState, index: int) -> None:
        """The last pair of a row's block is made with the row's next token."""
        self._token_after[row.block_ids[index]] = row.token_ids[(index + 1) * self._block_size]

    def _step_batch(self, pairs: Sequence[tuple[RowState, int]], step: int) -> Batch:
        """One more pair for each row, with the draft that stands `step - 1` past its last confirmed token."""
        device, size, table = self._head.kv_cache.key.device, self._block_size, pairs[0][0].table
        index = np.array([row.row for row, _ in pairs], np.int64)
        positions = np.array([row.num_tokens - 2 + step for row, _ in pairs], np.int64)
        num_blocks = positions // size + 1
        columns = np.arange(num_blocks.max())
        blocks = np.where(columns < num_blocks[:, None], table.block_table[index, : len(columns)], np.int32(0))
        slots = table.block_table[index, positions // size].astype(np.int64) * size + positions % size
        batch = Batch(
            token_ids=torch.tensor([token_id for _, token_id in pairs], dtype=torch.int64, device=device),
            positions=torch.from_numpy(positions).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            cu_seqlens_q=torch.arange(len(pairs) + 1, dtype=torch.int32, device=device),
            seq_lens=torch.from_numpy((positions + 1).astype(np.int32)).to(device),
            block_table=torch.from_numpy(blocks).to(device),
            logits_indices=torch.arange(len(pairs), device=device),
        )
        return self._without_gaps(batch, [self._waiting[row.epoch] for row, _ in pairs])

    def _without_gaps(self, batch: Batch, of: Sequence[Waiting]) -> Batch:
        """The batch of these rows, attending from their first blocks on."""
        if not any(waiting.first_block for waiting in of):
            return batch
        first = torch.tensor([waiting.first_block for waiting in of], dtype=torch.int32, device=batch.seq_lens.device)
        width = batch.block_table.shape[1]
        columns = (first[:, None] + torch.arange(width, device=first.device)).clamp(max=width - 1)
        return replace(
            batch,
            seq_lens=batch.seq_lens - first * self._block_size,
            block_table=batch.block_table.gather(1, columns),
        )


def _frame(row: RowState, start: int, stop: int, *, samples: bool) -> Frame:
    return Frame(index=0, row=row, start=start, stop=stop, draft_token_ids=[], samples=samples, num_propose=0)


def load_head(directory: Path, target: Model, target_directory: Path) -> Eagle3Head:
    """A head for a loaded target. ValueError names the file, tensor or setting that is wrong."""
    shared = read_shared(target_directory, target.config) | {"embed_tokens.weight": target.embedding}
    config, weights = read_head(directory, target.config, shared)
    return Eagle3Head(config, weights, target)
