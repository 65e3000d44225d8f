"""Paged attention: the KV pool, what a backend must do, and the CPU backend.

On the CPU a row's output is bitwise the same in any company: keys are cut at fixed positions into tiles
of `KEY_TILE`, every product has that one key count, query rows come in multiples of a probed unit, and a
row's partial results are added in the order of its positions. A tile that a row may not see has weight
exactly 0, so the longer context of another row changes nothing. Knows nothing about requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from worker.batch import Batch

KEY_TILE = 128  # keys of one product; shorter wastes calls on long contexts, longer wastes padding on short ones
MASKED = -1e30  # finite: a tile with nothing to see then averages garbage, and is weighed with exp(-1e30) = 0
SHORT_TOKENS = 16  # rows of at most so many new tokens are attended together
LONG_TOKENS = 128  # a longer chunk is cut so, that its early tokens skip the late tiles
LONG_SCORES = 1 << 23  # floats of one segment's mask; bounds a segment's memory in long contexts
LONG_ROW = 1 << 14  # elements of a segment above which its tiles are added by one operator each
ROW_UNITS = (1, 4, 8, 16, 32)
LARGE = 4096.0  # of a probe's values that cancel
UNPACKED_ROWS = 32  # well below the 64 from which the operator may pack keys
PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 20, 24, 28, 31, 32, 33, 40, 48, 63, 64, 65, 96, 128, 160, 192, 200,
              256, 288, 384, 512, 768, 800, 1024)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """Which query row counts of one product keep every row's bits, found by trying."""

    unit: int  # rows come in multiples of it
    max_rows: int  # and at most so many
    exact: bool  # False: no rule was found


# (KV heads, head size, dtype, most rows, threads) -> rule; every model of one shape shares it
_PROBED: dict[tuple[int, int, torch.dtype, int, int], RowRule] = {}


class KVCache:
    """The paged KV pool of all layers, zeroed once (a masked 0 * NaN would poison outputs)."""

    key: torch.Tensor  # [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    value: torch.Tensor  # same shape

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.key = torch.zeros(shape, dtype=dtype, device=device)
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size


class AttentionBackend(Protocol):
    """Stores keys and values into their slots, then attends causally over the block tables."""

    @property
    def fingerprint(self) -> str:
        """What decides this backend's numbers, in words."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Index tensors of one step, made once before its layers."""
        ...

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], after RoPE
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        layer: int,
        batch: Batch,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Attention of one layer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """Token ranges of the batch that are attended by one call: S of them, M tokens and their tiles each.

    Shorter ranges are padded with their last token. Tiles of one segment are adjacent, in key order.
    """

    tokens: torch.Tensor | slice  # [S * M] int64 into the batch, or a slice of it in order
    num_segments: int  # S
    num_tokens: int  # M
    blocks: torch.Tensor | None  # [num_tiles * blocks per tile] int64; None: the first tiles of the call before
    num_tiles: int  # T, of all segments
    segment_of_tile: torch.Tensor  # [T] int64
    tiles_of_segment: torch.Tensor  # [S] int64
    is_split: bool  # some segment has more than one tile
    masks: dict[int | None, torch.Tensor]  # sliding window -> [T, 1, rows, KEY_TILE] float32, 0 or MASKED


