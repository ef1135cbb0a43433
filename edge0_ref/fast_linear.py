"""The `numba` backend's linear layers: int4 and int8 rows multiplied as they are stored, for one token or many.

    y[t, r] = sum over groups g of  scale[r, g] * (sum over c in g of code[r, c] * x[t, c])
            + sum over groups g of  bias[r, g]  * (sum over c in g of x[t, c])

No row is dequantised. Coefficients are read as the 16-bit patterns they are, and the sums of x are taken once for all
rows. A row meets four tokens at a time, with the same additions in the same order for each as for one alone.

Most int4 codes are not even shifted. Sixteen words of eight codes are a block of 128 columns; masking nibble j out of
a word leaves code * 16**j, which is a float32 as good as the code, and x comes divided by 16**j: both are exact. So
that small x stay clear of subnormals, all x are 4096 times as large, and each row's sum is divided by that in the end.
With an x beyond 2**112 sums may overflow here, sixteen powers of two before they must in float32.
"""

from typing import no_type_check

import numba
import numpy as np
from numba import prange

from edge0_ref.fast_dense import dense_rows, numbers
from edge0_ref.fast_shares import share, take_task
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
    store,
    total,
    zeros,
)

FEW = 9  # tokens that are arranged sooner than a second thread wakes up
BLOCK = 8 * WIDTH  # columns of int4 codes in sixteen words
RAISED = np.float32(16**3)  # the factor of all arranged x: the middle of 16**0 .. 16**6
LOWERED, SIXTEENTH = np.float32(16**-3), np.float32(16**-1)
AHEAD = 4096  # bytes of codes asked for in advance: without, a core waits for memory and computes by turns


