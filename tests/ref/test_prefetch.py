"""The read-ahead threads: what is waited for goes first, a slot has one writer, and nothing outlives `close`."""

import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.contract import Routing
from edge0_ref.errors import ReadError
from edge0_ref.executors import make_executor
from edge0_ref.prefetch import HAND_OVER_BYTES, Prefetcher, Read
from tests.ref.memory_store import LAYOUT, MemoryStore
from tests.ref.test_residency import play


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("edge0-reader")]


def slot() -> np.ndarray:
    return np.zeros(LAYOUT.nbytes, np.uint8)


def large_slot() -> np.ndarray:
    """So large that a read is handed to a thread however urgent it is."""
    return np.zeros(HAND_OVER_BYTES, np.uint8)


@pytest.mark.spec("STO-030")
@given(urgencies=st.lists(st.sampled_from(["now", "ahead"]), max_size=12))
def test_urgent_reads_go_first_and_equal_ones_in_the_order_they_were_asked_for(urgencies: list[str]) -> None:
    store, prefetcher = MemoryStore(16), Prefetcher(threads=1)
    store.gate.clear()
    prefetcher.submit(Read(store, 15, large_slot()), "ahead")
    assert store.begun.acquire(timeout=60)  # the only thread is busy: what follows queues up
    reads = [prefetcher.submit(Read(store, expert, large_slot()), u) for expert, u in enumerate(urgencies)]  # type: ignore[arg-type]
    store.gate.set()
    prefetcher.close()
    assert all(read.done for read in reads)
    by_urgency = [e for e, u in enumerate(urgencies) if u == "now"] + [
        e for e, u in enumerate(urgencies) if u == "ahead"
    ]
    assert store.log == [15, *by_urgency]


@pytest.mark.spec("STO-031")
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_waiting_ends_with_the_bytes_in_the_slot(threads: int) -> None:
    store, prefetcher = MemoryStore(8), Prefetcher(threads)
    slots = [slot() for _ in range(8)]
    reads = [prefetcher.submit(Read(store, expert, held), "ahead") for expert, held in enumerate(slots)]
    for expert, read in reversed(list(enumerate(reads))):
        assert prefetcher.wait(read) >= 0
        np.testing.assert_array_equal(slots[expert], store.slots[expert])
    assert sorted(store.log) == list(range(8))
    prefetcher.close()


@pytest.mark.spec("STO-031", "EXE-016")
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("urgency", ["now", "ahead"])
def test_a_read_that_failed_is_tried_once_more_by_whoever_needs_it(threads: int, urgency: str) -> None:
    store, prefetcher = MemoryStore(2), Prefetcher(threads)
    store.failing = {0: 1, 1: 2}
    for expert in (0, 1):
        held = slot()
        read = prefetcher.submit(Read(store, expert, held), urgency)  # type: ignore[arg-type]
        if expert == 0:
            read.wait()
            np.testing.assert_array_equal(held, store.slots[0])
        else:
            with pytest.raises(ReadError, match="expert 1: the disk failed"):
                read.wait()
    assert store.log == [0, 0, 1, 1]
    prefetcher.close()


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something comes true that other threads are about to do."""
    end = time.monotonic() + 60
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.001)
    return held


def read_ahead(prefetcher: Prefetcher, store: MemoryStore, expert: int) -> Read:
    """A read ahead whose bytes are there and have not been checked."""
    read = Read(store, expert, large_slot(), apart=store)
    prefetcher.submit(read, "ahead")
    assert soon(lambda: bool(prefetcher._unchecked) and prefetcher._unchecked[-1]() is read)
    return read


def wait_for_a_slow_read(prefetcher: Prefetcher, until: Callable[[], bool]) -> None:
    """Wait, as a call does, for a read that ends once something has come true. Raises what waiting raises."""
    slow, failures = MemoryStore(1), list[BaseException]()
    slow.gate.clear()

    def wait() -> None:
        try:
            prefetcher.wait(read)
        except BaseException as error:
            failures.append(error)

    read = prefetcher.submit(Read(slow, 0, large_slot()), "now")
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    came_true = soon(lambda: until() or bool(failures))
    slow.gate.set()
    waiting.join()
    if failures:
        raise failures[0]
    assert came_true


@pytest.mark.spec("STO-033")
def test_a_call_that_waits_checks_what_others_have_read_ahead() -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads=1)
    reads = [read_ahead(prefetcher, store, expert) for expert in (2, 0, 1)]
    assert store.checked == []
    wait_for_a_slow_read(prefetcher, until=lambda: store.checked == [2, 0, 1])
    for read in reads:
        prefetcher.wait(read)
    assert store.checked == [2, 0, 1]  # and no second time
    prefetcher.close()


@pytest.mark.spec("STO-030", "STO-033")
def test_a_needed_read_that_no_reader_has_begun_goes_before_checks() -> None:
    store, slow, prefetcher = MemoryStore(3), MemoryStore(1), Prefetcher(threads=1)
    others = [read_ahead(prefetcher, store, expert) for expert in (0, 1)]
    slow.gate.clear()
    prefetcher.submit(Read(slow, 0, large_slot()), "ahead")
    assert slow.begun.acquire(timeout=60)  # the only thread is busy
    prefetcher.wait(prefetcher.submit(Read(store, 2, large_slot(), apart=store), "ahead"))
    slow.gate.set()
    assert (store.checked, [read.done for read in others]) == ([2], [False, False])
    prefetcher.close()


@pytest.mark.spec("STO-033", "STO-031")
def test_bytes_that_were_damaged_ahead_fail_nobody_else_and_are_read_again() -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads=1)
    damaged, whole, abandoned = (read_ahead(prefetcher, store, expert) for expert in (0, 1, 2))
    damaged.slot[7] ^= np.uint8(1)
    abandoned.abandon()
    abandoned.slot[:] = np.uint8(0)  # another's
    wait_for_a_slow_read(prefetcher, until=lambda: not prefetcher._unchecked)
    assert (store.checked, store.mistaken) == ([1], 1)
    prefetcher.wait(damaged)
    assert damaged.slot[: LAYOUT.nbytes].tobytes() == store.slots[0].tobytes()
    assert (store.log, whole.done) == ([0, 1, 2, 0], True)
    prefetcher.close()


@pytest.mark.spec("STO-033")
@pytest.mark.parametrize("kind", ["staged", "hot"])
def test_no_executor_uses_bytes_that_nobody_has_checked(kind: str) -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads=2)
    executor = make_executor(kind, store, 4, prefetcher)  # type: ignore[arg-type]
    x, routing = np.ones((1, LAYOUT.hidden), np.float32), Routing(np.array([[0, 1]]), np.ones((1, 2), np.float32))
    wanted = make_executor("exact", store, 1, prefetcher)(x, routing)
    executor.prepare([0, 1])
    assert soon(lambda: len(prefetcher._unchecked) == 2)
    executor._bank.memory[:, 7] ^= np.uint8(1)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(executor(x, routing), wanted)
    assert store.mistaken == 2
    executor.close()
    prefetcher.close()


@pytest.mark.spec("ENG-030")
@pytest.mark.parametrize("kind", ["staged", "whole_layer"])
def test_memory_of_a_closed_executor_is_given_back(kind: str) -> None:
    """Readers at rest and reads that nobody has checked keep none of it: the next layer's is allocated by then."""
    store, prefetcher = MemoryStore(4), Prefetcher(threads=2)
    executor = make_executor(kind, store, 4, prefetcher)  # type: ignore[arg-type]
    executor.prepare([0, 1])
    count = len(executor._reads)  # type: ignore[attr-defined]
    assert soon(lambda: all(executor._reads[place].loaded for place in range(count)))  # type: ignore[attr-defined]
    memory = weakref.ref(executor._bank.memory.base)  # type: ignore[attr-defined]
    executor.close()
    assert soon(lambda: memory() is None)
    prefetcher.close()


