"""The `numba` backend's linear layers: int4 and int8 rows multiplied as they are stored, for one token or many.

    y[t, r] = sum over groups g of  scale[r, g] * (sum over c in g of code[r, c] * x[t, c])
                                  + bias[r, g]  * (sum over c in g of x[t, c])

No row is dequantised. Coefficients are read as the 16-bit patterns they are, and the sums of x are taken once for all
rows. A row meets four tokens at a time, with the same additions in the same order for each as for one alone.
"""

from typing import no_type_check

import numba
import numpy as np
from numba import prange

from edge0_ref.lanes import (
    BFLOAT16,
    FLOAT32,
    WIDTH,
    bfloat16s,
    codes,
    float16s,
    float32s,
    high_codes,
    load,
    low_codes,
    multiply_add,
    number,
    spread,
    store,
    total,
    zeros,
)

FEW = 9  # tokens that are arranged sooner than a second thread wakes up
ROWS = 32  # a thread takes this many rows at a time, so which rows share a block depends on no thread


def linear_room(tokens: int, cols: int, size: int, rank: int) -> int:
    """How many float32 of scratch memory `linear_quantized` needs."""
    return tokens * (cols + cols // size * WIDTH + rank)


@numba.njit(cache=True, nogil=True)
@no_type_check
def room(work, rows, cols):
    """The start of `work` as [rows, cols]."""
    return work[: rows * cols].reshape(rows, cols)


@numba.njit(cache=True, nogil=True)
@no_type_check
def room_for_arranged(work, tokens, cols, size):
    """Room for activations as rows of codes meet them, for their sums by lane, and what is left of `work`."""
    used, lanes = tokens * cols, tokens * (cols // size) * WIDTH
    return room(work, tokens, cols), room(work[used:], tokens * (cols // size), WIDTH), work[used + lanes :]


@numba.njit(cache=True, nogil=True)
@no_type_check
def arrange_token(x, t, bits, size, turned, sums):
    """Token t as rows of codes meet it, turned [tokens, cols], and its sums by lane, sums [tokens * groups, 16].

    A block of 16 bytes of int4 codes holds 32 columns, the even ones in the low nibbles and the odd ones in the high
    nibbles: the even columns of each 32 go before the odd ones. int8 codes stand as they are.
    """
    cols = x.shape[1]
    for c in range(0, cols, 2 * WIDTH):
        for i in range(WIDTH):
            if bits == 4:
                turned[t, c + i], turned[t, c + WIDTH + i] = x[t, c + 2 * i], x[t, c + 2 * i + 1]
            else:
                turned[t, c + i], turned[t, c + WIDTH + i] = x[t, c + i], x[t, c + WIDTH + i]
    one = spread(np.float32(1))
    for g in range(cols // size):
        group_sum = zeros()
        for c in range(g * size, (g + 1) * size, WIDTH):
            group_sum = multiply_add(load(turned, t * cols + c), one, group_sum)
        store(sums, (t * (cols // size) + g) * WIDTH, group_sum)


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def dot_of_one(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t):
    """One row times token t. The row's bytes start at packed[code], its coefficients at scales[scale], biases[bias]."""
    cols = turned.shape[1]
    groups = cols // size
    scaled, shifted = zeros(), zeros()
    for g in range(groups):
        part = zeros()
        x = t * cols + g * size
        if bits == 4:
            first = code + g * (size // 2)
            for i in range(size // 2 // WIDTH):
                byte = first + i * WIDTH
                part = multiply_add(low_codes(packed, byte), load(turned, x + 2 * i * WIDTH), part)
                part = multiply_add(high_codes(packed, byte), load(turned, x + (2 * i + 1) * WIDTH), part)
        else:
            for i in range(size // WIDTH):
                part = multiply_add(codes(packed, code + g * size + i * WIDTH), load(turned, x + i * WIDTH), part)
        scaled = multiply_add(spread(number(scales, scale + g, kind)), part, scaled)
        shifted = multiply_add(spread(number(biases, bias + g, kind)), load(sums, (t * groups + g) * WIDTH), shifted)
    return total(multiply_add(spread(np.float32(1)), scaled, shifted))


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def dot_of_four(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t):
    """One row times tokens t .. t + 3: codes are unpacked once, and each token's additions are those of one alone."""
    cols = turned.shape[1]
    groups = cols // size
    scaled0, scaled1, scaled2, scaled3 = zeros(), zeros(), zeros(), zeros()
    shifted0, shifted1, shifted2, shifted3 = zeros(), zeros(), zeros(), zeros()
    for g in range(groups):
        part0, part1, part2, part3 = zeros(), zeros(), zeros(), zeros()
        x = t * cols + g * size
        if bits == 4:
            first = code + g * (size // 2)
            for i in range(size // 2 // WIDTH):
                even = low_codes(packed, first + i * WIDTH)
                odd = high_codes(packed, first + i * WIDTH)
                c = x + 2 * i * WIDTH
                part0 = multiply_add(odd, load(turned, c + WIDTH), multiply_add(even, load(turned, c), part0))
                c += cols
                part1 = multiply_add(odd, load(turned, c + WIDTH), multiply_add(even, load(turned, c), part1))
                c += cols
                part2 = multiply_add(odd, load(turned, c + WIDTH), multiply_add(even, load(turned, c), part2))
                c += cols
                part3 = multiply_add(odd, load(turned, c + WIDTH), multiply_add(even, load(turned, c), part3))
        else:
            for i in range(size // WIDTH):
                every = codes(packed, code + g * size + i * WIDTH)
                c = x + i * WIDTH
                part0 = multiply_add(every, load(turned, c), part0)
                part1 = multiply_add(every, load(turned, c + cols), part1)
                part2 = multiply_add(every, load(turned, c + 2 * cols), part2)
                part3 = multiply_add(every, load(turned, c + 3 * cols), part3)
        a, b = spread(number(scales, scale + g, kind)), spread(number(biases, bias + g, kind))
        s, step = (t * groups + g) * WIDTH, groups * WIDTH
        scaled0, shifted0 = multiply_add(a, part0, scaled0), multiply_add(b, load(sums, s), shifted0)
        scaled1, shifted1 = multiply_add(a, part1, scaled1), multiply_add(b, load(sums, s + step), shifted1)
        scaled2, shifted2 = multiply_add(a, part2, scaled2), multiply_add(b, load(sums, s + 2 * step), shifted2)
        scaled3, shifted3 = multiply_add(a, part3, scaled3), multiply_add(b, load(sums, s + 3 * step), shifted3)
    one = spread(np.float32(1))
    return (
        total(multiply_add(one, scaled0, shifted0)),
        total(multiply_add(one, scaled1, shifted1)),
        total(multiply_add(one, scaled2, shifted2)),
        total(multiply_add(one, scaled3, shifted3)),
    )


@numba.njit(cache=True, nogil=True)
@no_type_check
def quantized_rows(packed, code, scales, scale, biases, bias, form, turned, sums, first, last, top, end, y):
    """y[t, r] for rows top .. end - 1 and tokens first .. last - 1: four tokens for all rows, then the next four.

    code, scale, bias: where row 0 starts. The form of published checkpoints is compiled with its numbers known: short
    loops are unrolled, branches are gone.
    """
    kind, bits, size = form[0], form[1], form[2]
    usual = kind == BFLOAT16 and bits == 4 and size == 64
    row_bytes, groups = turned.shape[1] * bits // 8, turned.shape[1] // size
    t = first
    while t < last:
        four = t + 4 <= last
        for r in range(top, end):
            c, s, b = code + r * row_bytes, scale + r * groups, bias + r * groups
            if four and usual:
                y[t, r], y[t + 1, r], y[t + 2, r], y[t + 3, r] = dot_of_four(
                    packed, c, scales, s, biases, b, BFLOAT16, 4, 64, turned, sums, t
                )
            elif four:
                y[t, r], y[t + 1, r], y[t + 2, r], y[t + 3, r] = dot_of_four(
                    packed, c, scales, s, biases, b, kind, bits, size, turned, sums, t
                )
            elif usual:
                y[t, r] = dot_of_one(packed, c, scales, s, biases, b, BFLOAT16, 4, 64, turned, sums, t)
            else:
                y[t, r] = dot_of_one(packed, c, scales, s, biases, b, kind, bits, size, turned, sums, t)
        t += 4 if four else 1


@numba.njit(cache=True, nogil=True)
@no_type_check
def dense_dot(weight, row, kind, x, t):
    """Row `row` of a weight in words times token t of x; columns beyond the last whole sixteen are added one by one."""
    cols = x.shape[1]
    whole = cols // WIDTH * WIDTH
    first, token, sums = row * cols, t * cols, zeros()
    if kind == FLOAT32:
        for c in range(0, whole, WIDTH):
            sums = multiply_add(float32s(weight, 2 * (first + c)), load(x, token + c), sums)
    elif kind == BFLOAT16:
        for c in range(0, whole, WIDTH):
            sums = multiply_add(bfloat16s(weight, first + c), load(x, token + c), sums)
    else:
        for c in range(0, whole, WIDTH):
            sums = multiply_add(float16s(weight, first + c), load(x, token + c), sums)
    result = total(sums)
    for c in range(whole, cols):
        result += number(weight, first + c, kind) * x[t, c]
    return result


@numba.njit(cache=True, nogil=True)
@no_type_check
def prepare_token(x, t, form, turned, sums, down, lora_kind, low):
    """What all rows share of token t: its arrangement, and what the LoRA makes of it, low[t] = A x[t]."""
    arrange_token(x, t, form[1], form[2], turned, sums)
    for j in range(low.shape[1]):
        low[t, j] = dense_dot(down, j, lora_kind, x, t)


@numba.njit(cache=True, nogil=True)
@no_type_check
def linear_block(block, packed, scales, biases, form, turned, sums, up, lora_kind, lora_scale, low, y):
    """ROWS rows for every token, each with its own row of the LoRA added."""
    top, end = block * ROWS, min((block + 1) * ROWS, y.shape[1])
    quantized_rows(packed, 0, scales, 0, biases, 0, form, turned, sums, 0, y.shape[0], top, end, y)
    for r in range(top, end):
        if low.shape[1] > 0:
            for t in range(y.shape[0]):
                y[t, r] += lora_scale * dense_dot(up, r, lora_kind, low, t)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def linear_quantized(x, packed, scales, biases, form, down, up, lora_kind, rank, lora_scale, work, y):
    """[DEQ-010] [LOR-001] y = W x + lora_scale * B (A x), float32 throughout.

    x [tokens, cols], y [tokens, rows]; packed: bytes; scales, biases, down, up: 16-bit words, flat; form: [kind of the
    coefficients, bits, group size]; work: room for `linear_room` numbers.
    """
    turned, sums, rest = room_for_arranged(work, x.shape[0], x.shape[1], form[2])
    low = room(rest, x.shape[0], rank)
    if x.shape[0] < FEW:
        for t in range(x.shape[0]):
            prepare_token(x, t, form, turned, sums, down, lora_kind, low)
    else:
        for t in prange(x.shape[0]):
            prepare_token(x, t, form, turned, sums, down, lora_kind, low)
    for block in prange((y.shape[1] + ROWS - 1) // ROWS):
        linear_block(block, packed, scales, biases, form, turned, sums, up, lora_kind, lora_scale, low, y)


@numba.njit(cache=True, nogil=True)
@no_type_check
def dense_block(block, x, weight, kind, y):
    for r in range(block * ROWS, min((block + 1) * ROWS, y.shape[1])):
        for t in range(x.shape[0]):
            y[t, r] = dense_dot(weight, r, kind, x, t)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def linear_dense(x, weight, kind, y):
    """[DEQ-010] y = W x for a weight of float32, float16 or bfloat16 numbers, given as flat 16-bit words."""
    for block in prange((y.shape[1] + ROWS - 1) // ROWS):
        dense_block(block, x, weight, kind, y)
