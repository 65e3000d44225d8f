"""The fastest product there is for a weight: matrix tiles where the processor has them, oneDNN's packed one elsewhere.

On tiles one kernel of ours takes any number of rows at the price of 16, reads a weight as fast as memory gives it, and
needs no padding; a row's bits are its own by construction, and in bfloat16 they are oneDNN's. A weight of 8 bits is
widened, exactly, as it is read.
"""

import threading
from functools import cache

import numpy as np
import torch

from worker import amx, cpu_kernels, large_pages
from worker.linear import Linear
from worker.quantized import Int8Linear, quantize

PANEL = cpu_kernels.PANEL
PAIR = 2  # neighbours along the inputs that a tile keeps together

_local = threading.local()  # .scratch: of the thread that calls, and of those that help it


class TileLinear(Linear):
    """`x @ weight.T + bias` in bfloat16 on AMX tiles, the weight in bfloat16 or in 8 bits."""

    pads_rows = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_int8: bool = False) -> None:
        """weight: [out_features, in_features] bfloat16, multiples of 32."""
        assert amx.is_available()
        self.out_features, self.in_features = weight.shape
        self.tile = None
        self._scale: torch.Tensor | None = None
        if is_int8:
            weight, self._scale = quantize(weight)
        self.kind = cpu_kernels.INT8 if is_int8 else cpu_kernels.BFLOAT16
        self._panels = large_pages.weights.copy(columns(weight) if is_int8 else pairs(weight))
        self._bias = None if bias is None else bias.float().contiguous()
        self._scratch_bytes = cpu_kernels.tile_scratch(self.in_features)
        held = (self._panels, self._scale, self._bias)
        self.addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in held)

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits are the same in any company: they are."""
        return True

    @property
    def num_bytes(self) -> int:
        """Of the weight: what a product reads at least."""
        return self._panels.nbytes

    @property
    def kernel(self) -> str:
        """What decides the order of its sums, in a word."""
        return f"amx-{cpu_kernels.SOURCE_HASH}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, in_features] bfloat16; [num_rows, out_features] bfloat16."""
        x = x.contiguous()
        num_rows, num_threads = len(x), torch.get_num_threads()
        out = torch.empty((num_rows, self.out_features), dtype=torch.bfloat16)
        cpu_kernels.tile_linear(
            self.kind, x.data_ptr(), *self.addresses, out.data_ptr(), num_rows, self.in_features, self.out_features,
            configurations().ctypes.data, scratch(num_threads * self._scratch_bytes), num_threads,
        )  # fmt: skip
        return out


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product with the weight as it is."""
    return TileLinear(weight, bias) if _fits_tiles(weight) else Linear(weight, bias)


def int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product with the weight rounded to 8 bits; ValueError where no kernel can take it."""
    return TileLinear(weight, bias, is_int8=True) if _fits_tiles(weight) else Int8Linear(weight, bias)


@cache
def configurations() -> np.ndarray:
    """Of the tiles for each number of rows in a block: [33, 64] uint8."""
    return np.stack([amx.configuration(tile_rows(rows)) for rows in range(cpu_kernels.ROW_BLOCK + 1)])


def scratch(num_bytes: int) -> int:
    """The address of so much memory for one call of this thread; asking for it in each call costs page faults."""
    held: torch.Tensor | None = getattr(_local, "scratch", None)
    if held is None or len(held) < num_bytes:
        held = _local.scratch = torch.empty(num_bytes, dtype=torch.uint8)
    return held.data_ptr()


def pairs(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as tiles read it: [out / 32, in / 2, 32, 2], each panel one stretch of memory."""
    num_out, num_in = weight.shape
    return weight.view(num_out // PANEL, PANEL, num_in // PAIR, PAIR).transpose(1, 2)


def columns(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as it is widened: [out / 32, in, 32]."""
    num_out, num_in = weight.shape
    return weight.view(num_out // PANEL, PANEL, num_in).transpose(1, 2)


def tile_rows(num_rows: int) -> list[int]:
    """Rows of the 8 tiles for a block of up to 32 rows; a tile without rows is configured with one and not used."""
    a, b = min(max(num_rows, 1), amx.TILE_ROWS), max(num_rows - amx.TILE_ROWS, 1)
    rows = {amx.SUM_A0: a, amx.SUM_A1: a, amx.ROWS_A: a, amx.SUM_B0: b, amx.SUM_B1: b, amx.ROWS_B: b}
    return [rows.get(tile, amx.TILE_ROWS) for tile in range(amx.NUM_TILES)]


def _fits_tiles(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and not any(size % PANEL for size in weight.shape)
        and amx.is_available()
    )
