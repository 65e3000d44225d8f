"""Intel's matrix tiles (AMX) for kernels that Numba compiles: 16 rows times 16 columns over 32 bfloat16 in one go.

A product of tiles sums its 32 terms in an order of its own and adds them to the float32 sums that are there
(Intel SDM volume 2, TDPBF16PS): a row's bits cannot depend on the rows beside it. The registers are numbers
in the instructions and no variables; nothing else may use them between `configure` and `release`.
"""

import ctypes
import logging
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

log = logging.getLogger(__name__)

TILE_ROWS = 16
TILE_BYTES = 64  # of a row: 32 bfloat16, or 16 float32
CONFIG_BYTES = 64
NUM_TILES = 8
FLAGS = {"amx_tile", "amx_bf16"}
# Of Linux on x86-64 (Documentation/arch/x86/xstate.rst).
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_ADDRESS = _I8.as_pointer()
Codegen = Callable[[Any, Any, Any, Sequence[Any]], Any]


@cache
def is_available() -> bool:
    """Whether this machine has the tiles and the kernel lets this process use them; asks it to."""
    if platform.machine() != "x86_64":
        return False
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    if not set(flags.split()) >= FLAGS:
        return False
    granted: bool = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
    if not granted:
        log.warning("this processor has AMX tiles, but the kernel refuses them: products are oneDNN's, and slower")
    return granted


def configuration(rows: Sequence[int]) -> np.ndarray:
    """What `configure` loads: rows of each of the 8 tiles, all of full width. [64] uint8."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1  # palette
    config[16:32:2] = TILE_BYTES
    config[48:56] = rows
    return config


def _emit(name: str, tiles: Sequence[int]) -> Codegen:
    """A call of an instruction with these registers, then an address and a stride if there are any."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        values = [ir.Constant(_I8, tile) for tile in tiles]
        if args:
            values += [builder.inttoptr(args[0], _ADDRESS), *args[1:]]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [value.type for value in values]), f"llvm.x86.{name}"
        )
        builder.call(function, values)
        return context.get_dummy_value()

    return codegen


def _alone(name: str, *tiles: int) -> Any:
    @intrinsic
    def instruction(typing: Any) -> tuple[Any, Codegen]:
        return types.void(), _emit(name, tiles)

    return instruction


def _at(name: str, *tiles: int) -> Any:
    @intrinsic
    def instruction(typing: Any, address: Any) -> tuple[Any, Codegen]:
        return types.void(types.int64), _emit(name, tiles)

    return instruction


def _strided(name: str, tile: int) -> Any:
    @intrinsic
    def instruction(typing: Any, address: Any, stride: Any) -> tuple[Any, Codegen]:
        return types.void(types.int64, types.int64), _emit(name, (tile,))

    return instruction


configure = _at("ldtilecfg")
release = _alone("tilerelease")
# Sums of two tiles of rows, A and B, by two tiles of columns, 0 and 1; then the factors themselves.
SUM_A0, SUM_A1, SUM_B0, SUM_B1, ROWS_A, ROWS_B, COLUMNS_0, COLUMNS_1 = range(NUM_TILES)
zero_a0, zero_a1 = _alone("tilezero", SUM_A0), _alone("tilezero", SUM_A1)
zero_b0, zero_b1 = _alone("tilezero", SUM_B0), _alone("tilezero", SUM_B1)
load_rows_a, load_rows_b = _strided("tileloadd64", ROWS_A), _strided("tileloadd64", ROWS_B)
load_columns_0, load_columns_1 = _strided("tileloadd64", COLUMNS_0), _strided("tileloadd64", COLUMNS_1)
store_a0, store_a1 = _strided("tilestored64", SUM_A0), _strided("tilestored64", SUM_A1)
store_b0, store_b1 = _strided("tilestored64", SUM_B0), _strided("tilestored64", SUM_B1)
multiply_a0 = _alone("tdpbf16ps", SUM_A0, ROWS_A, COLUMNS_0)
multiply_a1 = _alone("tdpbf16ps", SUM_A1, ROWS_A, COLUMNS_1)
multiply_b0 = _alone("tdpbf16ps", SUM_B0, ROWS_B, COLUMNS_0)
multiply_b1 = _alone("tdpbf16ps", SUM_B1, ROWS_B, COLUMNS_1)
