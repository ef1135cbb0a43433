"""The `numba` backend's dense rows: float32, float16 or bfloat16 numbers, read as the 16-bit patterns they are.

Prerouter heads, both parts of a LoRA and layers that nobody quantised are such rows.
"""

import math
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

ROOT_OF_HALF = np.float32(math.sqrt(0.5))
ROWS = 32  # a thread takes this many rows at a time, so which rows share a block depends on no thread


@numba.njit(cache=True, nogil=True, forceinline=True)
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
def dense_rows(weight, kind, x, t, first, top, end, y):
    """y[t, r] = row r - first of a weight, as flat words, times row t of x, for top <= r < end.

    Columns beyond the last whole sixteen are added one by one. The loop over rows is in here, and not around it: a
    call for each row would cost as much as a short row does.
    """
    cols = x.shape[1]
    whole, token = cols // WIDTH * WIDTH, t * cols
    for r in range(top, end):
        row, sums = (r - first) * cols, zeros()
        for c in range(0, whole, WIDTH):
            sums = multiply_add(numbers(weight, row + c, kind), load(x, token + c), sums)
        result = total(sums)
        for c in range(whole, cols):
            result += number(weight, row + c, kind) * x[t, c]
        y[t, r] = result


@numba.njit(cache=True, nogil=True)
@no_type_check
def dense_block(block, x, weight, kind, y):
    for t in range(x.shape[0]):
        dense_rows(weight, kind, x, t, 0, block * ROWS, min((block + 1) * ROWS, y.shape[1]), y)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def linear_dense(x, weight, kind, y):
    """[DEQ-010] y = W x for a weight of float32, float16 or bfloat16 numbers, given as flat 16-bit words."""
    for block in prange((y.shape[1] + ROWS - 1) // ROWS):
        dense_block(block, x, weight, kind, y)


@numba.njit(cache=True, nogil=True)
@no_type_check
def gelu_block(block, x, weight, kind, y):
    """[PRE-004] ROWS rows of gelu(W x)."""
    dense_block(block, x, weight, kind, y)
    half = np.float32(0.5)
    for t in range(x.shape[0]):
        for r in range(block * ROWS, min((block + 1) * ROWS, y.shape[1])):
            y[t, r] *= half + half * math.erf(y[t, r] * ROOT_OF_HALF)


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def predict(features, linear, fc1, fc2, kinds, hidden, learned, y):
    """[PRE-001] y = linear f + fc2 gelu(fc1 f), weights as flat words; hidden, learned: what is between them."""
    inner_blocks, blocks = (hidden.shape[1] + ROWS - 1) // ROWS, (y.shape[1] + ROWS - 1) // ROWS
    for block in prange(inner_blocks + blocks):
        if block < inner_blocks:
            gelu_block(block, features, fc1, kinds[1], hidden)
        else:
            dense_block(block - inner_blocks, features, linear, kinds[0], y)
    for block in prange(blocks):
        dense_block(block, hidden, fc2, kinds[2], learned)
    y += learned
