"""Vectors of 16 floats for kernels that Numba compiles.

An order of additions that a compiler may choose is one that may change with a loop's neighbours. These
functions say it: every lane, every fused multiply-add and every reduction tree is written out, so the same
numbers come out of every loop they are inlined into and, but for the libraries beside them, of every machine.
LLVM splits a vector where the machine's are narrower. Addresses are integers, sizes in elements unless said.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
FLOAT_BYTES = 4

_F32 = ir.FloatType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_HALVES = ir.VectorType(_I16, LANES)
_WORDS = ir.VectorType(_I32, LANES)

LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6
EXP_LOWEST = -87.0  # below it a result is denormal: 0 here
# Of exp(r) on |r| <= ln(2) / 2, from Cephes' expf (S. Moshier), highest power first.
EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0e-1)

Codegen = Callable[[Any, Any, Any, Sequence[Any]], Any]


class _VectorType(types.Type):
    """Numba's name for 16 floats in a register."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


vector_type = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Any) -> None:
        super().__init__(manager, vector, _VECTOR)


# ---- memory ----


def is_bfloat16(kind: Any) -> bool:
    """Kernels are compiled by the type of their `kind`: int16 stands for bfloat16, float32 for itself."""
    return bool(kind == types.int16)


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _constant(kind: Any, value: float) -> Any:
    """A number, in every lane of a vector."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _read(builder: Any, kind: Any, address: Any, floats: Any, words: Any, halves: Any) -> Any:
    """One element or 16 of them, by the types of a float, of its bits, and of a bfloat16's bits."""
    if not is_bfloat16(kind):
        return builder.load(_pointer(builder, address, floats), align=FLOAT_BYTES)
    wide = builder.zext(builder.load(_pointer(builder, address, halves), align=2), words)
    return builder.bitcast(builder.shl(wide, _constant(words, 16)), floats)


def _write(builder: Any, kind: Any, address: Any, value: Any, floats: Any, words: Any, halves: Any) -> None:
    """The same back: a bfloat16 is the nearest, the even one of two."""
    if not is_bfloat16(kind):
        builder.store(value, _pointer(builder, address, floats), align=FLOAT_BYTES)
        return
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, _constant(words, 16)), _constant(words, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _constant(words, 0x7FFF))), _constant(words, 16))
    builder.store(builder.trunc(rounded, halves), _pointer(builder, address, halves), align=2)


def _load_int8(builder: Any, address: Any) -> Any:
    """16 int8 as float32."""
    return builder.sitofp(builder.sext(builder.load(_pointer(builder, address, _BYTES), align=1), _WORDS), _VECTOR)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, _VECTOR), align=FLOAT_BYTES)


@intrinsic
def load(typing: Any, kind: Any, address: Any) -> tuple[Any, Codegen]:
    """16 elements at an address, widened to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _read(builder, kind, args[1], _VECTOR, _WORDS, _HALVES)

    return vector_type(kind, types.int64), codegen


@intrinsic
def store(typing: Any, kind: Any, address: Any, vector: Any) -> tuple[Any, Codegen]:
    """Write 16 elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        _write(builder, kind, args[1], args[2], _VECTOR, _WORDS, _HALVES)
        return context.get_dummy_value()

    return types.void(kind, types.int64, vector_type), codegen


@intrinsic
def widen_int8_pairs(typing: Any, first: Any, second: Any, target: Any) -> tuple[Any, Codegen]:
    """16 int8 at an address and 16 at another become 16 pairs of bfloat16, exactly."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        first, second, target = args
        low = builder.lshr(builder.bitcast(_load_int8(builder, first), _WORDS), _constant(_WORDS, 16))
        high = builder.bitcast(_load_int8(builder, second), _WORDS)  # an integer of 8 bits ends in 16 zeros
        builder.store(builder.or_(low, high), _pointer(builder, target, _WORDS), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_one(typing: Any, kind: Any, address: Any) -> tuple[Any, Codegen]:
    """One element, widened to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _read(builder, kind, args[1], _F32, _I32, _I16)

    return types.float32(kind, types.int64), codegen


