"""What lies between a CPU model's matrix products, compiled by Numba: norms, rotation, attention, the gate.

A row's numbers depend on nothing but the row: every sum has an order of its own (worker.vectors). Tensors
come as addresses (`Tensor.data_ptr()`); a Numba array would cost more to unwrap than most of these take.
The first argument says the elements' type: BFLOAT16 or FLOAT32. Callers check shapes; nothing here does.
"""

import hashlib
import math
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit, prange

from worker import amx
from worker import vectors as v
from worker.fetch import default_cache_dir
from worker.vectors import FLOAT_BYTES, LANES

# Decides a row's numbers, and where compiled code is kept: Numba itself would look for changes in this file only.
SOURCES = (__file__, v.__file__, amx.__file__)
SOURCE_HASH = hashlib.sha256(b"".join(Path(file).read_bytes() for file in SOURCES)).hexdigest()[:16]
numba.config.CACHE_DIR = str(default_cache_dir() / "kernels" / SOURCE_HASH)


@cache
def start_threads() -> None:
    """Start Numba's OpenMP, in the thread that will run the kernels: another would have a team of its own, too many.

    As it starts it sets the number of threads, also PyTorch's, whose library it shares; that is kept.
    """
    num_threads = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(num_threads)


FLOAT32 = np.float32(0)
BFLOAT16 = np.int16(0)
INT8 = np.int8(0)  # of weights only
KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
VECTOR_BYTES = LANES * FLOAT_BYTES
MINUS_INFINITY = np.float32(-np.inf)
INT8_ROWS = 16  # rows that stay in a core's cache while the weights pass
PANEL = 32  # columns of a weight that lie together for AMX tiles: two tiles
PANEL_BYTES = PANEL * FLOAT_BYTES
DEPTH = 32  # bfloat16 along the inputs in a tile
ROW_BLOCK = 2 * amx.TILE_ROWS
FEW_ROWS = 4
RIVAL_BLOCK = 256  # tokens whose noise is looked at together
PHILOX_ROUNDS = 10
PHILOX_0, PHILOX_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_WORD, HALF_WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
TWO_32, TWO_52 = 2.0**32, 2.0**52
SILU_WORK = 1 << 14  # elements for which a thread pays
_products_1, _products_2, _products_3, _products_4 = (
    v.tile_order_products(rows, PANEL // LANES) for rows in range(1, FEW_ROWS + 1)
)
ZERO, ONE = np.float32(0), np.float32(1)


@njit(cache=True, nogil=True)
def add_norm(kind, residual, addend, weight, out, num_rows, size, eps):
    """residual [rows, size] float32 += addend [rows, size] (0: none); out = its RMSNorm, weighed by float32 weight."""
    item = _item_size(kind)
    whole = size // LANES * LANES
    for row in range(num_rows):
        x, y, delta = residual + row * size * FLOAT_BYTES, out + row * size * item, addend + row * size * item
        squares = v.splat(ZERO)
        for i in range(0, whole, LANES):
            value = v.load(FLOAT32, x + i * FLOAT_BYTES)
            if addend != 0:
                value = v.add(value, v.load(kind, delta + i * item))
                v.store(FLOAT32, x + i * FLOAT_BYTES, value)
            squares = v.fma(value, value, squares)
        square = v.total(squares)
        for i in range(whole, size):
            one = v.load_one(FLOAT32, x + i * FLOAT_BYTES)
            if addend != 0:
                one = one + v.load_one(kind, delta + i * item)
                v.store_one(FLOAT32, x + i * FLOAT_BYTES, one)
            square += one * one
        scale = ONE / np.float32(math.sqrt(square / np.float32(size) + np.float32(eps)))
        factor = v.splat(scale)
        for i in range(0, whole, LANES):
            value = v.mul(v.load(FLOAT32, x + i * FLOAT_BYTES), factor)
            v.store(kind, y + i * item, v.mul(value, v.load(FLOAT32, weight + i * FLOAT_BYTES)))
        for i in range(whole, size):
            one = v.load_one(FLOAT32, x + i * FLOAT_BYTES) * scale * v.load_one(FLOAT32, weight + i * FLOAT_BYTES)
            v.store_one(kind, y + i * item, one)


@njit(cache=True, nogil=True)
def norm_heads(kind, x, row_stride, num_rows, num_heads, head_dim, weight, eps):
    """RMSNorm of each head in place; rows are row_stride elements apart, head_dim is a multiple of 16."""
    item = _item_size(kind)
    for row in range(num_rows):
        for head in range(num_heads):
            start = x + (row * row_stride + head * head_dim) * item
            squares = v.splat(ZERO)
            for i in range(0, head_dim, LANES):
                value = v.load(kind, start + i * item)
                squares = v.fma(value, value, squares)
            mean = v.total(squares) / np.float32(head_dim)
            factor = v.splat(ONE / np.float32(math.sqrt(mean + np.float32(eps))))
            for i in range(0, head_dim, LANES):
                value = v.mul(v.load(kind, start + i * item), factor)
                v.store(kind, start + i * item, v.mul(value, v.load(FLOAT32, weight + i * FLOAT_BYTES)))


@njit(cache=True, nogil=True)
def rotate(kind, x, row_stride, num_rows, num_heads, head_dim, cos, sin):
    """Turn each head's halves against each other in place; cos and sin as `worker.rope.Rope` gives them."""
    item = _item_size(kind)
    half = head_dim // 2
    whole = half // LANES * LANES
    for row in range(num_rows):
        c, s = cos + row * head_dim * FLOAT_BYTES, sin + (row * head_dim + half) * FLOAT_BYTES
        for head in range(num_heads):
            low = x + (row * row_stride + head * head_dim) * item
            high = low + half * item
            for i in range(0, whole, LANES):
                a, b = v.load(kind, low + i * item), v.load(kind, high + i * item)
                cosine, sine = v.load(FLOAT32, c + i * FLOAT_BYTES), v.load(FLOAT32, s + i * FLOAT_BYTES)
                v.store(kind, low + i * item, v.sub(v.mul(a, cosine), v.mul(b, sine)))
                v.store(kind, high + i * item, v.add(v.mul(b, cosine), v.mul(a, sine)))
            for i in range(whole, half):
                one, other = v.load_one(kind, low + i * item), v.load_one(kind, high + i * item)
                cosine_one = v.load_one(FLOAT32, c + i * FLOAT_BYTES)
                sine_one = v.load_one(FLOAT32, s + i * FLOAT_BYTES)
                v.store_one(kind, low + i * item, one * cosine_one - other * sine_one)
                v.store_one(kind, high + i * item, other * cosine_one + one * sine_one)


@njit(cache=True, nogil=True)
def silu_mul(kind, gate_up, out, num_rows, size):
    """out [rows, size] = silu(gate) * up of gate_up [rows, 2 * size]."""
    item = _item_size(kind)
    whole = size // LANES * LANES
    one = v.splat(ONE)
    for row in range(num_rows):
        gate, y = gate_up + row * 2 * size * item, out + row * size * item
        up = gate + size * item
        for i in range(0, whole, LANES):
            x = v.load(kind, gate + i * item)
            gated = v.div(x, v.add(one, v.exp(v.sub(v.splat(ZERO), x))))
            v.store(kind, y + i * item, v.mul(gated, v.load(kind, up + i * item)))
        for i in range(whole, size):
            single = v.load_one(kind, gate + i * item)
            gated_one = single / (ONE + v.highest(v.exp(v.splat(-single))))
            v.store_one(kind, y + i * item, gated_one * v.load_one(kind, up + i * item))


@njit(cache=True, nogil=True, parallel=True)
def silu_mul_parts(kind, gate_up, out, num_rows, size, num_threads):
    """`silu_mul`, each thread some of the rows if there are enough."""
    if num_rows * size < SILU_WORK or num_threads == 1:
        silu_mul(kind, gate_up, out, num_rows, size)
        return
    item, share = _item_size(kind), -(-num_rows // num_threads)
    for part in prange(num_threads):
        first = part * share
        count = min(share, num_rows - first)
        silu_mul(kind, gate_up + first * 2 * size * item, out + first * size * item, count, size)


@njit(cache=True, nogil=True, parallel=True)
def int8_linear(kind, x, weight, scale, bias, out, num_rows, in_features, out_features, num_threads):
    """out [rows, out] = x [rows, in] float32 @ weight.T * scale + bias (0: none); weight [out, in] int8.

    scale and bias [out] float32; rows and out are multiples of 4, in of 16. Each product sums its terms in
    one order, whatever the rows beside it and the threads.
    """
    width = -(-out_features // (4 * num_threads)) * 4
    for part in prange(num_threads):
        last = min((part + 1) * width, out_features)
        _int8_columns(kind, x, weight, scale, bias, out, num_rows, in_features, out_features, part * width, last)


@njit(cache=True, nogil=True)
def _int8_columns(kind, x, weight, scale, bias, out, num_rows, in_features, out_features, first, last):
    item = _item_size(kind)
    row_bytes = in_features * FLOAT_BYTES
    tile = np.empty(LANES, np.float32)
    for start in range(0, num_rows, INT8_ROWS):
        stop = min(start + INT8_ROWS, num_rows)
        for column in range(first, last, 4):
            for row in range(start, stop, 4):
                sums = v.int8_products(x + row * row_bytes, row_bytes, weight + column * in_features, in_features)
                v.store(FLOAT32, tile.ctypes.data, sums)
                for j in range(4):
                    factor = v.load_one(FLOAT32, scale + (column + j) * FLOAT_BYTES)
                    term = v.load_one(FLOAT32, bias + (column + j) * FLOAT_BYTES) if bias != 0 else ZERO
                    for i in range(4):
                        to = out + ((row + i) * out_features + column + j) * item
                        v.store_one(kind, to, tile[4 * i + j] * factor + term)


@njit(cache=True, nogil=True, parallel=True)
def tile_linear(
    kind, x, weight, scale, bias, out, num_rows, in_features, out_features, configurations, scratch, num_threads
):  # fmt: skip
    """out [rows, out] = x [rows, in] @ weight.T * scale + bias (0: none) on AMX tiles; x and out bfloat16.

    kind: of the weight: BFLOAT16, which lies as [out / 32, in / 2, 32, 2], or INT8, as [out / 32, in, 32]. scale and
    bias [out] float32.
    configurations: [33, 64] uint8, of the tiles for each number of rows in a block. scratch: `tile_scratch` bytes
    for each thread. in and out are multiples of 32.
    """
    num_panels = out_features // PANEL
    if num_threads == 1:  # a team's other threads would spin meanwhile
        _tile_panels(
            kind, x, weight, scale, bias, out, num_rows, in_features, out_features, configurations, scratch, 0,
            num_panels,
        )  # fmt: skip
        return
    share = -(-num_panels // num_threads)
    for part in prange(num_threads):
        _tile_panels(
            kind, x, weight, scale, bias, out, num_rows, in_features, out_features, configurations,
            scratch + part * tile_scratch(in_features), part * share, min((part + 1) * share, num_panels),
        )  # fmt: skip


@njit(cache=True, inline="always")
def tile_scratch(in_features):
    """Bytes that one thread of `tile_linear` needs: a block's sums, and a panel of the weight or few rows widened."""
    return ROW_BLOCK * PANEL_BYTES + PANEL * in_features * 2


@njit(cache=True, nogil=True)
def _tile_panels(
    kind, x, weight, scale, bias, out, num_rows, in_features, out_features, configurations, scratch, first, last
):  # fmt: skip
    sums, widened = scratch, scratch + ROW_BLOCK * PANEL_BYTES
    v.ignore_denormals(sums)  # as tiles do
    if isinstance(kind, np.int8) and num_rows <= FEW_ROWS:
        _few_rows(x, weight, scale, bias, out, num_rows, in_features, out_features, sums, widened, first, last)
    else:
        num_blocks = max(-(-num_rows // ROW_BLOCK), 1)
        block = max(-(-num_rows // num_blocks), 1)
        amx.configure(configurations + block * amx.CONFIG_BYTES)
        for panel in range(first, last):
            columns = weight + panel * PANEL * in_features * _item_size(kind)
            if isinstance(kind, np.int8):
                _widen_panel(columns, widened, in_features)
                columns = widened
            _tile_panel(x, columns, scale, bias, out, num_rows, block, in_features, out_features, sums, panel)
        amx.release()
    v.heed_denormals(sums)


@njit(cache=True, nogil=True)
def _tile_panel(x, columns, scale, bias, out, num_rows, block, in_features, out_features, sums, panel):
    """All rows by one panel, in blocks of one size: to configure tiles anew costs more than a few rows twice."""
    for start in range(0, num_rows, block):
        row = min(start, num_rows - block)
        _tile_products(x + row * in_features * 2, columns, sums, block, in_features)
        _write_sums(sums, scale, bias, out, row, block, panel * PANEL, out_features)


@njit(cache=True, nogil=True)
def _widen_panel(source, target, in_features):
    """int8 [in, 32] becomes bfloat16 [in / 2, 32, 2]."""
    for k in range(0, in_features, 2):
        for i in range(0, PANEL, LANES):
            at = source + k * PANEL + i
            v.widen_int8_pairs(at, at + PANEL, target + (k * PANEL + 2 * i) * 2)


@njit(cache=True, nogil=True)
def _few_rows(x, weight, scale, bias, out, num_rows, in_features, out_features, sums, rows, first, last):
    """Up to 4 rows by panels of int8, each weight used as it is widened; the bits of tiles, at half their price."""
    row_bytes = in_features * FLOAT_BYTES
    for i in range(0, num_rows * in_features, LANES):
        v.store(FLOAT32, rows + i * FLOAT_BYTES, v.load(BFLOAT16, x + i * 2))
    for panel in range(first, last):
        columns = weight + panel * PANEL * in_features
        if num_rows == 1:
            _products_1(rows, row_bytes, columns, in_features, sums)
        elif num_rows == 2:
            _products_2(rows, row_bytes, columns, in_features, sums)
        elif num_rows == 3:
            _products_3(rows, row_bytes, columns, in_features, sums)
        else:
            _products_4(rows, row_bytes, columns, in_features, sums)
        _write_sums(sums, scale, bias, out, 0, num_rows, panel * PANEL, out_features)


@njit(cache=True, nogil=True)
def _tile_products(x, columns, sums, num_rows, in_features):
    """sums [rows, 32] float32 = up to 32 rows of x by one panel."""
    row_bytes = in_features * 2
    x_b, sums_b = x + amx.TILE_ROWS * row_bytes, sums + amx.TILE_ROWS * PANEL_BYTES
    amx.zero_a0()
    amx.zero_a1()
    if num_rows <= amx.TILE_ROWS:
        for k in range(0, in_features, DEPTH):
            amx.load_rows_a(x + k * 2, row_bytes)
            amx.load_columns_0(columns + k * 2 * PANEL, PANEL_BYTES)
            amx.load_columns_1(columns + k * 2 * PANEL + amx.TILE_BYTES, PANEL_BYTES)
            amx.multiply_a0()
            amx.multiply_a1()
    else:
        amx.zero_b0()
        amx.zero_b1()
        for k in range(0, in_features, DEPTH):
            amx.load_columns_0(columns + k * 2 * PANEL, PANEL_BYTES)
            amx.load_columns_1(columns + k * 2 * PANEL + amx.TILE_BYTES, PANEL_BYTES)
            amx.load_rows_a(x + k * 2, row_bytes)
            amx.multiply_a0()
            amx.multiply_a1()
            amx.load_rows_b(x_b + k * 2, row_bytes)
            amx.multiply_b0()
            amx.multiply_b1()
        amx.store_b0(sums_b, PANEL_BYTES)
        amx.store_b1(sums_b + amx.TILE_BYTES, PANEL_BYTES)
    amx.store_a0(sums, PANEL_BYTES)
    amx.store_a1(sums + amx.TILE_BYTES, PANEL_BYTES)


@njit(cache=True, nogil=True)
def _write_sums(sums, scale, bias, out, first_row, num_rows, first_column, out_features):
    """Rows of a panel into out [.., out] bfloat16, scaled and shifted by column if there is a scale or a bias."""
    for i in range(0, PANEL, LANES):
        column = first_column + i
        factor = v.load(FLOAT32, scale + column * FLOAT_BYTES) if scale != 0 else v.splat(ONE)
        term = v.load(FLOAT32, bias + column * FLOAT_BYTES) if bias != 0 else v.splat(ZERO)
        for row in range(num_rows):
            value = v.load(FLOAT32, sums + row * PANEL_BYTES + i * FLOAT_BYTES)
            if scale != 0:
                value = v.mul(value, factor)
            if bias != 0:
                value = v.add(value, term)
            v.store(BFLOAT16, out + ((first_row + row) * out_features + column) * 2, value)


@njit(cache=True, nogil=True)
def store_kv(kind, key, value, key_stride, value_stride, slots, num_tokens, size, key_pool, value_pool):
    """Copy rows of `size` elements, a multiple of 16, into their slots [num_tokens] int64 of one layer's pools."""
    item = _item_size(kind)
    for token in range(num_tokens):
        slot = v.load_int64(slots + token * 8) * size * item
        k, w = key + token * key_stride * item, value + token * value_stride * item
        for i in range(0, size * item, LANES * item):
            v.store(kind, key_pool + slot + i, v.load(kind, k + i))
            v.store(kind, value_pool + slot + i, v.load(kind, w + i))


@njit(cache=True, nogil=True)
def attend(
    kind, items, first_item, last_item, query, query_stride, key_pool, value_pool, block_table, table_width, out,
    block_size, num_heads, num_kv_heads, head_dim, window, scale, scratch, most_keys,
):  # fmt: skip
    """Causal attention of work items over paged keys and values of one layer.

    items: [n, 6] int64: first token of the step, number of tokens, row of the block table, position of the
    first token, first KV head, number of KV heads. query and out: [num_tokens, num_heads, head_dim]. window:
    keys a query sees at most, 0: all. scratch: float32 of `scratch_size`, of this call alone. most_keys: a
    multiple of 16, of any item.

    A query's scores are all there before their softmax, so nothing is rescaled: keys that a query may not see
    are not among its chunks of 16 or have weight exactly 0.
    """
    item = _item_size(kind)
    group = num_heads // num_kv_heads
    slot_bytes = num_kv_heads * head_dim * item
    head_bytes = head_dim * FLOAT_BYTES
    chunk_bytes = LANES * head_bytes  # of one head
    row_bytes = most_keys * FLOAT_BYTES
    for index in range(first_item, last_item):
        entry = items + index * 6 * 8
        first_token, num_tokens = v.load_int64(entry), v.load_int64(entry + 8)
        blocks = block_table + v.load_int64(entry + 16) * table_width * 4
        position, first_head, heads = v.load_int64(entry + 24), v.load_int64(entry + 32), v.load_int64(entry + 40)
        num_rows = num_tokens * group  # of one KV head
        chunk = scratch  # [heads, 16, head_dim] keys or values
        queries = chunk + heads * chunk_bytes  # [heads, num_rows, head_dim]
        sums = queries + heads * num_rows * head_bytes  # likewise
        scores = sums + heads * num_rows * head_bytes  # [heads, num_rows, most_keys]
        num_keys = position + num_tokens
        first_key = max(position + 1 - window, 0) if window > 0 else 0
        first_chunk = first_key // LANES * LANES
        offset = first_head * head_dim * item
        for head in range(heads):
            start = query + (first_token * query_stride + (first_head + head) * group * head_dim) * item
            rows = head * num_rows * head_bytes
            _read_queries(kind, start, query_stride, queries + rows, sums + rows, num_tokens, group, head_dim, scale)
        for key in range(first_chunk, num_keys, LANES):
            _read_chunk(kind, key_pool + offset, slot_bytes, blocks, block_size, key, num_keys, chunk, heads, head_dim)
            for head in range(heads):
                for row in range(num_rows):
                    last = position + row // group  # the last key that this row may see
                    if key > last or (window > 0 and key + LANES <= last + 1 - window):
                        continue
                    at = head * num_rows + row
                    products = v.dot_products(queries + at * head_bytes, chunk + head * chunk_bytes, head_dim)
                    v.store(FLOAT32, scores + at * row_bytes + key * FLOAT_BYTES, products)
        for at in range(heads * num_rows):
            last = position + at % num_rows // group
            _softmax(scores + at * row_bytes, max(last + 1 - window, 0) if window > 0 else 0, last + 1)
        for key in range(first_chunk, num_keys, LANES):
            _read_chunk(
                kind, value_pool + offset, slot_bytes, blocks, block_size, key, num_keys, chunk, heads, head_dim
            )
            for head in range(heads):
                for row in range(num_rows):
                    last = position + row // group
                    if key > last or (window > 0 and key + LANES <= last + 1 - window):
                        continue
                    at = head * num_rows + row
                    weights = scores + at * row_bytes + key * FLOAT_BYTES
                    v.add_weighted(weights, chunk + head * chunk_bytes, sums + at * head_bytes, head_dim)
        for at in range(heads * num_rows):
            row = at % num_rows
            to_head = (first_head + at // num_rows) * group + row % group
            y = out + ((first_token + row // group) * num_heads + to_head) * head_dim * item
            for i in range(0, head_dim, LANES):
                v.store(kind, y + i * item, v.load(FLOAT32, sums + at * head_bytes + i * FLOAT_BYTES))


@njit(cache=True, nogil=True, parallel=True)
def attend_parts(
    kind, items, parts, num_parts, query, query_stride, key_pool, value_pool, block_table, table_width, out,
    block_size, num_heads, num_kv_heads, head_dim, window, scale, scratch, scratch_floats, most_keys,
):  # fmt: skip
    """`attend` of every part's items, each part in a thread: parts [n, 2] int64 are its first and last + 1.

    scratch: scratch_floats for each part.
    """
    if num_parts == 1:  # a thread that waits costs more than a small step
        attend(
            kind, items, v.load_int64(parts), v.load_int64(parts + 8), query, query_stride, key_pool, value_pool,
            block_table, table_width, out, block_size, num_heads, num_kv_heads, head_dim, window, scale, scratch,
            most_keys,
        )  # fmt: skip
        return
    for part in prange(num_parts):
        bounds = parts + part * 16
        attend(
            kind, items, v.load_int64(bounds), v.load_int64(bounds + 8), query, query_stride, key_pool, value_pool,
            block_table, table_width, out, block_size, num_heads, num_kv_heads, head_dim, window, scale,
            scratch + part * scratch_floats * FLOAT_BYTES, most_keys,
        )  # fmt: skip


def scratch_size(num_heads: int, num_rows: int, most_keys: int, head_dim: int) -> int:
    """Floats that `attend` needs for items of so many KV heads with so many query rows each."""
    return num_heads * ((LANES + 2 * num_rows) * head_dim + num_rows * most_keys)


@njit(cache=True, inline="always")
def _item_size(kind):
    if isinstance(kind, np.int8):
        return 1
    return 2 if isinstance(kind, np.int16) else 4


@njit(cache=True, nogil=True)
def _read_queries(kind, query, query_stride, queries, sums, num_tokens, group, head_dim, scale):
    """Scaled queries as float32, and zeros beside them."""
    item = _item_size(kind)
    factor, zero = v.splat(np.float32(scale)), v.splat(ZERO)
    for token in range(num_tokens):
        for i in range(0, group * head_dim, LANES):
            x = v.load(kind, query + (token * query_stride + i) * item)
            offset = (token * group * head_dim + i) * FLOAT_BYTES
            v.store(FLOAT32, queries + offset, v.mul(x, factor))
            v.store(FLOAT32, sums + offset, zero)


@njit(cache=True, nogil=True)
def _read_chunk(kind, pool, slot_bytes, blocks, block_size, start, num_keys, chunk, num_heads, head_dim):
    """Keys or values start..start + 15 of some heads as float32; zeros beyond num_keys: no garbage is ever read."""
    item = _item_size(kind)
    column = start // block_size
    offset = start - column * block_size
    source = pool + (v.load_int32(blocks + column * 4) * block_size + offset) * slot_bytes
    num_known = min(num_keys - start, LANES)
    for lane in range(num_known):
        if offset == block_size:
            column, offset = column + 1, 0
            source = pool + v.load_int32(blocks + column * 4) * block_size * slot_bytes
        target, part = chunk + lane * head_dim * FLOAT_BYTES, source
        for _ in range(num_heads):
            for i in range(0, head_dim, LANES):
                v.store(FLOAT32, target + i * FLOAT_BYTES, v.load(kind, part + i * item))
            target, part = target + LANES * head_dim * FLOAT_BYTES, part + head_dim * item
        offset, source = offset + 1, source + slot_bytes
    zero = v.splat(ZERO)
    for head in range(num_heads):
        for i in range((head * LANES + num_known) * head_dim, (head + 1) * LANES * head_dim, LANES):
            v.store(FLOAT32, chunk + i * FLOAT_BYTES, zero)


@njit(cache=True, nogil=True)
def _softmax(scores, first, end):
    """Scores of keys first..end - 1 become weights that sum to 1; the rest of their chunks of 16 becomes 0."""
    start, stop = first // LANES * LANES, -(-end // LANES) * LANES
    for key in range(start, first):
        v.store_one(FLOAT32, scores + key * FLOAT_BYTES, MINUS_INFINITY)
    for key in range(end, stop):
        v.store_one(FLOAT32, scores + key * FLOAT_BYTES, MINUS_INFINITY)
    top = v.load(FLOAT32, scores + start * FLOAT_BYTES)
    for key in range(start + LANES, stop, LANES):
        top = v.maximum(top, v.load(FLOAT32, scores + key * FLOAT_BYTES))
    shift = v.splat(v.highest(top))
    sums = v.splat(ZERO)
    for key in range(start, stop, LANES):
        weight = v.exp(v.sub(v.load(FLOAT32, scores + key * FLOAT_BYTES), shift))
        v.store(FLOAT32, scores + key * FLOAT_BYTES, weight)
        sums = v.add(sums, weight)
    factor = v.splat(ONE / v.total(sums))
    for key in range(start, stop, LANES):
        v.store(FLOAT32, scores + key * FLOAT_BYTES, v.mul(v.load(FLOAT32, scores + key * FLOAT_BYTES), factor))


# Columns of a layer's addresses, [num_layers, NUM_ADDRESSES] int64; 0 where a model has no such thing.
(
    INPUT_NORM, QKV, QKV_SCALE, QKV_BIAS, QUERY_NORM, KEY_NORM, OUTPUT, OUTPUT_SCALE, OUTPUT_BIAS, MLP_NORM,
    GATE_UP, GATE_UP_SCALE, GATE_UP_BIAS, DOWN, DOWN_SCALE, DOWN_BIAS, KEY_POOL, VALUE_POOL, WINDOW,
) = range(19)  # fmt: skip
NUM_ADDRESSES = WINDOW + 1


@njit(cache=True, nogil=True)
def run_layers(
    kind, layers, first, last, residual, addend, cos, sin, num_rows, num_tokens, hidden_size, intermediate_size,
    num_heads, num_kv_heads, head_dim, eps, items, parts, num_parts, slots, block_table, table_width, block_size, scale,
    attention_scratch, scratch_floats, most_keys, configurations, tile_memory, inputs, input_size, normed, qkv,
    attended, projected, gate_up, gated, num_threads,
):  # fmt: skip
    """Decoder layers first..last - 1 of a bfloat16 model on AMX tiles: what `worker.model.Layer` does, without Python.

    kind: of the weights. residual [rows, hidden] float32 is added to in place; addend [rows, hidden] is what the
    layer before has to add, and then what the last one has. Rows from num_tokens on are padding, without a slot.
    inputs [rows, input_size]: what the first product reads in place of the residual's norm; 0: there are none. The
    buffers from `normed` on hold a step's rows.
    """
    turned, size = num_heads + num_kv_heads, (num_heads + 2 * num_kv_heads) * head_dim
    key, value = qkv + num_heads * head_dim * 2, qkv + turned * head_dim * 2
    for index in range(first, last):
        layer = layers + index * NUM_ADDRESSES * 8
        if inputs == 0:
            add_norm(
                BFLOAT16, residual, addend if index > 0 else 0, _address(layer, INPUT_NORM), normed, num_rows,
                hidden_size, eps,
            )  # fmt: skip
        tile_linear(
            kind, normed if inputs == 0 else inputs, _address(layer, QKV), _address(layer, QKV_SCALE),
            _address(layer, QKV_BIAS), qkv, num_rows, input_size, size, configurations, tile_memory, num_threads,
        )  # fmt: skip
        query_norm, key_norm = _address(layer, QUERY_NORM), _address(layer, KEY_NORM)
        if query_norm != 0:
            norm_heads(BFLOAT16, qkv, size, num_rows, num_heads, head_dim, query_norm, eps)
            norm_heads(BFLOAT16, key, size, num_rows, num_kv_heads, head_dim, key_norm, eps)
        rotate(BFLOAT16, qkv, size, num_rows, turned, head_dim, cos, sin)
        key_pool, value_pool = _address(layer, KEY_POOL), _address(layer, VALUE_POOL)
        store_kv(BFLOAT16, key, value, size, size, slots, num_tokens, num_kv_heads * head_dim, key_pool, value_pool)
        attend_parts(
            BFLOAT16, items, parts, num_parts, qkv, size, key_pool, value_pool, block_table, table_width, attended,
            block_size, num_heads, num_kv_heads, head_dim, _address(layer, WINDOW), scale, attention_scratch,
            scratch_floats, most_keys,
        )  # fmt: skip
        tile_linear(
            kind, attended, _address(layer, OUTPUT), _address(layer, OUTPUT_SCALE), _address(layer, OUTPUT_BIAS),
            projected, num_rows, num_heads * head_dim, hidden_size, configurations, tile_memory, num_threads,
        )  # fmt: skip
        add_norm(
            BFLOAT16, residual, projected, _address(layer, MLP_NORM), normed, num_rows, hidden_size, eps
        )  # fmt: skip
        tile_linear(
            kind, normed, _address(layer, GATE_UP), _address(layer, GATE_UP_SCALE), _address(layer, GATE_UP_BIAS),
            gate_up, num_rows, hidden_size, 2 * intermediate_size, configurations, tile_memory, num_threads,
        )  # fmt: skip
        silu_mul_parts(BFLOAT16, gate_up, gated, num_rows, intermediate_size, num_threads)
        tile_linear(
            kind, gated, _address(layer, DOWN), _address(layer, DOWN_SCALE), _address(layer, DOWN_BIAS), addend,
            num_rows, intermediate_size, hidden_size, configurations, tile_memory, num_threads,
        )  # fmt: skip


@njit(cache=True, inline="always")
def _address(layer, column):
    return v.load_int64(layer + column * 8)


@njit(cache=True, nogil=True)
def find_rivals(scaled, limit, position, key_low, key_high, found):
    """Token ids whose scaled logit plus noise may reach `limit`, ascending, into `found`; how many. None is missed.

    scaled: [vocab_size] float64; the noise is `worker.sampler.gumbel` of (key, position, token id). Noise of at
    least d has a uniform number above 1 - exp(-d), so its distance from 1 is at most exp(-d): compared are that
    distance, an integer's, and a number not below that power, straight from the bits of its exponent.
    """
    vocab_size = len(scaled)
    distances, bounds = np.empty(RIVAL_BLOCK, np.float64), np.empty(RIVAL_BLOCK, np.float64)
    bits = bounds.view(np.int64)
    count = 0
    for start in range(0, vocab_size, RIVAL_BLOCK):
        for i in range(RIVAL_BLOCK // 4):
            c0, c1 = np.uint64(start // 4 + i), np.uint64(position)
            c2, c3, k0, k1 = np.uint64(0), np.uint64(0), np.uint64(key_low), np.uint64(key_high)
            for _ in range(PHILOX_ROUNDS):
                p0, p1 = c0 * PHILOX_0, c2 * PHILOX_1
                c0, c1, c2, c3 = (p1 >> HALF_WORD) ^ c1 ^ k0, p1 & LOW_WORD, (p0 >> HALF_WORD) ^ c3 ^ k1, p0 & LOW_WORD
                k0, k1 = (k0 + WEYL_0) & LOW_WORD, (k1 + WEYL_1) & LOW_WORD
            distances[4 * i] = TWO_32 - (np.float64(c0) + 0.5)
            distances[4 * i + 1] = TWO_32 - (np.float64(c1) + 0.5)
            distances[4 * i + 2] = TWO_32 - (np.float64(c2) + 0.5)
            distances[4 * i + 3] = TWO_32 - (np.float64(c3) + 0.5)
        size = min(RIVAL_BLOCK, vocab_size - start)
        for i in range(size):
            # 2 ** floor(x) * (1 + x - floor(x)) >= 2 ** x; below 2 ** -1 no distance is that small.
            power = max((scaled[start + i] - limit) * v.LOG2_E + 32.0 + 1e-9, -1.0)
            bits[i] = np.int64((min(power, 64.0) + 1023.0) * TWO_52)
        reached = 0
        for i in range(size):
            reached += distances[i] <= bounds[i]
        if reached > 0:
            for i in range(size):
                if distances[i] <= bounds[i]:
                    found[count] = start + i
                    count += 1
    return count


@njit(cache=True, nogil=True)
def latest_match(token_ids, longest, told):
    """Where the continuation of the longest, then latest, earlier copy of the last tokens [n] int32 begins; 0: none.

    Copies are told apart by their last `longest` tokens. Also how many tokens before it are the last ones, up to told.
    """
    num_tokens = len(token_ids)
    start = best = 0
    for end in range(num_tokens - 1, 0, -1):
        length = 0
        while length < min(longest, end) and token_ids[end - 1 - length] == token_ids[num_tokens - 1 - length]:
            length += 1
        if length > best:
            start, best = end, length
            if length == longest:
                break
    while 0 < best < min(told, start) and token_ids[start - 1 - best] == token_ids[num_tokens - 1 - best]:
        best += 1
    return start, best