def linear_room(tokens: int, cols: int, size: int, rank: int) -> int:
    """How many float32 of scratch memory `linear_quantized` needs."""
    return tokens * (cols + cols // size + rank)


@numba.njit(cache=True, nogil=True)
@no_type_check
def room(work, rows, cols):
    """The start of `work` as [rows, cols]."""
    return work[: rows * cols].reshape(rows, cols)


@numba.njit(cache=True, nogil=True)
@no_type_check
def room_for_arranged(work, tokens, cols, size):
    """Room for activations as rows of codes meet them, for their sums by group, and what is left of `work`."""
    used, groups = tokens * cols, cols // size
    return room(work, tokens, cols), room(work[used:], tokens, groups), work[used + tokens * groups :]


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
def dot_of_block(codes, turned, at):
    """Eight sixteens of codes times the block of `turned` that starts at `at`."""
    part = multiply_add(codes[0], load(turned, at), zeros())
    part = multiply_add(codes[1], load(turned, at + WIDTH), part)
    part = multiply_add(codes[2], load(turned, at + 2 * WIDTH), part)
    part = multiply_add(codes[3], load(turned, at + 3 * WIDTH), part)
    part = multiply_add(codes[4], load(turned, at + 4 * WIDTH), part)
    part = multiply_add(codes[5], load(turned, at + 5 * WIDTH), part)
    part = multiply_add(codes[6], load(turned, at + 6 * WIDTH), part)
    return multiply_add(codes[7], load(turned, at + 7 * WIDTH), part)


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def block_codes(packed, at):
    """The codes of a block as `dot_of_block` takes them."""
    return (
        nibbles(packed, at, 0),
        nibbles(packed, at, 1),
        nibbles(packed, at, 2),
        nibbles(packed, at, 3),
        nibbles(packed, at, 4),
        nibbles(packed, at, 5),
        nibbles(packed, at, 6),
        last_nibbles(packed, at),
    )


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
def dot_of_pair(packed, code, c, bits, turned, at):
    """Columns c .. c + 31 of a row that starts at packed[code], outside of blocks, times 32 of `turned`."""
    if bits == 4:
        even, odd = low_codes(packed, code + c // 2), high_codes(packed, code + c // 2)
    else:
        even, odd = codes(packed, code + c), codes(packed, code + c + WIDTH)
    return multiply_add(odd, load(turned, at + WIDTH), multiply_add(even, load(turned, at), zeros()))


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def rows_of_one(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t, top, end, y):
    """y[t, r] of rows top .. end - 1. Row 0 starts at packed[code], scales[scale], biases[bias]."""
    cols, groups = turned.shape[1], turned.shape[1] // size
    whole, sixteens, x = cols // BLOCK * BLOCK if bits == 4 else 0, groups // WIDTH * WIDTH, t * cols
    for r in range(top, end):
        row, group, shift, lanes = code + r * (cols * bits // 8), scale + r * groups, bias + r * groups, zeros()
        for c in range(0, whole, BLOCK):
            fetch(packed, row + c // 2 + AHEAD)
            factor, unpacked = block_numbers(scales, group + c // size, kind, size), block_codes(packed, row + c // 2)
            lanes = multiply_add(factor, dot_of_block(unpacked, turned, x + c), lanes)
        for c in range(whole, cols, 2 * WIDTH):
            factor = spread(number(scales, group + c // size, kind))
            lanes = multiply_add(factor, dot_of_pair(packed, row, c, bits, turned, x + c), lanes)
        for g in range(0, sixteens, WIDTH):
            lanes = multiply_add(numbers(biases, shift + g, kind), load(sums, t * groups + g), lanes)
        result = total(lanes)
        for g in range(sixteens, groups):
            result += number(biases, shift + g, kind) * sums[t, g]
        y[t, r] = result * LOWERED


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def rows_of_four(packed, code, scales, scale, biases, bias, kind, bits, size, turned, sums, t, top, end, y):
    """The same for tokens t .. t + 3: codes are unpacked once, and each token's additions are those of one alone."""
    cols, groups = turned.shape[1], turned.shape[1] // size
    whole, sixteens, x = cols // BLOCK * BLOCK if bits == 4 else 0, groups // WIDTH * WIDTH, t * cols
    for r in range(top, end):
        row, group, shift = code + r * (cols * bits // 8), scale + r * groups, bias + r * groups
        lanes0, lanes1, lanes2, lanes3 = zeros(), zeros(), zeros(), zeros()
        for c in range(0, whole, BLOCK):
            fetch(packed, row + c // 2 + AHEAD)
            factor, unpacked = block_numbers(scales, group + c // size, kind, size), block_codes(packed, row + c // 2)
            at = x + c
            lanes0 = multiply_add(factor, dot_of_block(unpacked, turned, at), lanes0)
            lanes1 = multiply_add(factor, dot_of_block(unpacked, turned, at + cols), lanes1)
            lanes2 = multiply_add(factor, dot_of_block(unpacked, turned, at + 2 * cols), lanes2)
            lanes3 = multiply_add(factor, dot_of_block(unpacked, turned, at + 3 * cols), lanes3)
        for c in range(whole, cols, 2 * WIDTH):
            factor, at = spread(number(scales, group + c // size, kind)), x + c
            lanes0 = multiply_add(factor, dot_of_pair(packed, row, c, bits, turned, at), lanes0)
            lanes1 = multiply_add(factor, dot_of_pair(packed, row, c, bits, turned, at + cols), lanes1)
            lanes2 = multiply_add(factor, dot_of_pair(packed, row, c, bits, turned, at + 2 * cols), lanes2)
            lanes3 = multiply_add(factor, dot_of_pair(packed, row, c, bits, turned, at + 3 * cols), lanes3)
        for g in range(0, sixteens, WIDTH):
            shifts, at = numbers(biases, shift + g, kind), t * groups + g
            lanes0 = multiply_add(shifts, load(sums, at), lanes0)
            lanes1 = multiply_add(shifts, load(sums, at + groups), lanes1)
            lanes2 = multiply_add(shifts, load(sums, at + 2 * groups), lanes2)
            lanes3 = multiply_add(shifts, load(sums, at + 3 * groups), lanes3)
        result0, result1, result2, result3 = total(lanes0), total(lanes1), total(lanes2), total(lanes3)
        for g in range(sixteens, groups):
            one = number(biases, shift + g, kind)
            result0 += one * sums[t, g]
            result1 += one * sums[t + 1, g]
            result2 += one * sums[t + 2, g]
            result3 += one * sums[t + 3, g]
        y[t, r], y[t + 1, r] = result0 * LOWERED, result1 * LOWERED
        y[t + 2, r], y[t + 3, r] = result2 * LOWERED, result3 * LOWERED


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


@numba.njit(cache=True, nogil=True)
@no_type_check
def prepare_token(x, t, form, turned, sums, down, lora_kind, low):
    """What all rows share of token t: its arrangement, and what the LoRAs make of it, low[t] = A x[t]."""
    arrange_token(x, t, form[1], form[2], turned, sums, t)
    dense_rows(down, lora_kind, x, t, 0, 0, low.shape[1], low)


@numba.njit(cache=True, nogil=True)
@no_type_check
def add_update(up, start, rows, kind, low, at, rank, factor, t, top, end, y):
    """y[t, r] += factor * (B A x)[r] for top <= r < end, A x being low[at .. at + rank - 1].

    B is read by columns, sixteen rows at a time: rank is small, and a row's few numbers are not worth a sum of lanes.
    Number [r, k] of B is up[start + k * rows + r].
    """
    flat, place = low.reshape(-1), t * y.shape[1]
    whole = top + (end - top) // WIDTH * WIDTH
    for r in range(top, whole, WIDTH):
        update = zeros()
        for k in range(rank):
            update = multiply_add(numbers(up, start + k * rows + r, kind), spread(flat[at + k]), update)
        store(y, place + r, multiply_add(update, spread(factor), load(y, place + r)))
    for r in range(whole, end):
        update = np.float32(0)
        for k in range(rank):
            update += number(up, start + k * rows + r, kind) * flat[at + k]
        y[t, r] += update * factor


@numba.njit(cache=True, nogil=True)
@no_type_check
def linear_task(task, parts, packed, scales, biases, form, turned, sums, up, lora_kind, factors, low, y):
    """A few rows of one part for every token, each with its own row of the part's LoRA added."""
    part, top, end = task[0], task[1], task[2]
    zero = np.int64(0)  # as a literal it would be a type of its own, and all rows compiled again
    quantized_rows(packed, zero, scales, zero, biases, zero, form, turned, sums, zero, y.shape[0], top, end, y)
    rank, before, start, rows = parts[part, 0], parts[part, 1], parts[part, 2], parts[part, 3]
    if rank > 0:
        for t in range(y.shape[0]):
            at = t * low.shape[1] + before
            add_update(up, start, rows, lora_kind, low, at, rank, factors[part], t, top, end, y)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def linear_quantized(x, packed, scales, biases, form, tasks, parts, down, up, lora_kind, factors, work, threads, y):
    """[DEQ-010] [LOR-001] y = W x + factor * B (A x), float32 throughout; W may be parts, one below the other.

    x [tokens, cols], y [tokens, rows]; packed: bytes; scales, biases, down, up: 16-bit words, flat;
    form: [kind of the coefficients, bits, group size]; tasks [.., 3]: part, first row, last row + 1;
    parts [.., 4]: rank of the part's LoRA, ranks of those before it, where row 0 of W would be in `up`, rows;
    factors: one a part; work: room for `linear_room` numbers; threads: as many as Numba was told to use.
    """
    turned, sums, rest = room_for_arranged(work, x.shape[0], x.shape[1], form[2])
    low = room(rest, x.shape[0], parts[-1, 0] + parts[-1, 1])
    if x.shape[0] < FEW:
        for t in range(x.shape[0]):
            prepare_token(x, t, form, turned, sums, down, lora_kind, low)
    else:
        for t in prange(x.shape[0]):
            prepare_token(x, np.int64(t), form, turned, sums, down, lora_kind, low)
    untaken = share(tasks.shape[0], threads)
    for thread in prange(threads):
        i = take_task(untaken, thread, tasks.shape[0])
        while i >= 0:
            linear_task(tasks[i], parts, packed, scales, biases, form, turned, sums, up, lora_kind, factors, low, y)
            i = take_task(untaken, thread, tasks.shape[0])