@intrinsic
def store_one(typing: Any, kind: Any, address: Any, value: Any) -> tuple[Any, Codegen]:
    """Write one element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        _write(builder, kind, args[1], args[2], _F32, _I32, _I16)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.float32), codegen


@intrinsic
def load_int32(typing: Any, address: Any) -> tuple[Any, Codegen]:
    """One int32, widened to int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return builder.sext(builder.load(_pointer(builder, args[0], _I32), align=4), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def load_int64(typing: Any, address: Any) -> tuple[Any, Codegen]:
    """One int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return builder.load(_pointer(builder, args[0], _I64), align=8)

    return types.int64(types.int64), codegen


# ---- arithmetic ----


def _call(builder: Any, name: str, *args: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * len(args)), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, args)


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _constant(_WORDS, 0))


def _binary(emit: Callable[..., Any]) -> Any:
    @intrinsic
    def operation(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
        return vector_type(vector_type, vector_type), lambda context, builder, signature, args: emit(builder, *args)

    return operation


@intrinsic
def splat(typing: Any, value: Any) -> tuple[Any, Codegen]:
    """One float32 in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _splat(builder, args[0])

    return vector_type(types.float32), codegen


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


add = _binary(lambda builder, a, b: builder.fadd(a, b))
sub = _binary(lambda builder, a, b: builder.fsub(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(_larger)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> tuple[Any, Codegen]:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _call(builder, "fma", *args)

    return vector_type(vector_type, vector_type, vector_type), codegen


def _exp(builder: Any, x: Any) -> Any:
    underflows = builder.fcmp_ordered("<", x, _constant(_VECTOR, EXP_LOWEST))
    x = builder.select(underflows, _constant(_VECTOR, EXP_LOWEST), x)
    power = _call(builder, "rint", builder.fmul(x, _constant(_VECTOR, LOG2_E)))
    rest = _call(builder, "fma", power, _constant(_VECTOR, -LN2_HIGH), x)
    rest = _call(builder, "fma", power, _constant(_VECTOR, -LN2_LOW), rest)
    value = _constant(_VECTOR, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        value = _call(builder, "fma", value, rest, _constant(_VECTOR, coefficient))
    value = _call(builder, "fma", builder.fmul(value, rest), rest, builder.fadd(rest, _constant(_VECTOR, 1.0)))
    exponent = builder.add(builder.fptosi(power, _WORDS), _constant(_WORDS, 127))
    value = builder.fmul(value, builder.bitcast(builder.shl(exponent, _constant(_WORDS, 23)), _VECTOR))
    return builder.select(underflows, _constant(_VECTOR, 0.0), value)


@intrinsic
def exp(typing: Any, a: Any) -> tuple[Any, Codegen]:
    """e ** a of finite or minus infinite lanes, exactly 0 below -87; relative error about 1e-7."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _exp(builder, args[0])

    return vector_type(vector_type), codegen


# ---- across lanes ----


def _fold(builder: Any, vector: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """Combine the upper half of the lanes with the lower, until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        upper = ir.Constant(_WORDS, [(lane + width) % LANES for lane in range(LANES)])
        vector = emit(vector, builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), upper))
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@intrinsic
def total(typing: Any, a: Any) -> tuple[Any, Codegen]:
    """The sum of all lanes, by halves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(vector_type), codegen


@intrinsic
def highest(typing: Any, a: Any) -> tuple[Any, Codegen]:
    """The largest lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        return _fold(builder, args[0], partial(_larger, builder))

    return types.float32(vector_type), codegen


@intrinsic
def dot_products(typing: Any, query: Any, keys: Any, size: Any) -> tuple[Any, Codegen]:
    """query [size] times 16 keys [16, size], all float32: one product in each lane. size is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        query, keys, size = args
        sums = [cgutils.alloca_once_value(builder, _constant(_VECTOR, 0.0)) for _ in range(LANES)]
        with cgutils.for_range(builder, builder.sdiv(size, ir.Constant(_I64, LANES))) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, LANES * FLOAT_BYTES))
            factor = _load(builder, builder.add(query, offset))
            row_bytes = builder.mul(size, ir.Constant(_I64, FLOAT_BYTES))
            address = builder.add(keys, offset)
            for total in sums:
                builder.store(_call(builder, "fma", factor, _load(builder, address), builder.load(total)), total)
                address = builder.add(address, row_bytes)
        return _totals(builder, [builder.load(total) for total in sums])

    return vector_type(types.int64, types.int64, types.int64), codegen


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """The sums of 16 vectors' lanes side by side: at each level two vectors become one with half the lanes of each."""
    width = LANES
    while len(vectors) > 1:
        width //= 2
        group = 2 * width  # lanes that still belong to one sum
        lower = [lane for lane in range(2 * LANES) if lane % group < width]
        first, second = ir.Constant(_WORDS, lower), ir.Constant(_WORDS, [lane + width for lane in lower])
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


@intrinsic
def int8_products(typing: Any, x: Any, x_stride: Any, weight: Any, size: Any) -> tuple[Any, Codegen]:
    """4 rows of x float32, x_stride bytes apart, times 4 rows [4, size] of an int8 weight.

    Lane 4 * i + j is row i times weight row j. size is a multiple of 16.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        x, x_stride, weight, size = args
        sums = [cgutils.alloca_once_value(builder, _constant(_VECTOR, 0.0)) for _ in range(LANES)]
        with cgutils.for_range(builder, builder.sdiv(size, ir.Constant(_I64, LANES))) as loop:
            start = builder.mul(loop.index, ir.Constant(_I64, LANES))
            address, columns = builder.add(weight, start), []
            for _ in range(4):
                columns.append(_load_int8(builder, address))
                address = builder.add(address, size)
            address = builder.add(x, builder.mul(start, ir.Constant(_I64, FLOAT_BYTES)))
            for row in range(4):
                factor = _load(builder, address)
                address = builder.add(address, x_stride)
                for total, column in zip(sums[4 * row : 4 * row + 4], columns, strict=True):
                    builder.store(_call(builder, "fma", factor, column, builder.load(total)), total)
        return _totals(builder, [builder.load(total) for total in sums])

    return vector_type(types.int64, types.int64, types.int64, types.int64), codegen


def tile_order_products(num_rows: int, num_groups: int) -> Any:
    """An intrinsic: rows of x float32 times a panel of int8 [size, 16 * num_groups], in the order of AMX tiles.

    That is, for each 32 terms the even ones and the odd ones are summed from zero, then both sums are added to
    what is there. It takes (x, x_stride in bytes, panel, size, sums) and writes sums [num_rows, 16 * num_groups].
    """
    num_sums = num_rows * num_groups
    panel_bytes = num_groups * LANES

    @intrinsic
    def products(typing: Any, x: Any, x_stride: Any, panel: Any, size: Any, sums: Any) -> tuple[Any, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
            x, x_stride, panel, size, out = args
            zero = _constant(_VECTOR, 0.0)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(num_sums)]
            halves = [[cgutils.alloca_once_value(builder, zero) for _ in range(num_sums)] for _ in range(2)]
            rows = [builder.add(x, builder.mul(x_stride, ir.Constant(_I64, row))) for row in range(num_rows)]
            with cgutils.for_range(builder, builder.sdiv(size, ir.Constant(_I64, 2 * LANES))) as chunk:
                for half in halves:
                    for partial_sum in half:
                        builder.store(zero, partial_sum)
                first = builder.mul(chunk.index, ir.Constant(_I64, 2 * LANES))
                with cgutils.for_range(builder, ir.Constant(_I64, LANES)) as pair:
                    even = builder.add(first, builder.mul(pair.index, ir.Constant(_I64, 2)))
                    for offset, half in enumerate(halves):
                        term = builder.add(even, ir.Constant(_I64, offset))
                        columns = builder.add(panel, builder.mul(term, ir.Constant(_I64, panel_bytes)))
                        widened = [
                            _load_int8(builder, builder.add(columns, ir.Constant(_I64, group * LANES)))
                            for group in range(num_groups)
                        ]
                        for row, address in enumerate(rows):
                            at = builder.add(address, builder.mul(term, ir.Constant(_I64, FLOAT_BYTES)))
                            factor = _splat(builder, builder.load(_pointer(builder, at, _F32), align=FLOAT_BYTES))
                            for group, column in enumerate(widened):
                                held = half[row * num_groups + group]
                                builder.store(_call(builder, "fma", factor, column, builder.load(held)), held)
                for total, even_sum, odd_sum in zip(totals, *halves, strict=True):
                    both = builder.fadd(builder.load(even_sum), builder.load(odd_sum))
                    builder.store(builder.fadd(builder.load(total), both), total)
            for index, total in enumerate(totals):
                address = builder.add(out, ir.Constant(_I64, index * LANES * FLOAT_BYTES))
                builder.store(builder.load(total), _pointer(builder, address, _VECTOR), align=FLOAT_BYTES)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return products


def _control(name: str, change: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic that changes the processor's floating-point control word; it takes an address of scratch."""

    @intrinsic
    def control(typing: Any, scratch: Any) -> tuple[Any, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
            word = builder.bitcast(pointer, _I32.as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [pointer.type])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.stmxcsr"), [pointer])
            builder.store(change(builder, builder.load(word)), word)
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.ldmxcsr"), [pointer])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    control.__name__ = name
    return control


_NO_DENORMALS = 0x8040  # of MXCSR: denormal results are 0, denormal operands count as 0
ignore_denormals = _control("ignore_denormals", lambda b, word: b.or_(word, ir.Constant(_I32, _NO_DENORMALS)))
heed_denormals = _control("heed_denormals", lambda b, word: b.and_(word, ir.Constant(_I32, ~_NO_DENORMALS)))


@intrinsic
def add_weighted(typing: Any, weights: Any, values: Any, out: Any, size: Any) -> tuple[Any, Codegen]:
    """out [size] += weights [16] times values [16, size], key by key; all float32. size is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        weights, values, out, size = args
        addresses = [builder.add(weights, _offset(lane)) for lane in range(LANES)]
        factors = [
            _splat(builder, builder.load(_pointer(builder, address, _F32), align=FLOAT_BYTES)) for address in addresses
        ]
        row_bytes = builder.mul(size, ir.Constant(_I64, FLOAT_BYTES))
        with cgutils.for_range(builder, builder.sdiv(size, ir.Constant(_I64, LANES))) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, LANES * FLOAT_BYTES))
            target = _pointer(builder, builder.add(out, offset), _VECTOR)
            total = builder.load(target, align=FLOAT_BYTES)
            address = builder.add(values, offset)
            for factor in factors:
                total = _call(builder, "fma", factor, _load(builder, address), total)
                address = builder.add(address, row_bytes)
            builder.store(total, target, align=FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _offset(index: int) -> Any:
    return ir.Constant(_I64, index * FLOAT_BYTES)
