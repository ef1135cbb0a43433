"""The `numba` backend's routed experts: all of a call at once, each read where it lies in its slot."""

from typing import no_type_check

import numba
from numba import prange

from edge0_ref.fast_dense import ROWS
from edge0_ref.fast_kernels import swiglu
from edge0_ref.fast_linear import linear_room, room, room_for_arranged
from edge0_ref.fast_rows import arrange_token, quantized_rows
from edge0_ref.fast_shares import share, take_task


def experts_room(positions: int, hidden: int, inner: int, size: int) -> int:
    """How many float32 of scratch memory `run_experts` needs."""
    return linear_room(positions, hidden, size, 0) + linear_room(positions, inner, size, 2 * inner)


@numba.njit(cache=True, nogil=True)
@no_type_check
def expert_rows(projection, block, job, bank, words, slots, starts, places, form, turned, sums, y):
    """ROWS rows of one projection of one job's expert, for the job's positions.

    places[projection]: where codes, scales, biases start in a slot, in bytes and in numbers; places[3]: a slot's sizes.
    """
    slot, place, whole = slots[job], places[projection], places[3]
    code, scale, bias = slot * whole[0] + place[0], slot * whole[1] + place[1], slot * whole[1] + place[2]
    top, end = block * ROWS, min((block + 1) * ROWS, y.shape[1])
    quantized_rows(bank, code, words, scale, words, bias, form, turned, sums, starts[job], starts[job + 1], top, end, y)


@numba.njit(cache=True, nogil=True)
@no_type_check
def gate_and_up_rows(task, blocks, bank, words, slots, starts, places, form, turned, sums, gate, inner):
    """ROWS rows of silu(gate x) * (up x) of one job's expert."""
    job, block = task // blocks, task % blocks
    expert_rows(0, block, job, bank, words, slots, starts, places, form, turned, sums, gate)
    expert_rows(1, block, job, bank, words, slots, starts, places, form, turned, sums, inner)
    top, end = block * ROWS, min((block + 1) * ROWS, gate.shape[1])
    for t in range(starts[job], starts[job + 1]):
        swiglu(gate[t, top:end], inner[t, top:end], inner[t, top:end])


@numba.njit(cache=True, nogil=True)
@no_type_check
def down_rows(task, blocks, bank, words, slots, starts, places, form, turned, sums, y):
    """ROWS rows of down z of one job's expert."""
    expert_rows(2, task % blocks, task // blocks, bank, words, slots, starts, places, form, turned, sums, y)


@numba.njit(cache=True, nogil=True)
@no_type_check
def copy_row(rows, source, target):
    """As a loop: assigning whole rows compiles for seconds."""
    for c in range(rows.shape[1]):
        rows[target, c] = rows[source, c]


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def run_experts(x, tokens, bank, words, slots, starts, places, form, work, inner_size, threads, y):
    """[EXE-003] down(silu(gate x) * (up x)) for all experts of a call at once, each where it lies in its slot.

    Job j is the expert in slots[j] at positions starts[j] .. starts[j + 1] - 1 of y [positions, hidden]; position p is
    row tokens[p] of x.
    work: room for `experts_room` numbers; threads: as many as Numba was told to use. One of them arranges: that takes
    a thousandth of the time of multiplying.
    """
    jobs, positions = slots.shape[0], y.shape[0]
    turned, sums, rest = room_for_arranged(work, positions, x.shape[1], form[2])
    inner_turned, inner_sums, rest = room_for_arranged(rest, positions, inner_size, form[2])
    gate, inner = room(rest, positions, inner_size), room(rest[positions * inner_size :], positions, inner_size)
    inner_blocks, blocks = (inner.shape[1] + ROWS - 1) // ROWS, (y.shape[1] + ROWS - 1) // ROWS
    for p in range(positions):
        if p > 0 and tokens[p] == tokens[p - 1]:  # a single token meets all its experts
            copy_row(turned, p - 1, p)
            copy_row(sums, p - 1, p)
        else:
            arrange_token(x, tokens[p], form[1], form[2], turned, sums, p)
    untaken = share(jobs * inner_blocks, threads)
    for thread in prange(threads):
        task = take_task(untaken, thread, jobs * inner_blocks)
        while task >= 0:
            gate_and_up_rows(task, inner_blocks, bank, words, slots, starts, places, form, turned, sums, gate, inner)
            task = take_task(untaken, thread, jobs * inner_blocks)
    for t in range(positions):
        arrange_token(inner, t, form[1], form[2], inner_turned, inner_sums, t)
    untaken_down = share(jobs * blocks, threads)
    for thread in prange(threads):
        task = take_task(untaken_down, thread, jobs * blocks)
        while task >= 0:
            down_rows(task, blocks, bank, words, slots, starts, places, form, inner_turned, inner_sums, y)
            task = take_task(untaken_down, thread, jobs * blocks)
