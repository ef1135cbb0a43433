"""Slots are memory that readers write and graphs read: what must hold whenever the graphs run, and however reads go."""

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_mlx import slots
from edge0_mlx.device import default_device
from edge0_mlx.executors import MlxExecutor, WholeLayerExecutor, make_executor
from edge0_mlx.memory import give_back
from edge0_mlx.slots import Bank, Evaluations, host_memory
from edge0_ref.adapters import Adapters
from edge0_ref.backend import OwningExecutor
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Counters, Plan, Routing
from edge0_ref.engine.memory import resident_bytes
from edge0_ref.errors import BackendError, ReadError
from edge0_ref.prefetch import Prefetcher
from tests.mlx.conftest import Opened
from tests.ref.memory_store import LAYOUT, MemoryStore

DEVICE = default_device("float32")
X = np.random.default_rng(1).standard_normal((1, LAYOUT.hidden)).astype(np.float32)


def routed(*experts: int) -> Routing:
    return Routing(np.array([experts]), np.full((1, len(experts)), 1 / len(experts), np.float32))


def wanted(store: MemoryStore, routing: Routing) -> Array:
    executor = OwningExecutor("exact", store, 1)
    try:
        return executor(X, routing)
    finally:
        executor.close()


class Lazy:
    """An executor whose results are graphs, and what it takes to run them."""

    def __init__(self, store: MemoryStore, slots: int, threads: int = 1) -> None:
        self.counters, self.prefetcher = Counters(), Prefetcher(threads)
        self.evaluations = Evaluations(self.counters)
        self.executor: MlxExecutor = make_executor(
            "staged", store, slots, self.prefetcher, self.counters, DEVICE, self.evaluations
        )

    def close(self) -> None:
        self.executor.close()
        self.prefetcher.close()


def close_to(got: mx.array, store: MemoryStore, routing: Routing) -> None:
    expected = wanted(store, routing)
    terms = 2 * LAYOUT.hidden + LAYOUT.inner  # of the longest path of products and sums
    bound = (2 * terms + 8) * 2.0**-24 * np.abs(expected).max() * 64
    assert np.abs(np.array(got) - expected).max() <= bound


@pytest.mark.spec("EXE-012")
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_graph_sees_the_bytes_it_was_built_over_whatever_is_read_before_it_runs(slots: int) -> None:
    store = MemoryStore(8)
    lazy = Lazy(store, slots)
    calls = [routed(0, 1), routed(2, 3), routed(1, 4), routed(5, 0)]
    results = []
    for routing in calls:
        results.append(lazy.executor(mx.array(X), routing))
        lazy.executor.release_hints()
        lazy.executor.prepare([6, 7])
    for routing, result in zip(calls, results, strict=True):
        close_to(result, store, routing)
    lazy.close()


@pytest.mark.spec("EXE-012", "STO-031")
def test_a_slow_read_is_waited_for_by_the_call_that_needs_it_and_by_no_other() -> None:
    store = MemoryStore(8)
    lazy = Lazy(store, 4)
    lazy.executor(mx.array(X), routed(0, 1))
    store.gate.clear()
    lazy.executor.prepare([2])
    store.begun.acquire()
    for _ in range(2):
        store.begun.acquire()  # of experts 0 and 1, and now of 2, which waits half-written
    close_to(lazy.executor(mx.array(X), routed(0, 1)), store_opened(store), routed(0, 1))
    threading.Timer(0.05, store.gate.set).start()
    close_to(lazy.executor(mx.array(X), routed(2, 0)), store, routed(2, 0))
    lazy.close()


def store_opened(store: MemoryStore) -> MemoryStore:
    """The same experts in a store that does not wait."""
    other = MemoryStore(1)
    other.slots = store.slots
    return other


