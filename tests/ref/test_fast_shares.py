"""Tasks shared among threads: each is done once, whoever is faster, and a thread's own part in order."""

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref import fast_shares
from edge0_ref.fast_shares import share, take_task


@pytest.mark.spec("DEQ-010", "EXE-003")
@given(tasks=st.integers(0, 40), threads=st.integers(1, 5), data=st.data())
def test_each_task_is_taken_once_and_a_threads_own_come_first(tasks, threads, data) -> None:
    parts = [range(part * tasks // threads, (part + 1) * tasks // threads) for part in range(threads)]
    untaken, left, taken, busy = fast_shares.share(tasks, threads), list(map(list, parts)), [], list(range(threads))
    while busy:
        thread = data.draw(st.sampled_from(busy))
        task = fast_shares.take_task(untaken, thread, tasks)
        if task < 0:
            assert not any(left)
            busy.remove(thread)
        else:
            (owner,) = (part for part in range(threads) if task in parts[part])
            assert owner == thread or not left[thread]
            assert left[owner].pop(0) == task
            taken.append(task)
    assert sorted(taken) == list(range(tasks))


@numba.njit(parallel=True)
def count_tasks(done, threads):
    untaken = share(done.shape[0], threads)
    for thread in numba.prange(threads):
        task = take_task(untaken, thread, done.shape[0])
        while task >= 0:
            done[task] += 1
            task = take_task(untaken, thread, done.shape[0])


@pytest.mark.spec("DEQ-010", "EXE-003")
def test_threads_that_run_at_the_same_time_take_no_task_twice_and_leave_none() -> None:
    for parts in (1, 2, 7):  # with more parts than threads, helpers begin some of them
        count_tasks(done := np.zeros(10**6, np.int64), parts)
        assert (done == 1).all()