@pytest.mark.spec("STO-032")
def test_close_waits_for_the_read_in_flight_and_leaves_no_thread() -> None:
    before = readers()
    store, prefetcher = MemoryStore(2), Prefetcher(threads=3)
    prefetcher.submit(Read(store, 1, slot()), "now").wait()
    assert readers() == before  # nobody else had anything to do
    for expert in (0, 1, 0, 1):
        prefetcher.submit(Read(store, expert, slot()), "ahead").wait()
    assert len(readers()) == len(before) + 3
    store.gate.clear()
    held = slot()
    prefetcher.submit(Read(store, 1, held), "ahead")
    for _ in range(6):
        assert store.begun.acquire(timeout=60)
    closing = threading.Thread(target=prefetcher.close, daemon=True)
    closing.start()
    closing.join(timeout=0.05)
    assert closing.is_alive()
    store.gate.set()
    closing.join()
    np.testing.assert_array_equal(held, store.slots[1])
    assert readers() == before
    prefetcher.close()


@pytest.mark.spec("EXE-012")
@pytest.mark.parametrize("kind", ["staged", "hot"])
def test_a_slot_is_not_given_to_a_second_writer_while_the_first_is_at_work(kind: str) -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads=2)
    executor = make_executor(kind, store, 1, prefetcher)  # type: ignore[arg-type]
    store.gate.clear()
    executor.prepare([0])
    assert store.begun.acquire(timeout=60)  # expert 0 is half-way into the only slot
    executor.release_hints()
    call = threading.Thread(target=play, args=(executor, ("call", [1])), daemon=True)
    call.start()
    time.sleep(0.02)
    assert store.log == [0]
    store.gate.set()
    call.join()
    assert store.log == [0, 1]
    assert store.most_writers == 1
    executor.close()
    prefetcher.close()


@pytest.mark.spec("STO-032")
def test_an_executor_closes_only_after_the_reader_has_left_its_slots() -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads=1)
    executor = make_executor("staged", store, 2, prefetcher)
    store.gate.clear()
    executor.prepare([0, 1])
    assert store.begun.acquire(timeout=60)
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(timeout=0.05)
    assert closing.is_alive()
    store.gate.set()
    closing.join()
    assert not any(store.writers.values())
    prefetcher.close()


@pytest.mark.spec("EXE-016")
@pytest.mark.parametrize("kind", ["staged", "hot", "whole_layer", "exact"])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_failed_read_stops_its_call_and_the_next_call_reads_again(kind: str, threads: int) -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads)
    executor = make_executor(kind, store, 4, prefetcher)  # type: ignore[arg-type]
    store.failing = {2: 2}  # of which the exact executor meets one in a call
    with pytest.raises(ReadError, match="expert 2: the disk failed"):
        play(executor, ("call", [1, 2, 3]))
    assert 2 not in executor.resident
    store.failing = {}
    play(executor, ("call", [1, 2, 3]))
    executor.close()
    prefetcher.close()


@pytest.mark.spec("EXE-010", "EXE-016")
@pytest.mark.parametrize("kind", ["staged", "hot", "whole_layer"])
def test_a_failed_read_ahead_that_nobody_needs_or_that_later_succeeds_is_no_error(kind: str) -> None:
    store, prefetcher = MemoryStore(4), Prefetcher(threads=1)
    executor = make_executor(kind, store, 4, prefetcher)  # type: ignore[arg-type]
    store.failing = {2: 1, 3: 1}
    executor.prepare([2, 3])
    play(executor, ("call", [0, 2]))
    play(executor, ("call", [1]))
    executor.close()
    prefetcher.close()
