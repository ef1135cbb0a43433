"""The `numba` backend's dense rows: float32, float16 or bfloat16 numbers, read as the 16-bit patterns they are.

Routers, prerouter heads and both parts of a LoRA are such rows, and so are the biases of a quantised matrix.
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
    spread,
    store,
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
def add_dense_rows(weight, first, kind, x, t, factor, top, end, y):
    """y[t, r] += factor * (row r of a weight times row t of x) for top <= r < end; row 0 starts at weight[first].

    Columns beyond the last whole sixteen are added one by one. The loop over rows is in here, and not around it: a
    call for each row would cost as much as a short row does.
    """
    cols = x.shape[1]
    whole, token = cols // WIDTH * WIDTH, t * cols
    for r in range(top, end):
        row, sums = first + r * cols, zeros()
        for c in range(0, whole, WIDTH):
            sums = multiply_add(numbers(weight, row + c, kind), load(x, token + c), sums)
        result = total(sums)
        for c in range(whole, cols):
            result += number(weight, row + c, kind) * x[t, c]
        y[t, r] += factor * result


@numba.njit(cache=True, nogil=True)
@no_type_check
def add_narrow_rows(blocks, kind, x, t, factor, top, end, y):
    """The same for a weight of few columns, cut into blocks of sixteen rows, in each column after column.

    So rows stand side by side, no sum runs over lanes, and memory is read from front to back. `top` starts a block.
    """
    cols = x.shape[1]
    whole = top + (end - top) // WIDTH * WIDTH
    for r in range(top, whole, WIDTH):
        sums = zeros()
        for c in range(cols):
            sums = multiply_add(numbers(blocks, r * cols + c * WIDTH, kind), spread(x[t, c]), sums)
        store(y, t * y.shape[1] + r, multiply_add(sums, spread(factor), load(y, t * y.shape[1] + r)))
    for r in range(whole, end):
        result = np.float32(0)
        for c in range(cols):
            result += number(blocks, whole * cols + c * WIDTH + r - whole, kind) * x[t, c]
        y[t, r] += factor * result


@numba.njit(cache=True, nogil=True)
@no_type_check
def dense_block(block, x, weight, kind, y):
    top, end = block * ROWS, min((block + 1) * ROWS, y.shape[1])
    for t in range(x.shape[0]):
        y[t, top:end] = 0
        add_dense_rows(weight, 0, kind, x, t, np.float32(1), top, end, y)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def linear_dense(x, weight, kind, y):
    """[DEQ-010] y = W x for a weight of float32, float16 or bfloat16 numbers, given as flat 16-bit words."""
    for block in prange((y.shape[1] + ROWS - 1) // ROWS):
        dense_block(block, x, weight, kind, y)
