"""The policy in integers, against a simulation that shares no code with it."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.contract import Routing
from edge0_ref.executors import make_executor
from edge0_ref.prefetch import Prefetcher
from edge0_ref.residency import lru_after
from tests.ref.memory_store import LAYOUT, MemoryStore

EXPERTS = 8
Event = tuple[Literal["hint", "call", "turn"], list[int]]


class Simulation:
    """A row of places, each holding an expert's number or None; two sets of wanted experts; a diary of uses."""

    def __init__(self, places: int, hot: bool) -> None:
        self.row: list[int | None] = [None] * places
        self.hot, self.time = hot, 0
        self.wanted: list[set[int]] = [set(), set()]  # for this token, for the next one
        self.diary: list[tuple[int, int]] = []  # (time, expert)
        self.reads: list[int] = []
        self.fresh: set[int] = set()  # read ahead, not used yet
        self.hits = self.read_ahead = self.on_demand = 0

    def rank(self, place: int) -> tuple[int, int, int]:
        times = [time for time, expert in self.diary if expert == self.row[place]]
        return (len(times) if self.hot else 0), max(times, default=-1), place

    def bring(self, expert: int, untouchable: set[int]) -> bool:
        free = [place for place, held in enumerate(self.row) if held is None]
        if not free:
            free = sorted((p for p, held in enumerate(self.row) if held not in untouchable), key=self.rank)
        if not free:
            return False
        self.row[free[0]] = expert
        self.reads.append(expert)
        self.fresh.discard(expert)
        return True

    def hint(self, experts: Sequence[int]) -> None:
        self.wanted = [self.wanted[1], set(experts)]
        for expert in [e for i, e in enumerate(experts) if e not in experts[:i] and e not in self.row]:
            if not self.bring(expert, self.wanted[0] | self.wanted[1]):
                return
            self.fresh.add(expert)

    def call(self, experts: Sequence[int]) -> None:
        needed = [e for i, e in enumerate(experts) if e not in experts[:i]]
        batch = [e for e in needed if e in self.row]
        to_come = [e for e in needed if e not in self.row]
        self.wanted[0] = set()
        for expert in batch:
            if expert in self.fresh:
                self.read_ahead += 1
            else:
                self.hits += 1
        self.fresh -= set(batch)
        while batch or to_come:
            brought: list[int] = []
            while to_come and self.bring(to_come[0], self.wanted[0] | self.wanted[1] | set(batch) | set(brought)):
                brought.append(to_come.pop(0))
            if not batch and not brought:
                self.wanted = [set(), set()]
            self.on_demand += len(brought)
            self.diary += [(self.time, expert) for expert in batch]
            batch = brought
        self.time += 1

    def play(self, event: Event) -> None:
        kind, experts = event
        match kind:
            case "hint":
                self.hint(experts)
            case "call":
                self.call(experts)
            case "turn":
                self.wanted = [set(), set()]


some = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=5)
events = st.lists(
    st.tuples(st.just("hint"), some) | st.tuples(st.just("call"), some) | st.tuples(st.just("turn"), st.just([])),
    max_size=24,
)


def play(executor: object, event: Event) -> None:
    kind, experts = event
    match kind:
        case "hint":
            executor.prepare(experts)  # type: ignore[attr-defined]
        case "call":
            chosen = np.array([experts], np.int64)
            x = np.ones((1, LAYOUT.hidden), np.float32)
            executor(x, Routing(chosen, np.ones(chosen.shape, np.float32)))  # type: ignore[operator]
        case "turn":
            executor.release_hints()  # type: ignore[attr-defined]


@pytest.mark.spec("EXE-011", "EXE-013", "EXE-014", "EXE-015", "EXE-020", "EXE-021", "EXE-022", "EXE-023", "EXE-024")
@pytest.mark.spec("EXE-025", "EXE-026", "EXE-027", "EXE-030")
@pytest.mark.parametrize("kind", ["staged", "hot"])
@given(slots=st.integers(1, 10), events=events)
def test_reads_and_counters_equal_an_independent_simulation(
    kind: Literal["staged", "hot"], slots: int, events: list[Event]
) -> None:
    store, simulation = MemoryStore(EXPERTS), Simulation(slots, hot=kind == "hot")
    prefetcher = Prefetcher(threads=0)  # a read is done by the call that waits for it: the log is in order
    executor = make_executor(kind, store, slots, prefetcher)
    for event in events:
        play(executor, event)
        simulation.play(event)
        counters = executor.counters
        assert executor.resident == frozenset(held for held in simulation.row if held is not None)
        assert counters.reads == len(simulation.reads)
        assert counters.bytes_read == len(simulation.reads) * LAYOUT.nbytes
        assert (counters.hits, counters.read_ahead) == (simulation.hits, simulation.read_ahead)
        assert (counters.on_demand, counters.drops) == (simulation.on_demand, 0)
    assert set(store.log) <= set(simulation.reads)
    assert len(store.log) <= len(simulation.reads)  # a hint that nobody needed may never have been read
    executor.close()
    prefetcher.close()


@pytest.mark.spec("EXE-001", "EXE-040")
@given(events=events)
def test_exact_reads_each_distinct_expert_and_whole_layer_each_expert_once(events: list[Event]) -> None:
    prefetcher, calls = Prefetcher(threads=0), [experts for kind, experts in events if kind == "call"]
    exact, whole = MemoryStore(EXPERTS), MemoryStore(EXPERTS)
    for kind, store in (("exact", exact), ("whole_layer", whole)):
        executor = make_executor(kind, store, 1, prefetcher)  # type: ignore[arg-type]
        for event in events:
            play(executor, event)
        executor.close()
    assert exact.log == [expert for experts in calls for expert in dict.fromkeys(experts)]
    assert sorted(whole.log) == sorted({expert for experts in calls for expert in experts})
    prefetcher.close()


@pytest.mark.spec("EXE-020")
@given(slots=st.integers(1, 6), uses=st.lists(st.integers(0, 9), max_size=40))
def test_least_recent_keeps_the_last_distinct_experts(slots: int, uses: list[int]) -> None:
    recent = list(dict.fromkeys(reversed(uses)))[:slots]
    assert sorted(lru_after(slots, uses)) == sorted(recent)


@pytest.mark.spec("EXE-021", "EXE-026")
@given(k=st.integers(1, 4), predictions=st.lists(st.permutations(range(EXPERTS)), min_size=1, max_size=12))
def test_with_2k_slots_what_is_hinted_one_token_ahead_is_never_read_by_the_call(
    k: int, predictions: list[list[int]]
) -> None:
    """The decoder's rhythm: the next token is hinted at before the call of this one. What both use is read once."""
    store, prefetcher = MemoryStore(EXPERTS), Prefetcher(threads=0)
    executor = make_executor("staged", store, 2 * k, prefetcher)
    chosen = [order[:k] for order in predictions]
    executor.prepare(chosen[0])
    for now, following in zip(chosen, [*chosen[1:], chosen[-1]], strict=True):
        held, reads = executor.resident, executor.counters.reads
        executor.prepare(following)
        assert executor.counters.reads - reads == len(set(following) - held)
        assert set(now) | set(following) <= executor.resident
        play(executor, ("call", now))
    assert executor.counters.on_demand == 0
    executor.close()
    prefetcher.close()
