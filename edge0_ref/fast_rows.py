"""The `numba` backend's quantised rows: int4 and int8 codes multiplied as they are stored, for one token or many.

    y[t, r] = sum over groups g of  scale[r, g] * (sum over c in g of code[r, c] * x[t, c])
            + sum over groups g of  bias[r, g]  * (sum over c in g of x[t, c])

No row is dequantised. Coefficients are read as the 16-bit patterns they are, and the sums of x are taken once for all
rows. Two rows meet four tokens at a time, with the same additions in the same order for each as for one alone.

Most int4 codes are not even shifted. Sixteen words of eight codes are a block of 128 columns; masking nibble j out of
a word leaves code * 16**j, which is a float32 as good as the code, and x comes divided by 16**j: both are exact. So
that small x stay clear of subnormals, all x are 4096 times as large, and each row's sum is divided by that in the end.
With an x beyond 2**112 sums may overflow here, sixteen powers of two before they must in float32.
"""

from typing import no_type_check

import numba
import numpy as np

from edge0_ref.fast_dense import numbers
from edge0_ref.lanes import (
    BFLOAT16,
    WIDTH,
    codes,
    fetch,
    high_codes,
    last_nibbles,
    load,
    low_codes,
    multiply_add,
    nibbles,
    number,
    quarters,
    spread,
    total,
    zeros,
)

BLOCK = 8 * WIDTH  # columns of int4 codes in sixteen words
RAISED = np.float32(16**3)  # the factor of all arranged x: the middle of 16**0 .. 16**6
LOWERED, SIXTEENTH = np.float32(16**-3), np.float32(16**-1)
AHEAD = 4096  # bytes of codes asked for in advance: without, a core waits for memory and computes by turns


