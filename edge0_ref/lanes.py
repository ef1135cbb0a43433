"""Sixteen float32 side by side: what the fast kernels are written in.

A compiler that vectorises a loop chooses how its sum is cut up, and one token alone may then round unlike the same
token among many. Here the cut is part of the source: lane l of a sum takes elements l, l + 16, l + 32 ..., each step
is one fused multiply-add, and `total` folds the lanes. So bits depend on neither the number of tokens nor the width
of the machine's registers: sixteen lanes are one register with AVX-512, two with AVX2, four with NEON.

Every function is plain Python as well, on NumPy arrays of 16; compiled code has the instructions below it instead.
Arrays are contiguous, and an index counts elements from their start, whatever their shape.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, models, register_model, type_callable

WIDTH = 16
BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2  # what 16-bit words are patterns of; a float32 is two words, the lower one first

INDEX = ir.IntType(32)
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
WORDS = ir.VectorType(ir.IntType(32), WIDTH)
HALFWORDS = ir.VectorType(ir.IntType(16), WIDTH)
BYTES = ir.VectorType(ir.IntType(8), WIDTH)


class LanesType(types.Type):
    """How Numba calls sixteen float32 in a register."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = LanesType()


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):
    """They live in one LLVM vector."""

    def __init__(self, manager: Any, kind: LanesType) -> None:
        super().__init__(manager, kind, FLOATS)


