"""The `numba` backend's linear layers: quantised rows, layers of one input as one, each with its LoRA beside it."""

from typing import no_type_check

import numba
import numpy as np
from numba import prange

from edge0_ref.fast_dense import dense_rows, numbers
from edge0_ref.fast_rows import arrange_token, quantized_rows
from edge0_ref.fast_shares import share, take_task
from edge0_ref.lanes import WIDTH, load, multiply_add, number, spread, store, zeros

FEW = 9  # tokens that are arranged sooner than a second thread wakes up


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