@pytest.mark.spec("STO-033")
def test_bytes_that_were_damaged_ahead_are_read_again_before_a_graph_sees_them() -> None:
    store = MemoryStore(4)
    lazy = Lazy(store, 4)
    lazy.executor.prepare([0, 1])
    while not all(read.loaded for read in lazy.executor._reads.values()):  # type: ignore[union-attr]
        time.sleep(0.001)
    lazy.executor._bank._bytes[:, 7] ^= np.uint8(1)  # type: ignore[union-attr]
    result = lazy.executor(mx.array(X), routed(0, 1))
    assert (store.mistaken, store.log) == (2, [0, 1, 0, 1])
    close_to(result, store, routed(0, 1))
    lazy.close()


@pytest.mark.spec("EXE-016")
def test_a_read_that_fails_leaves_graphs_built_before_it_right() -> None:
    store = MemoryStore(8)
    lazy = Lazy(store, 2)
    before = lazy.executor(mx.array(X), routed(0, 1))
    store.failing[3] = 2
    with pytest.raises(ReadError, match="expert 3"):
        lazy.executor(mx.array(X), routed(0, 3))
    close_to(before, store, routed(0, 1))
    close_to(lazy.executor(mx.array(X), routed(0, 3)), store, routed(0, 3))
    lazy.close()


@pytest.mark.spec("STO-010", "BCK-005")
def test_readers_fill_the_memory_of_arrays_itself() -> None:
    store = MemoryStore(4)
    bank = Bank(store, 3, DEVICE)
    for index in range(3):
        bank.slots[index].read_into(index, bank.slots[index].bytes)
    assert not bank.copies
    assert np.shares_memory(host_memory(bank.matrices[0].packed), bank.slots[2].bytes)
    for index in range(3):
        expert = LAYOUT.view(store.slots[index])
        for matrix, original in zip(bank.matrices, (expert.gate, expert.up, expert.down), strict=True):
            np.testing.assert_array_equal(np.array(matrix.packed[index]), original.packed)
            np.testing.assert_array_equal(np.array(matrix.scales[index]), original.scales)
            np.testing.assert_array_equal(np.array(matrix.biases[index]), original.biases)


@pytest.mark.spec("STO-010")
def test_without_writable_memory_a_slot_is_copied_and_the_result_is_the_same() -> None:
    store, routing = MemoryStore(4), routed(2, 1)
    banks = Bank(store, 2, DEVICE), Bank(store, 2, DEVICE, memory=lambda array: None)
    results = []
    for bank in banks:
        for index, expert in enumerate((2, 1)):
            bank.slots[index].read_into(expert, bank.slots[index].bytes)
            bank.publish(index)
        results.append(bank.run_one(mx.array(X), mx.array([0, 1], mx.uint32), mx.array(routing.weights)))
    assert [bank.copies for bank in banks] == [False, True]
    np.testing.assert_array_equal(*(np.array(result) for result in results))
    close_to(results[1], store, routing)


