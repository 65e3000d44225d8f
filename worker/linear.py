"""Matrix products whose rows do not depend on their company.

A CPU kernel may choose its blocking, and with it the order of its sums, by the number of rows. So
weights are packed once, rows come in counts from a fixed ladder, and a probe at load finds the largest
count below which every row keeps its bits; more rows than that run as several tiles. On a GPU this is
the vendor's matmul: rows may depend on their company there, and `tile` is None.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

ROW_UNIT = 4  # fewer rows take another code path: a GEMV, or a kernel for odd row counts
PROBE_FLOPS = 4e9  # of the largest product tried by a probe: tens of milliseconds
MAX_TILE = 512
LARGE = 4096.0  # of a probe's terms that cancel

# (out, in, dtype, threads, has a bias) -> packing and tile; a model has a handful of shapes, however many layers
_PROBED: "dict[tuple[int | torch.dtype | bool, ...], tuple[int | None, RowTile]]" = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """How one weight's products are cut, found by trying."""

    rows: int  # most rows of one product; below it every row is bitwise the same in any company
    exact: bool  # False: no row count was found exact


def padded_rows(num_rows: int) -> int:
    """The next row count that is ever multiplied: multiples of 4 up to 64, of 16 up to 128, then of 32."""
    if num_rows <= 64:
        unit = ROW_UNIT
    elif num_rows <= 128:
        unit = 16
    else:
        unit = 32
    return max(-(-num_rows // unit), 1) * unit


def row_counts(max_rows: int) -> list[int]:
    """Every row count up to max_rows that `padded_rows` can give."""
    ladder = [*range(ROW_UNIT, 65, ROW_UNIT), *range(80, 129, 16), *range(160, MAX_TILE + 1, 32)]
    return [rows for rows in ladder if rows <= max_rows]


class Linear:
    """`x @ weight.T + bias` with a fixed tile of rows."""

    pads_rows = True  # whether it takes rows in the counts of `padded_rows` only, and would add what is missing itself

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features], bias: [out_features]."""
        self.out_features, self.in_features = weight.shape
        self.tile: RowTile | None = None
        self._bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = weight
        if weight.device.type == "cpu":
            self._pack_and_probe(weight)

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits are the same in any company."""
        return self.tile is not None and self.tile.exact

    @property
    def num_bytes(self) -> int:
        """Of the weight: what a product reads at least."""
        return self.out_features * self.in_features * self._weight.element_size()

    @property
    def kernel(self) -> str:
        """What decides the order of its sums, in a word."""
        return str(self.tile.rows) if self.tile else "any"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_features], any count; [num_rows, out_features]."""
        if self.tile is None:
            return F.linear(x, self._weight, self._bias)
        num_rows = x.shape[0]
        padded = padded_rows(num_rows)
        if padded != num_rows:
            return self(F.pad(x, (0, 0, 0, padded - num_rows)))[:num_rows]
        if num_rows <= self.tile.rows:
            return self._product(x)
        return torch.cat([self(rows) for rows in x.split(self.tile.rows)])

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x, self._weight, self._bias)

    def _pack_and_probe(self, weight: torch.Tensor) -> None:
        """Pack the weight as the shape's probe found best, running the probe if it is the first of its shape."""
        shape = (*weight.shape, weight.dtype, torch.get_num_threads(), self._bias is not None)
        if shape not in _PROBED:
            _PROBED[shape] = self._probe(weight)
        hint, self.tile = _PROBED[shape]
        self._weight = self._packed(weight, hint)

    def _packed(self, weight: torch.Tensor, hint: int | None) -> torch.Tensor:
        """weight as oneDNN blocks it for products of `hint` rows; None leaves the choice to it."""
        if not self._is_packed:
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, hint)
        return packed

    def _probe(self, weight: torch.Tensor) -> tuple[int | None, RowTile]:
        """The packing with the largest exact tile: that for any row count or, if it is exact for few only, for one."""
        x, weight = _revealing(weight, self._max_rows())
        best: tuple[int | None, RowTile] | None = None
        for hint in (None, 1):
            self._weight = self._packed(weight, hint)
            tile = self._probe_tile(x)
            if best is None or tile.rows > best[1].rows:
                best = hint, tile
            if tile.rows >= self._max_rows() or not self._is_packed:
                break
        assert best is not None
        return best

    def _max_rows(self) -> int:
        affordable = PROBE_FLOPS / (2 * self.in_features * self.out_features)
        return max(rows for rows in row_counts(MAX_TILE) if rows <= max(affordable, 32))

    def _probe_tile(self, x: torch.Tensor) -> RowTile:
        """The largest row count up to which all counts of the ladder give each row of x the same bits."""
        known = self._product(x[:ROW_UNIT])
        if not torch.equal(self._product(x[:ROW_UNIT].flip(0)), known.flip(0)):
            return RowTile(rows=ROW_UNIT, exact=False)
        for rows in row_counts(len(x))[1:]:
            out = self._product(x[:rows])
            num_known = len(known)
            if not torch.equal(out[:num_known], known):
                return RowTile(rows=num_known, exact=True)
            if rows.bit_count() == 1 and not torch.equal(self._product(x[:rows].flip(0)), out.flip(0)):
                return RowTile(rows=num_known, exact=True)  # a row's place in the tile matters
            known = out
        return RowTile(rows=len(known), exact=True)


def _revealing(weight: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [num_rows, in_features] and a weight like this one whose products show in which order they were summed.

    Two thirds of the terms are large and cancel in pairs: what is left is small and holds the rounding errors
    of large sums, which bfloat16's own rounding would hide otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    num_features = weight.shape[1]
    x = torch.randn(num_rows, num_features, generator=generator)
    large, partners = torch.randperm(num_features, generator=generator)[: num_features // 3 * 2].chunk(2)
    x[:, large] *= LARGE
    x[:, partners] = x[:, large]
    weight = weight.clone()
    weight[:, partners] = -weight[:, large]
    return x.to(weight.dtype), weight


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a packed product for this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