class CpuAttention:
    """The row-invariant `AttentionBackend` on CPU tensors, of PyTorch's own operators."""

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        num_heads: int,
        scale: float | None = None,
        windows: Sequence[int | None] | None = None,  # [num_layers] sliding window of each layer
    ) -> None:
        num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.key.shape
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if KEY_TILE % block_size:
            raise ValueError(f"attention cpu: block size {block_size} does not divide {KEY_TILE}")
        self.kv_cache = kv_cache
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self.windows = tuple(windows) if windows else (None,) * num_layers
        most_rows = min(LONG_TOKENS * self.group, PROBE_ROWS[-1])
        shape = (num_kv_heads, head_dim, kv_cache.key.dtype, most_rows, torch.get_num_threads())
        if shape not in _PROBED:
            _PROBED[shape] = _probe_rows(*shape[:4])
        self.rule = _PROBED[shape]
        self._long_tokens = max(self.rule.max_rows // self.group, 1)
        self._short_tokens = min(SHORT_TOKENS, self._long_tokens)
        self._blocks_per_tile = KEY_TILE // block_size
        # Views made once: indexing a pool costs microseconds, a step has hundreds of them.
        self._slots = [
            (key.flatten(0, 1).flatten(1), value.flatten(0, 1).flatten(1))
            for key, value in zip(kv_cache.key, kv_cache.value, strict=True)
        ]
        self._pages = [
            (key.flatten(1), value.flatten(1)) for key, value in zip(kv_cache.key, kv_cache.value, strict=True)
        ]
        self._key_scratch = torch.empty(0, dtype=kv_cache.key.dtype)
        self._value_scratch = torch.empty(0, dtype=kv_cache.key.dtype)
        self._plan: list[_Segments] = []

    @property
    def fingerprint(self) -> str:
        """What decides this backend's numbers, in words."""
        return f"cpu tile={KEY_TILE} unit={self.rule.unit} rows={self.rule.max_rows}"

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits are the same in any company."""
        return self.rule.exact and self._padded(self.group) <= self.rule.max_rows

    def prepare(self, batch: Batch) -> None:
        """Cut the step into segments: short rows together by size, each longer chunk by itself."""
        seq_lens = batch.seq_lens.tolist()
        bounds = batch.cu_seqlens_q.tolist()
        counts = [stop - start for start, stop in pairwise(bounds)]
        width = -(-max(seq_lens, default=0) // KEY_TILE) * self._blocks_per_tile
        table = batch.block_table[:, :width].long()
        table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
        self._plan = []
        for low, high in ((0, 1), (1, SHORT_TOKENS // 2), (SHORT_TOKENS // 2, SHORT_TOKENS)):
            reqs = [i for i, count in enumerate(counts) if low < count <= min(high, self._short_tokens)]
            if reqs:
                self._plan.append(self._short(batch, table, reqs, bounds, counts, seq_lens))
        for i, count in enumerate(counts):
            if count > self._short_tokens:
                self._plan += self._long(table[i], bounds[i], count, seq_lens[i])
        most_tiles = max((segments.num_tiles for segments in self._plan), default=0)
        self._reserve(most_tiles * KEY_TILE * self.num_kv_heads * self.head_dim)

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], after RoPE
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        layer: int,
        batch: Batch,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Store this step's keys and values, then attend over the block tables."""
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, batch.slot_mapping, key.flatten(1))
        value_slots.index_copy_(0, batch.slot_mapping, value.flatten(1))
        if len(self._plan) == 1 and isinstance(self._plan[0].tokens, slice):
            return self._attend(self._plan[0], query, layer)
        out = torch.empty_like(query)
        for segments in self._plan:
            attended = self._attend(segments, query, layer)
            if isinstance(segments.tokens, slice):
                out[segments.tokens] = attended
            else:
                out.index_copy_(0, segments.tokens, attended)
        return out

    # ---- one step's plan ----

    def _short(
        self,
        batch: Batch,
        table: torch.Tensor,
        reqs: list[int],
        bounds: list[int],
        counts: list[int],
        seq_lens: list[int],
    ) -> _Segments:
        """Requests of few new tokens each, side by side."""
        rows = torch.tensor(reqs)
        num_tokens = max(counts[i] for i in reqs)
        starts = torch.tensor([bounds[i] for i in reqs])
        lasts = torch.tensor([counts[i] - 1 for i in reqs])
        tokens = starts[:, None] + torch.minimum(torch.arange(num_tokens), lasts[:, None])
        in_order = len(reqs) == len(counts) and bounds[-1] == tokens.numel()
        num_tiles = torch.tensor([-(-seq_lens[i] // KEY_TILE) for i in reqs])
        segment_of_tile = torch.repeat_interleave(num_tiles)
        tile = torch.arange(len(segment_of_tile)) - (num_tiles.cumsum(0) - num_tiles)[segment_of_tile]
        pages = tile[:, None] * self._blocks_per_tile + torch.arange(self._blocks_per_tile)
        return _Segments(
            tokens=slice(0, bounds[-1]) if in_order else tokens.flatten(),
            num_segments=len(reqs),
            num_tokens=num_tokens,
            blocks=table[rows[segment_of_tile, None], pages].flatten(),
            num_tiles=len(segment_of_tile),
            segment_of_tile=segment_of_tile,
            tiles_of_segment=num_tiles,
            is_split=int(num_tiles.max()) > 1,
            masks=self._masks(batch.positions[tokens][segment_of_tile], tile),
        )

    def _long(self, blocks: torch.Tensor, start: int, count: int, seq_len: int) -> list[_Segments]:
        """One request's chunk as segments that share one gather of its keys."""
        most_tiles = -(-seq_len // KEY_TILE)
        affordable = LONG_SCORES // (most_tiles * KEY_TILE * self.group)
        length = max(min(self._long_tokens, affordable), self._short_tokens)
        plan: list[_Segments] = []
        # The last segment sees the most tiles: it comes first and gathers for all.
        for first in reversed(range(0, count, length)):
            last = min(first + length, count)
            positions = torch.arange(seq_len - count + first, seq_len - count + last)
            num_tiles = -(-(seq_len - count + last) // KEY_TILE)
            plan.append(
                _Segments(
                    tokens=slice(start + first, start + last),
                    num_segments=1,
                    num_tokens=last - first,
                    blocks=None if plan else blocks[: num_tiles * self._blocks_per_tile],
                    num_tiles=num_tiles,
                    segment_of_tile=torch.zeros(num_tiles, dtype=torch.int64),
                    tiles_of_segment=torch.tensor([num_tiles]),
                    is_split=num_tiles > 1,
                    masks=self._masks(positions.expand(num_tiles, -1), torch.arange(num_tiles)),
                )
            )
        return plan

    def _masks(self, positions: torch.Tensor, tile: torch.Tensor) -> dict[int | None, torch.Tensor]:
        """positions: [T, M] of the queries of each tile; tile: [T] index of its keys."""
        keys = (tile[:, None] * KEY_TILE + torch.arange(KEY_TILE))[:, None, :]
        queries = positions[:, :, None]
        masks: dict[int | None, torch.Tensor] = {}
        for window in set(self.windows):
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)
            mask = mask.repeat_interleave(self.group, dim=1)
            padding = self._padded(mask.shape[1]) - mask.shape[1]
            masks[window] = torch.nn.functional.pad(mask, (0, 0, 0, padding))[:, None]
        return masks

    def _padded(self, rows: int) -> int:
        return -(-rows // self.rule.unit) * self.rule.unit

    def _reserve(self, size: int) -> None:
        """Scratch for the gathered keys and values: fresh large buffers would cost more than the gather."""
        if self._key_scratch.numel() < size:
            self._key_scratch = torch.empty(size, dtype=self._key_scratch.dtype)
            self._value_scratch = torch.empty(size, dtype=self._value_scratch.dtype)

    # ---- one layer ----

    def _attend(self, segments: _Segments, query: torch.Tensor, layer: int) -> torch.Tensor:
        """[S * M, num_heads, head_dim] in the order of the segments' tokens."""
        keys, values = self._gather(segments, layer)
        part, logsumexp = _attend_tiles(
            self._fold(segments, query), keys, values, segments.masks[self.windows[layer]], self.scale
        )
        # [T, rows, num_kv_heads, head_dim], as the operator lays it out
        part, logsumexp = part.transpose(1, 2), logsumexp.transpose(1, 2)
        if segments.is_split:
            part = _combine(part, logsumexp, segments)
        return self._unfold(segments, part)

    def _gather(self, segments: _Segments, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tiles, [T, num_kv_heads, KEY_TILE, head_dim] each."""
        shape = (segments.num_tiles, KEY_TILE, self.num_kv_heads, self.head_dim)
        size = segments.num_tiles * KEY_TILE * self.num_kv_heads * self.head_dim
        keys, values = self._key_scratch[:size], self._value_scratch[:size]
        if segments.blocks is not None:
            key_pages, value_pages = self._pages[layer]
            by_page = (len(segments.blocks), key_pages.shape[1])
            # Whole blocks by index_select: indexing slot by slot is several times slower.
            torch.index_select(key_pages, 0, segments.blocks, out=keys.view(by_page))
            torch.index_select(value_pages, 0, segments.blocks, out=values.view(by_page))
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def _fold(self, segments: _Segments, query: torch.Tensor) -> torch.Tensor:
        """[T, num_kv_heads, rows, head_dim]: the heads that share a KV head become query rows."""
        num_segments, num_tokens = segments.num_segments, segments.num_tokens
        tokens = segments.tokens
        query = query[tokens] if isinstance(tokens, slice) else query.index_select(0, tokens)
        query = query.reshape(num_segments, num_tokens, self.num_kv_heads, self.group, self.head_dim)
        query = query.transpose(1, 2).reshape(num_segments, self.num_kv_heads, -1, self.head_dim)
        if padding := self._padded(query.shape[2]) - query.shape[2]:
            query = torch.nn.functional.pad(query, (0, 0, 0, padding))
        if num_segments == segments.num_tiles:
            return query
        if num_segments == 1:
            return query.expand(segments.num_tiles, -1, -1, -1)
        return query.index_select(0, segments.segment_of_tile)

    def _unfold(self, segments: _Segments, out: torch.Tensor) -> torch.Tensor:
        """[S, rows, num_kv_heads, head_dim] to [S * M, num_heads, head_dim]."""
        out = out[:, : segments.num_tokens * self.group]
        out = out.unflatten(1, (segments.num_tokens, self.group)).transpose(2, 3)
        return out.reshape(-1, self.num_heads, self.head_dim)


def _attend_tiles(
    query: torch.Tensor,  # [T, num_kv_heads, rows, head_dim]
    keys: torch.Tensor,  # [T, num_kv_heads, KEY_TILE, head_dim]
    values: torch.Tensor,  # same
    mask: torch.Tensor,  # [T, 1, rows, KEY_TILE] float32
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within each tile [T, num_kv_heads, rows, head_dim], and its float32 log-sum-exp without the last."""
    part, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return part, logsumexp


def _combine(part: torch.Tensor, logsumexp: torch.Tensor, segments: _Segments) -> torch.Tensor:
    """Weigh and add each segment's tiles, [S, rows, num_kv_heads, head_dim].

    A row's tiles are added in their order, so zeros after its last one change nothing, and a lone tile comes
    through as it is. Products and sums apart: a fused one rounds differently in a vector's tail.
    """
    num_tiles, rows, num_kv_heads, _ = part.shape
    segment_of_tile, lengths = segments.segment_of_tile, segments.tiles_of_segment
    weights = logsumexp.reshape(num_tiles, -1)
    highest = torch.segment_reduce(weights, "max", lengths=lengths, axis=0, unsafe=True)
    weights = torch.exp(weights - highest.index_select(0, segment_of_tile))
    total = torch.segment_reduce(weights, "sum", lengths=lengths, axis=0, unsafe=True)
    weights = weights / total.index_select(0, segment_of_tile)
    weighed = part * weights.view(num_tiles, rows, num_kv_heads, 1)
    return _add_tiles(weighed, segments).to(part.dtype)


def _add_tiles(weighed: torch.Tensor, segments: _Segments) -> torch.Tensor:
    """[T, ...] float32 to [S, ...]: the sum of each segment's tiles, one after the other."""
    if segments.num_segments == 1 and weighed[0].numel() > LONG_ROW:
        # The same sums in the same order as segment_reduce, which takes three times as long for large rows.
        out = torch.zeros_like(weighed[0])
        for tile in weighed:
            out.add_(tile)
        return out[None]
    out = torch.segment_reduce(
        weighed.reshape(len(weighed), -1), "sum", lengths=segments.tiles_of_segment, axis=0, unsafe=True
    )
    return out.view(-1, *weighed.shape[1:])


def _probe_rows(num_kv_heads: int, head_dim: int, dtype: torch.dtype, max_rows: int) -> RowRule:
    """The rule with the most rows and then the least unit under which every row keeps its bits.

    Above 63 rows the operator may pack the keys, and for some head sizes that rounds differently.
    """
    probe = _Probe(num_kv_heads, head_dim, dtype, max_rows)
    for limit in dict.fromkeys((max_rows, min(max_rows, UNPACKED_ROWS))):
        for unit in ROW_UNITS:
            largest = limit // unit * unit
            counts = {-(-rows // unit) * unit for rows in PROBE_ROWS if rows <= largest}
            if probe.keeps_rows(sorted(counts), largest):
                return RowRule(unit=unit, max_rows=largest, exact=True)
    return RowRule(unit=ROW_UNITS[-1], max_rows=max_rows, exact=False)


class _Probe:
    """Products whose low bits show in which order they were summed.

    Half of the values are large and come in pairs that cancel, under equal weights: what is left is small
    and holds the rounding errors of large sums, which bfloat16's own rounding would hide otherwise.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, max_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._query = torch.randn((3, num_kv_heads, max_rows, head_dim), generator=generator).to(dtype)
        keys, values = torch.randn((2, 3, KEY_TILE, num_kv_heads, head_dim), generator=generator)
        hidden = torch.rand((3, 1, max_rows, KEY_TILE), generator=generator) < 0.3
        large, partners = torch.randperm(KEY_TILE, generator=generator)[: KEY_TILE // 2].chunk(2)
        values[:, large] *= LARGE
        values[:, partners] = -values[:, large]
        keys[:, partners] = keys[:, large]
        hidden[..., partners] = hidden[..., large]
        self._keys, self._values = keys.to(dtype).transpose(1, 2), values.to(dtype).transpose(1, 2)
        self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, MASKED)

    def keeps_rows(self, counts: Sequence[int], most: int) -> bool:
        """Whether every row has the bits it has among `most`, for all of these row counts."""
        whole = self._attend(3, 0, most)
        for rows in counts:
            for tiles, start in ((1, 0), (3, 0), (1, min(most - rows, 5))):
                part = self._attend(tiles, start, rows)
                if any(
                    not torch.equal(a, b[:tiles, :, start : start + rows]) for a, b in zip(part, whole, strict=True)
                ):
                    return False
        return True

    def _attend(self, tiles: int, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        query, mask = (x[:tiles, :, start : start + rows].contiguous() for x in (self._query, self._mask))
        return _attend_tiles(query, self._keys[:tiles], self._values[:tiles], mask, 0.1)