@pytest.mark.spec("BCK-004")
def test_what_mlx_cannot_evaluate_is_an_error_of_edge0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waited for, or only begun: a GPU's memory is allocated before anybody waits."""

    def fails(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes")

    evaluations = Evaluations(Counters())
    for name, evaluate in (("eval", evaluations.run), ("async_eval", evaluations.submit)):
        monkeypatch.setattr(mx, name, fails)
        with pytest.raises(BackendError, match="Unable to allocate"):
            evaluate(mx.array(1))
    with pytest.raises(BackendError, match="Unable to allocate"):
        Bank(MemoryStore(1), 1, DEVICE)


@pytest.mark.spec("ENG-079")
def test_a_submission_that_sleeps_is_a_wait_and_one_that_works_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX takes no more for a GPU that is far behind; handing over takes the host time as well."""
    clock = SimpleNamespace(whole=0.0, work=0.0)
    times = SimpleNamespace(perf_counter=lambda: clock.whole, thread_time=lambda: clock.work)
    monkeypatch.setattr(slots, "time", times)

    def hand_over(array: mx.array) -> None:
        clock.whole, clock.work = clock.whole + 5, clock.work + 2

    monkeypatch.setattr(mx, "async_eval", hand_over)
    evaluations = Evaluations(Counters())
    evaluations.submit(mx.array(1))
    assert evaluations.seconds == 3


@pytest.mark.spec("DEC-046", "BCK-004")
def test_what_is_forgotten_may_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells of a failed command to whoever waits next."""
    waited = []

    def fails() -> None:
        waited.append(True)
        raise RuntimeError("[METAL] Command buffer execution failed")

    monkeypatch.setattr(mx, "synchronize", fails)
    Evaluations(Counters()).forget()
    assert waited


@pytest.mark.spec("EXE-028", "BCK-004")
def test_an_evaluation_that_fails_before_a_read_leaves_no_expert_without_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots are given away, then the graphs over them are run: where that fails, nobody has them."""

    def out_of_memory(*arrays: object) -> None:
        raise RuntimeError("[metal::malloc] Unable to allocate")

    store = MemoryStore(8)
    for refused in (lambda lazy: lazy.executor(mx.array(X), routed(2, 3)), lambda lazy: lazy.executor.prepare([2, 3])):
        lazy = Lazy(store, 2)
        lazy.executor(mx.array(X), routed(0, 1))
        lazy.executor.release_hints()
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", out_of_memory)
            with pytest.raises(BackendError, match="Unable to allocate"):
                refused(lazy)
        lazy.evaluations.forget()
        lazy.executor.release_hints()
        for experts in ((2, 3), (0, 1), (3, 4)):
            close_to(lazy.executor(mx.array(X), routed(*experts)), store, routed(*experts))
        lazy.close()
        lazy.close()


@pytest.mark.spec("DEC-058")
@pytest.mark.parametrize("prompt", [4, 8])
def test_a_large_call_of_a_prompt_has_the_memory_of_slots(
    opened: Opened, small: Checkpoint, adapters: Adapters, monkeypatch: pytest.MonkeyPatch, prompt: int
) -> None:
    """Executors of decode steps hold nothing while a whole layer is held, and then what the last call predicts.

    Nor does anybody hold the memory of slots, or of a layer before.
    """
    decoder = opened(small, Plan(top_k=2, slots=4, prefill_executor="whole_layer", prefill_chunk=4), adapters)
    call, held, banks = WholeLayerExecutor.__call__, list[int](), list[Any]()
    alive = list[int]()

    def watched(executor: WholeLayerExecutor, x: mx.array, routing: Routing) -> mx.array:
        held.append(sum(len(one.resident) for one in decoder._decode.values()))
        alive.append(sum(bank() is not None for bank in banks))
        result = call(executor, x, routing)
        banks.append(weakref.ref(executor._bank))
        return result

    monkeypatch.setattr(WholeLayerExecutor, "__call__", watched)
    gc.collect()
    gc.disable()  # its time is its own
    try:
        decoder.step(1)
        decoder.step(2)
        assert any(executor.resident for executor in decoder._decode.values())
        banks += [weakref.ref(executor._bank) for executor in decoder._decode.values()]
        decoder.prefill(range(3, 3 + prompt))
    finally:
        gc.enable()
    assert alive == [0] * len(held)
    assert held == [0] * (len(decoder._prefill) * prompt // 4)
    predicted = {layer: set(p.routing.experts.ravel()) for layer, p in decoder.state.predicted.items()}
    assert predicted
    assert {layer: set(e.resident) for layer, e in decoder._decode.items() if e.resident} == predicted


@pytest.mark.spec("DEC-058")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system tells only the highest size so far")
def test_buffers_that_were_freed_go_back_to_the_system() -> None:
    """Also the second time, and with small allocations in between, which are kept and come to 1 % of the buffers."""
    kept, before = list[np.ndarray](), resident_bytes()
    for _ in range(3):
        buffers = []
        for _ in range(16):
            buffers.append(mx.ones((7 * 2**18,), mx.uint32))
            mx.eval(buffers[-1])
            kept.append(np.ones(25_000, np.uint8))
        held = sum(buffer.nbytes for buffer in buffers)
        assert resident_bytes() - before > 0.9 * held
        buffers.clear()
        give_back()
        assert resident_bytes() - before < 0.2 * held