def compiled_as(function: Any, result: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Let compiled code use the instructions that the decorated `emit(builder, *arguments)` makes for `function`."""

    @type_callable(function)
    def typed(context: Any) -> Any:
        return wraps(function)(lambda *given: result)

    def decorate(emit: Any) -> Any:
        @lower_builtin(function, *arguments)
        def lowered(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return emit(
                builder,
                *(
                    context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                    for kind, value in zip(signature.args, given, strict=True)
                ),
            )

        return emit

    return decorate


def every(kind: ir.VectorType, number: int | float) -> ir.Constant:
    return ir.Constant(kind, [number] * WIDTH)


def take(builder: Any, data: Any, index: Any, kind: ir.VectorType) -> Any:
    """Sixteen elements from `index` on, however they are aligned."""
    pointer = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
    return builder.load(pointer, align=1)


def zeros() -> Any:
    return np.zeros(WIDTH, np.float32)


@compiled_as(zeros, LANES)
def emit_zeros(builder: Any) -> Any:
    return every(FLOATS, 0.0)


def spread(value: Any) -> Any:
    """One number in every lane."""
    return np.full(WIDTH, value, np.float32)


@compiled_as(spread, LANES, types.float32)
def emit_spread(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(INDEX, 0))
    return builder.shuffle_vector(first, first, every(WORDS, 0))


def quarters(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four numbers, each in four lanes."""
    return np.repeat(np.array([a, b, c, d], np.float32), WIDTH // 4)


@compiled_as(quarters, LANES, *[types.float32] * 4)
def emit_quarters(builder: Any, *numbers: Any) -> Any:
    held: Any = ir.Constant(FLOATS, ir.Undefined)
    for place, one in enumerate(numbers):
        held = builder.insert_element(held, one, ir.Constant(INDEX, place))
    return builder.shuffle_vector(held, held, ir.Constant(WORDS, [lane // 4 for lane in range(WIDTH)]))


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once. A product of two float32 is exact in float64; adding there rounds once more, rarely."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


@compiled_as(multiply_add, LANES, LANES, LANES, LANES)
def emit_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDTH}f32")
    return builder.call(fused, [a, b, c])


def total(lanes: Any) -> Any:
    """Their sum: the upper half is added to the lower half until one is left."""
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


@compiled_as(total, types.float32, LANES)
def emit_total(builder: Any, lanes: Any) -> Any:
    half = WIDTH // 2
    while half:
        kind = ir.VectorType(INDEX, half)
        lower = builder.shuffle_vector(lanes, lanes, ir.Constant(kind, list(range(half))))
        upper = builder.shuffle_vector(lanes, lanes, ir.Constant(kind, list(range(half, 2 * half))))
        lanes, half = builder.fadd(lower, upper), half // 2
    return builder.extract_element(lanes, ir.Constant(INDEX, 0))


def load(array: Any, index: Any) -> Any:
    """Sixteen elements of a float32 array."""
    return array.reshape(-1)[index : index + WIDTH]


@compiled_as(load, LANES, types.Array, types.Integer)
def emit_load(builder: Any, data: Any, index: Any) -> Any:
    return take(builder, data, index, FLOATS)


def store(array: Any, index: Any, lanes: Any) -> Any:
    """Write sixteen elements of a float32 array."""
    array.reshape(-1)[index : index + WIDTH] = lanes


@compiled_as(store, types.void, types.Array, types.Integer, LANES)
def emit_store(builder: Any, data: Any, index: Any, lanes: Any) -> Any:
    builder.store(lanes, builder.bitcast(builder.gep(data, [index]), FLOATS.as_pointer()), align=1)


def codes(array: Any, index: Any) -> Any:
    """Sixteen bytes as numbers."""
    return array.reshape(-1)[index : index + WIDTH].astype(np.float32)


def low_codes(array: Any, index: Any) -> Any:
    """The low nibbles of sixteen bytes as numbers."""
    return (array.reshape(-1)[index : index + WIDTH] & 15).astype(np.float32)


def high_codes(array: Any, index: Any) -> Any:
    """The high nibbles of sixteen bytes as numbers."""
    return (array.reshape(-1)[index : index + WIDTH] >> 4).astype(np.float32)


def as_numbers(builder: Any, small: Any) -> Any:
    return builder.uitofp(builder.zext(small, WORDS), FLOATS)


@compiled_as(codes, LANES, types.Array, types.Integer)
def emit_codes(builder: Any, data: Any, index: Any) -> Any:
    return as_numbers(builder, take(builder, data, index, BYTES))


@compiled_as(low_codes, LANES, types.Array, types.Integer)
def emit_low_codes(builder: Any, data: Any, index: Any) -> Any:
    return as_numbers(builder, builder.and_(take(builder, data, index, BYTES), every(BYTES, 15)))


@compiled_as(high_codes, LANES, types.Array, types.Integer)
def emit_high_codes(builder: Any, data: Any, index: Any) -> Any:
    return as_numbers(builder, builder.lshr(take(builder, data, index, BYTES), every(BYTES, 4)))


def fetch(array: Any, index: Any) -> None:
    """Tell the memory that the cache line of this byte is wanted soon; beyond the end of an array it means nothing."""


@compiled_as(fetch, types.void, types.Array, types.Integer)
def emit_fetch(builder: Any, data: Any, index: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INDEX, INDEX, INDEX])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, keep, is_data = (ir.Constant(INDEX, number) for number in (0, 3, 1))
    builder.call(ask, [builder.bitcast(builder.gep(data, [index]), ir.IntType(8).as_pointer()), read, keep, is_data])
    return None


def nibbles(array: Any, index: Any, place: Any) -> Any:
    """Nibble `place`, 0 .. 6, of sixteen words of four bytes, as numbers: where it stands, so times 16**place."""
    words = array.reshape(-1)[index : index + 4 * WIDTH].view(np.int32)
    return (words & (15 << (4 * place))).astype(np.float32)


def last_nibbles(array: Any, index: Any) -> Any:
    """Nibble 7 of sixteen words, shifted down: where it stands it would be a sign."""
    return (array.reshape(-1)[index : index + 4 * WIDTH].view(np.uint32) >> 28).astype(np.float32)


@compiled_as(nibbles, LANES, types.Array, types.Integer, types.Integer)
def emit_nibbles(builder: Any, data: Any, index: Any, place: Any) -> Any:
    """Compiled with its place known this is one mask and one conversion."""
    shift = builder.mul(builder.trunc(place, INDEX), ir.Constant(INDEX, 4))
    mask = builder.insert_element(
        ir.Constant(WORDS, ir.Undefined), builder.shl(ir.Constant(INDEX, 15), shift), ir.Constant(INDEX, 0)
    )
    masks = builder.shuffle_vector(mask, mask, every(WORDS, 0))
    return builder.sitofp(builder.and_(take(builder, data, index, WORDS), masks), FLOATS)


@compiled_as(last_nibbles, LANES, types.Array, types.Integer)
def emit_last_nibbles(builder: Any, data: Any, index: Any) -> Any:
    return builder.sitofp(builder.lshr(take(builder, data, index, WORDS), every(WORDS, 28)), FLOATS)


def bfloat16s(array: Any, index: Any) -> Any:
    """Sixteen bfloat16 patterns as numbers."""
    return (array.reshape(-1)[index : index + WIDTH].astype(np.uint32) << np.uint32(16)).view(np.float32)


def float16s(array: Any, index: Any) -> Any:
    """Sixteen float16 patterns as numbers."""
    return array.reshape(-1)[index : index + WIDTH].view(np.float16).astype(np.float32)


def float32s(array: Any, index: Any) -> Any:
    """Sixteen float32, given as pairs of words, as numbers; `index` counts words."""
    return array.reshape(-1)[index : index + 2 * WIDTH].view(np.float32)


@compiled_as(bfloat16s, LANES, types.Array, types.Integer)
def emit_bfloat16s(builder: Any, data: Any, index: Any) -> Any:
    wide = builder.zext(take(builder, data, index, HALFWORDS), WORDS)
    return builder.bitcast(builder.shl(wide, every(WORDS, 16)), FLOATS)


@compiled_as(float16s, LANES, types.Array, types.Integer)
def emit_float16s(builder: Any, data: Any, index: Any) -> Any:
    return builder.fpext(take(builder, data, index, ir.VectorType(ir.HalfType(), WIDTH)), FLOATS)


@compiled_as(float32s, LANES, types.Array, types.Integer)
def emit_float32s(builder: Any, data: Any, index: Any) -> Any:
    return take(builder, data, index, FLOATS)


def number(array: Any, index: Any, kind: Any) -> Any:
    """Element `index` of 16-bit words that hold bfloat16, float16 or float32 patterns, as float32."""
    words = array.reshape(-1)
    if kind == FLOAT32:
        return words[2 * index : 2 * index + 2].view(np.float32)[0]
    one = words[index : index + 1]
    return np.float32(one.view(np.float16)[0]) if kind == FLOAT16 else (one.astype(np.uint32) << 16).view(np.float32)[0]


@compiled_as(number, types.float32, types.Array, types.Integer, types.Integer)
def emit_number(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    """Three branches and not three values to select from: a loop over elements of one kind is compiled for each."""
    single, result = ir.FloatType(), cgutils.alloca_once(builder, ir.FloatType())
    with builder.if_else(builder.icmp_signed("==", kind, ir.Constant(kind.type, FLOAT32))) as (wide, narrow):
        with wide:
            pointer = builder.gep(data, [builder.mul(index, ir.Constant(index.type, 2))])
            builder.store(builder.load(builder.bitcast(pointer, single.as_pointer()), align=1), result)
        with narrow:
            word = builder.load(builder.gep(data, [index]))
            with builder.if_else(builder.icmp_signed("==", kind, ir.Constant(kind.type, FLOAT16))) as (half, brain):
                with half:
                    builder.store(builder.fpext(builder.bitcast(word, ir.HalfType()), single), result)
                with brain:
                    bits = builder.shl(builder.zext(word, INDEX), ir.Constant(INDEX, 16))
                    builder.store(builder.bitcast(bits, single), result)
    return builder.load(result)
