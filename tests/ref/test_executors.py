"""Four executors, one result: whatever is hinted at, however many slots and threads, to the last bit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.contract import EXECUTOR_KINDS, ExecutorKind, ExpertLayout, Routing
from edge0_ref.engine.memory import resident_bytes
from edge0_ref.errors import BudgetError
from edge0_ref.executors import make_executor
from edge0_ref.executors.bank import empty_bank
from edge0_ref.prefetch import Prefetcher
from tests.ref.memory_store import LAYOUT, MemoryStore

EXPERTS = 7
pytestmark = pytest.mark.usefixtures("unchecked")
Calls = list[tuple[np.ndarray, Routing]]


def draw_calls(data: st.DataObject) -> Calls:
    """Activations with wild values, and routings of every k, of one token and of several."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    calls = []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, EXPERTS))
        experts = np.array([rng.permutation(EXPERTS)[:k] for _ in range(tokens)], np.int64)
        x = rng.normal(size=(tokens, LAYOUT.hidden)) * 10.0 ** rng.integers(-3, 3, (tokens, 1))
        calls.append((x.astype(np.float32), Routing(experts, rng.random((tokens, k), np.float32))))
    return calls


def run(
    kind: ExecutorKind, calls: list[tuple[np.ndarray, Routing]], slots: int, threads: int, hints: list[list[int]]
) -> bytes:
    store, prefetcher = MemoryStore(EXPERTS), Prefetcher(threads)
    executor = make_executor(kind, store, slots, prefetcher)
    outputs = []
    for number, (x, routing) in enumerate(calls):
        if number < len(hints):
            executor.prepare(hints[number])
        before = executor.counters.hits + executor.counters.read_ahead + executor.counters.on_demand
        outputs.append(executor(x, routing).tobytes())
        after = executor.counters.hits + executor.counters.read_ahead + executor.counters.on_demand
        assert after - before == len(routing.distinct())
        assert len(executor.resident) <= (EXPERTS if kind == "whole_layer" else slots)
    executor.close()
    prefetcher.close()
    assert executor.counters.drops == 0
    assert store.most_writers <= 1
    return b"".join(outputs)


@pytest.mark.spec("EXE-002", "EXE-010", "EXE-014", "EXE-015", "EXE-017", "EXE-018")
@given(data=st.data())
def test_executors_slots_threads_and_hints_never_change_a_bit(data: st.DataObject) -> None:
    calls = draw_calls(data)
    wanted = run("exact", calls, 1, 0, [])
    hints = data.draw(st.lists(st.lists(st.integers(0, EXPERTS - 1), max_size=9), max_size=4))
    for kind in EXECUTOR_KINDS:
        slots, threads = data.draw(st.integers(1, EXPERTS + 2)), data.draw(st.integers(0, 3))
        assert run(kind, calls, slots, threads, hints) == wanted, (kind, slots, threads)


@pytest.mark.spec("NUM-010")
@given(data=st.data())
def test_a_token_does_not_see_the_other_tokens_of_its_call(data: st.DataObject) -> None:
    calls = draw_calls(data)
    alone = [
        (x[t : t + 1], Routing(routing.experts[t : t + 1], routing.weights[t : t + 1]))
        for x, routing in calls
        for t in range(routing.tokens)
    ]
    assert run("staged", alone, 4, 1, []) == run("staged", calls, 4, 1, [])


@pytest.mark.spec("EXE-004")
@given(data=st.data())
def test_a_weight_of_zero_silences_an_expert_and_weights_scale_outputs(data: st.DataObject) -> None:
    """Doubling all weights is exact in binary, so it doubles the output exactly; zeros leave nothing."""
    (x, routing), *_ = draw_calls(data)
    store, prefetcher = MemoryStore(EXPERTS), Prefetcher(0)
    executor = make_executor("exact", store, 1, prefetcher)
    once, twice = (executor(x, Routing(routing.experts, f * routing.weights)) for f in (np.float32(1), np.float32(2)))
    np.testing.assert_array_equal(2 * once, twice)
    assert not executor(x, Routing(routing.experts, 0 * routing.weights)).any()


@pytest.mark.spec("EXE-018")
@pytest.mark.parametrize("kind", ["staged", "hot"])
def test_an_executor_without_slots_is_refused(kind: ExecutorKind) -> None:
    with pytest.raises(BudgetError, match="0 slots, wanted at least 1"):
        make_executor(kind, MemoryStore(2), 0, Prefetcher(0))


@pytest.mark.spec("DEC-058")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system tells only the highest size so far")
def test_memory_of_slots_is_the_systems_again() -> None:
    """Also the second time, and when small allocations came in between: what an allocator makes of that is its own.

    Those small ones, which are kept, come to 2 % of the slots; an allocator that keeps slots keeps most of them.
    """
    layout, kept, before = ExpertLayout(1024, 512, 4, 64, "bfloat16"), list[np.ndarray](), resident_bytes()
    for _ in range(3):
        banks = [empty_bank(layout, slots=8) for _ in range(16)]
        for bank in banks:
            bank.memory[:] = 1
            kept.append(np.ones(50_000, np.uint8))
        held = sum(bank.memory.nbytes for bank in banks)
        assert resident_bytes() - before > 0.9 * held
        del banks, bank
        assert resident_bytes() - before < 0.2 * held
