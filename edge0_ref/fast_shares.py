"""How the `numba` backend's threads share the tasks of a kernel: each has a part, and who is done helps the others.

Numba cuts a `prange` into equal parts, and all threads wait for the last: for one whose core a reader was given
meanwhile. So a `prange` over tasks is one over threads here. A part's tasks are still one after the other in memory,
which is what reading ahead lives on. Which thread does a task changes no bit of its result.
"""

from typing import Any, no_type_check

import numba
import numpy as np
from llvmlite import ir
from numba import types

from edge0_ref.lanes import compiled_as

LINE = 8  # int64 of a cache line: counts that shared one would be waited for


def add_one(counts: Any, place: Any) -> Any:
    """counts[place] += 1; what it was before."""
    before = counts[place]
    counts[place] += 1
    return before


@compiled_as(add_one, types.int64, types.Array, types.Integer)
def emit_add_one(builder: Any, counts: Any, place: Any) -> Any:
    """One instruction, of which no other thread sees half. Results of tasks are seen when the `prange` has ended."""
    return builder.atomic_rmw("add", builder.gep(counts, [place]), ir.Constant(ir.IntType(64), 1), "monotonic")


@numba.njit(cache=True, nogil=True)
@no_type_check
def share(tasks, threads):
    """Equal parts of tasks 0 .. tasks - 1: for each thread a line of int64, the first of its part that nobody has."""
    untaken = np.empty(threads * LINE, np.int64)
    for part in range(threads):
        untaken[part * LINE] = part * tasks // threads
    return untaken


@numba.njit(cache=True, nogil=True)
@no_type_check
def take_task(untaken, thread, tasks):
    """The next task of a thread's own part, when that is done of the next thread's ...; -1: all are taken."""
    threads = untaken.shape[0] // LINE
    for further in range(threads):
        part = (np.int64(thread) + further) % threads
        task = add_one(untaken, part * LINE)
        if task < (part + 1) * tasks // threads:
            return task
    return np.int64(-1)
