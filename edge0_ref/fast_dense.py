"""The `numba` backend's dense rows: float32, float16 or bfloat16 numbers, read as the 16-bit patterns they are.

Prerouter heads, both parts of a LoRA and layers that nobody quantised are such rows.
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
    float16s,
    float32s,
    load,
    multiply_add,
    number,
    total,
    zeros,
)

ROWS = 32  # a thread takes this many rows at a time, so which rows share a block depends on no thread


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def numbers(words, first, kind):
    """Sixteen numbers of a kind."""
    if kind == FLOAT32:
        return float32s(words, 2 * first)
    if kind == BFLOAT16:
        return bfloat16s(words, first)
    return float16s(words, first)


@numba.njit(cache=True, nogil=True)
@no_type_check
def add_dense_rows(weight, kind, x, t, factor, top, end, y):
    """y[t, r] += factor * (row r of a weight, as flat words, times row t of x) for top <= r < end.

    Columns beyond the last whole sixteen are added one by one. The loop over rows is in here, and not around it: a
    call for each row would cost as much as a short row does.
    """
    cols = x.shape[1]
    whole, token = cols // WIDTH * WIDTH, t * cols
    for r in range(top, end):
        row, sums = r * cols, zeros()
        for c in range(0, whole, WIDTH):
            sums = multiply_add(numbers(weight, row + c, kind), load(x, token + c), sums)
        result = total(sums)
        for c in range(whole, cols):
            result += number(weight, row + c, kind) * x[t, c]
        y[t, r] += factor * result


@numba.njit(cache=True, nogil=True)
@no_type_check
def dense_block(block, x, weight, kind, y):
    top, end = block * ROWS, min((block + 1) * ROWS, y.shape[1])
    for t in range(x.shape[0]):
        y[t, top:end] = 0
        add_dense_rows(weight, kind, x, t, np.float32(1), top, end, y)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def linear_dense(x, weight, kind, y):
    """[DEQ-010] y = W x for a weight of float32, float16 or bfloat16 numbers, given as flat 16-bit words."""
    for block in prange((y.shape[1] + ROWS - 1) // ROWS):
        dense_block(block, x, weight, kind, y)