@numba.njit(cache=True, nogil=True)
@no_type_check
def arrange_token(x, t, bits, size, turned, sums, p):
    """Row t of x as rows of codes meet it, turned[p] of [.., cols], and its sums by group, sums[p] of [.., groups].

    Column 8 l + j of a block is code j of word l and goes to lane l of sixteen for j. Where less than a block is left,
    16 bytes hold 32 columns, even ones in low nibbles, odd ones in high nibbles. int8 codes stand as they are.
    """
    cols = x.shape[1]
    whole = cols // BLOCK * BLOCK if bits == 4 else 0
    for c in range(0, whole, BLOCK):
        factor = RAISED
        for j in range(8):
            if j == 7:
                factor = RAISED  # the one that is shifted
            for i in range(WIDTH):
                turned[p, c + j * WIDTH + i] = x[t, c + 8 * i + j] * factor
            factor = factor * SIXTEENTH
    for c in range(whole, cols, 2 * WIDTH):
        for i in range(WIDTH):
            even, odd = (2 * i, 2 * i + 1) if bits == 4 else (i, WIDTH + i)
            turned[p, c + i], turned[p, c + WIDTH + i] = x[t, c + even] * RAISED, x[t, c + odd] * RAISED
    one = spread(np.float32(1))
    for g in range(cols // size):
        group_sum = zeros()
        for c in range(g * size, (g + 1) * size, WIDTH):
            group_sum = multiply_add(load(x, t * cols + c), one, group_sum)
        sums[p, g] = total(group_sum) * RAISED


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def block_numbers(words, first, kind, size):
    """The scales of a block's groups, each in the lanes of its words; `first` is the block's first group."""
    a = number(words, first, kind)
    if size == BLOCK:
        return spread(a)
    b = number(words, first + 1, kind)
    if size == BLOCK // 2:
        return quarters(a, a, b, b)
    return quarters(a, b, number(words, first + 2, kind), number(words, first + 3, kind))


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def pair_codes(packed, row, c, bits):
    """Codes of columns c .. c + 31 of a row that starts at packed[row], outside of blocks, as they are arranged."""
    if bits == 4:
        return low_codes(packed, row + c // 2), high_codes(packed, row + c // 2)
    return codes(packed, row + c), codes(packed, row + c + WIDTH)


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def store_total(lanes, biases, shift, kind, sums, t, r, y):
    """y[t, r], once the biases are added that make no sixteen."""
    result, groups = total(lanes), sums.shape[1]
    for g in range(groups // WIDTH * WIDTH, groups):
        result += number(biases, shift + g, kind) * sums[t, g]
    y[t, r] = result * LOWERED


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def rows_of_one(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t, top, end, y):
    """y[t, r] of rows top .. end - 1. Row 0 starts at packed[code], scales[scale], biases[bias]."""
    cols, groups = turned.shape[1], turned.shape[1] // size
    whole, x = cols // BLOCK * BLOCK if bits == 4 else 0, t * cols
    for r in range(top, end):
        row, group, shift, lanes = code + r * (cols * bits // 8), scale + r * groups, bias + r * groups, zeros()
        for c in range(0, whole, BLOCK):
            fetch(packed, row + c // 2 + AHEAD)
            factor, part = block_numbers(scales, group + c // size, kind, size), zeros()
            for j in range(7):
                part = multiply_add(nibbles(packed, row + c // 2, j), load(turned, x + c + j * WIDTH), part)
            part = multiply_add(last_nibbles(packed, row + c // 2), load(turned, x + c + 7 * WIDTH), part)
            lanes = multiply_add(factor, part, lanes)
        for c in range(whole, cols, 2 * WIDTH):
            factor, (even, odd) = spread(number(scales, group + c // size, kind)), pair_codes(packed, row, c, bits)
            part = multiply_add(even, load(turned, x + c), zeros())
            lanes = multiply_add(factor, multiply_add(odd, load(turned, x + c + WIDTH), part), lanes)
        for g in range(0, groups // WIDTH * WIDTH, WIDTH):
            lanes = multiply_add(numbers(biases, shift + g, kind), load(sums, t * groups + g), lanes)
        store_total(lanes, biases, shift, kind, sums, t, r, y)


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def four_zeros():
    return zeros(), zeros(), zeros(), zeros()


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def add_four(factor, x, at, step, sums):
    """sums + factor * x for four tokens: x starts at `at` for the first and `step` further for each of the next."""
    return (
        multiply_add(factor, load(x, at), sums[0]),
        multiply_add(factor, load(x, at + step), sums[1]),
        multiply_add(factor, load(x, at + 2 * step), sums[2]),
        multiply_add(factor, load(x, at + 3 * step), sums[3]),
    )


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def add_parts(factor, parts, sums):
    """sums + factor * parts for four tokens."""
    return (
        multiply_add(factor, parts[0], sums[0]),
        multiply_add(factor, parts[1], sums[1]),
        multiply_add(factor, parts[2], sums[2]),
        multiply_add(factor, parts[3], sums[3]),
    )


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def store_four(lanes, biases, shift, kind, sums, t, r, y):
    """`store_total` for four tokens."""
    result0, result1, result2, result3 = total(lanes[0]), total(lanes[1]), total(lanes[2]), total(lanes[3])
    groups = sums.shape[1]
    for g in range(groups // WIDTH * WIDTH, groups):
        one = number(biases, shift + g, kind)
        result0 += one * sums[t, g]
        result1 += one * sums[t + 1, g]
        result2 += one * sums[t + 2, g]
        result3 += one * sums[t + 3, g]
    y[t, r], y[t + 1, r] = result0 * LOWERED, result1 * LOWERED
    y[t + 2, r], y[t + 3, r] = result2 * LOWERED, result3 * LOWERED


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def rows_of_four(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t, top, end, y):
    """The same for tokens t .. t + 3, each with the additions of one alone, in their order.

    Codes are unpacked once for four tokens, and activations are loaded once for two rows: with one row at a time loads
    would take longer than additions. Of an odd number of rows the last is its own neighbour.
    """
    cols, groups = turned.shape[1], turned.shape[1] // size
    whole, x = cols // BLOCK * BLOCK if bits == 4 else 0, t * cols
    for r in range(top, end, 2):
        below = min(r + 1, end - 1)
        row, group, shift = code + r * (cols * bits // 8), scale + r * groups, bias + r * groups
        row2, group2, shift2 = code + below * (cols * bits // 8), scale + below * groups, bias + below * groups
        lanes, lanes2 = four_zeros(), four_zeros()
        for c in range(0, whole, BLOCK):
            fetch(packed, row + c // 2 + AHEAD)
            fetch(packed, row2 + c // 2 + AHEAD)
            parts, parts2 = four_zeros(), four_zeros()
            for j in range(7):
                parts = add_four(nibbles(packed, row + c // 2, j), turned, x + c + j * WIDTH, cols, parts)
                parts2 = add_four(nibbles(packed, row2 + c // 2, j), turned, x + c + j * WIDTH, cols, parts2)
            parts = add_four(last_nibbles(packed, row + c // 2), turned, x + c + 7 * WIDTH, cols, parts)
            parts2 = add_four(last_nibbles(packed, row2 + c // 2), turned, x + c + 7 * WIDTH, cols, parts2)
            lanes = add_parts(block_numbers(scales, group + c // size, kind, size), parts, lanes)
            lanes2 = add_parts(block_numbers(scales, group2 + c // size, kind, size), parts2, lanes2)
        for c in range(whole, cols, 2 * WIDTH):
            (even, odd), (even2, odd2) = pair_codes(packed, row, c, bits), pair_codes(packed, row2, c, bits)
            parts = add_four(odd, turned, x + c + WIDTH, cols, add_four(even, turned, x + c, cols, four_zeros()))
            parts2 = add_four(odd2, turned, x + c + WIDTH, cols, add_four(even2, turned, x + c, cols, four_zeros()))
            lanes = add_parts(spread(number(scales, group + c // size, kind)), parts, lanes)
            lanes2 = add_parts(spread(number(scales, group2 + c // size, kind)), parts2, lanes2)
        for g in range(0, groups // WIDTH * WIDTH, WIDTH):
            lanes = add_four(numbers(biases, shift + g, kind), sums, t * groups + g, groups, lanes)
            lanes2 = add_four(numbers(biases, shift2 + g, kind), sums, t * groups + g, groups, lanes2)
        store_four(lanes, biases, shift, kind, sums, t, r, y)
        store_four(lanes2, biases, shift2, kind, sums, t, below, y)


@numba.njit(cache=True, nogil=True)
@no_type_check
def quantized_rows(packed, code, scales, scale, biases, bias, form, turned, sums, first, last, top, end, y):
    """y[t, r] for rows top .. end - 1 and tokens first .. last - 1: four tokens for all rows, then the next four.

    code, scale, bias: where row 0 starts. The form of published checkpoints is compiled with its numbers known: short
    loops are unrolled, branches are gone.
    """
    kind, bits, size = form[0], form[1], form[2]
    usual = kind == BFLOAT16 and bits == 4 and size == 64
    t = first
    while t < last:
        four = t + 4 <= last
        if four and usual:
            rows_of_four(packed, code, scales, scale, biases, bias, BFLOAT16, 4, 64, turned, sums, t, top, end, y)
        elif four:
            rows_of_four(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t, top, end, y)
        elif usual:
            rows_of_one(packed, code, scales, scale, biases, bias, BFLOAT16, 4, 64, turned, sums, t, top, end, y)
        else:
            rows_of_one(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t, top, end, y)
        t += 4 if four else 1
