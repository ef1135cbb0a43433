"""Chapter 6: executors. Their results; what is resident and read, step by step, is in test_executor_states."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.compare import Judge
from conformance.driven import Driven, DrivenExecutor
from conformance.paths import every_executor, every_slot_table, examples, kinds
from conformance.recording_store import RecordingStore
from edge0_ref.contract import ExecutorKind, Routing
from edge0_ref.errors import ReadError

EXPERT = st.integers(0, 5)
HINTS = st.lists(st.lists(EXPERT, max_size=8), max_size=3)


def one_token(*experts: int) -> Routing:
    weights = np.full((1, len(experts)), 1 / len(experts), np.float32)
    return Routing(np.array([experts], np.int64), weights)


def opened(driven: Driven, kind: ExecutorKind, slots: int, experts: int = 6) -> tuple[DrivenExecutor, RecordingStore]:
    store = RecordingStore(cases.ExpertsRecipe(experts, coefficient="bfloat16", seed=7))
    return driven.executor(kind, store, slots), store


X = cases.DenseRecipe(1, 32, seed=3).build()


@every_executor
@pytest.mark.claim("bits", "executor:exact")
@pytest.mark.spec("EXE-017", "EXE-010")
@examples(0.5)
@given(routing=cases.routings(6, most=6), hints=HINTS, slots=st.integers(1, 12), seed=cases.SEEDS)
def test_where_bits_are_promised_executors_slots_and_hints_change_none(
    driven: Driven, judge: Judge, kind: ExecutorKind, routing: Any, hints: list[list[int]], slots: int, seed: int
) -> None:
    x, routed = cases.DenseRecipe(routing.tokens, 32, seed=seed).build(), routing.build()
    executor, _ = opened(driven, kind, slots)
    baseline, _ = opened(driven, "exact", 1)
    wanted = baseline(x, routed)
    for hint in [[], *hints]:
        executor.prepare(hint)
        judge.bits(executor(x, routed), wanted, f"{routing}, {slots} slots, hints {hints}")
    driven.close()


@every_executor
@pytest.mark.spec("EXE-010", "NUM-006")
@examples(0.25)
@given(routing=cases.routings(6, most=6), hints=HINTS, slots=st.integers(1, 12))
def test_a_hint_changes_no_result_whatever_it_names(
    driven: Driven, judge: Judge, kind: ExecutorKind, routing: Any, hints: list[list[int]], slots: int
) -> None:
    x, routed = cases.DenseRecipe(routing.tokens, 32, seed=routing.seed).build(), routing.build()
    executor, store = opened(driven, kind, slots)
    wanted = oracles.experts_output(x, routed, store.experts, judge.profile)
    for hint in hints:
        executor.prepare(hint)
    judge.bound(executor(x, routed), *wanted, f"{routing}, {slots} slots, hints {hints}")
    driven.close()


@kinds("exact")
@pytest.mark.spec("EXE-001")
@examples(0.5)
@given(routing=cases.routings(6, most=6))
def test_exact_reads_each_expert_once_in_order_of_first_use(
    driven: Driven, judge: Judge, kind: ExecutorKind, routing: Any
) -> None:
    x, routed = cases.DenseRecipe(routing.tokens, 32).build(), routing.build()
    executor, store = opened(driven, kind, 1)
    first_use = list(dict.fromkeys(routed.experts.ravel().tolist()))
    for _ in range(2):
        executor(x, routed)
    judge.state(store.reads, first_use * 2, f"reads of two equal calls, {routing}")
    judge.state(executor.resident, set(), "resident after a call")
    driven.close()


@every_slot_table
@pytest.mark.spec("EXE-011")
def test_an_expert_told_of_in_time_is_not_read_by_the_call(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    executor, store = opened(driven, kind, 4)
    executor.prepare([2, 5])
    store.settle(0, [2, 5])
    executor(X, one_token(2, 5))
    judge.state(sorted(store.reads), [2, 5], "reads of a hint and the call it was for")
    judge.state(executor.counters.read_ahead, 2, "read_ahead")


@every_slot_table
@pytest.mark.spec("EXE-013", "EXE-014")
def test_an_expert_nobody_staged_is_read_by_its_call_and_counted(
    driven: Driven, judge: Judge, kind: ExecutorKind
) -> None:
    executor, store = opened(driven, kind, 4)
    executor.prepare([0, 1])
    wanted = oracles.experts_output(X, one_token(0, 4), store.experts, judge.profile)
    judge.bound(executor(X, one_token(0, 4)), *wanted, "one staged, one not")
    judge.state((executor.counters.on_demand, executor.counters.drops), (1, 0), "on demand, dropped")
    judge.state(sorted(store.settle(0, [0, 1, 4])), [0, 1, 4], "reads")


@every_executor
@pytest.mark.spec("EXE-015")
@examples(0.25)
@given(calls=st.lists(cases.routings(6, most=4), min_size=1, max_size=4), slots=st.integers(1, 8), hints=HINTS)
def test_every_needed_expert_was_a_hit_or_read_ahead_or_on_demand(
    driven: Driven, judge: Judge, kind: ExecutorKind, calls: list[Any], slots: int, hints: list[list[int]]
) -> None:
    executor, store = opened(driven, kind, slots)
    needed = 0
    for number, recipe in enumerate(calls):
        executor.prepare(hints[number] if number < len(hints) else [])
        routing = recipe.build()
        executor(cases.DenseRecipe(routing.tokens, 32).build(), routing)
        needed += len(set(routing.experts.ravel().tolist()))
        counters = executor.counters
        met = counters.hits + counters.read_ahead + counters.on_demand
        judge.state(met, needed, f"hits + read_ahead + on_demand after call {number} of {calls}, hints {hints}")
        judge.state(counters.bytes_read, counters.reads * store.layout.nbytes, "bytes_read for its reads")
    driven.close()


@every_executor
@pytest.mark.spec("EXE-016", "BCK-004")
@examples(0.25)
@given(failing=EXPERT, others=st.lists(EXPERT, max_size=2), slots=st.integers(1, 6), told=st.booleans())
def test_a_failed_read_is_the_error_of_its_call_and_is_tried_again(
    driven: Driven, judge: Judge, kind: ExecutorKind, failing: int, others: list[int], slots: int, told: bool
) -> None:
    executor, store = opened(driven, kind, slots)
    routing = one_token(*dict.fromkeys([*others, failing]))
    store.failing.add(failing)
    if told:
        executor.prepare([failing])
    what = f"expert {failing} of {routing.experts.tolist()}, {slots} slots"
    for _ in range(2):
        judge.error(ReadError, lambda: executor(X, routing), what, names=f"expert {failing}")
        left = executor.resident
        judge.holds(failing not in left, f"resident after {what} failed", left, f"no {failing}")
    store.failing.clear()
    wanted = oracles.experts_output(X, routing, store.experts, judge.profile)
    judge.bound(executor(X, routing), *wanted, f"{what}, read again")
    driven.close()


@every_slot_table
@pytest.mark.spec("EXE-012")
@examples(0.25)
@given(hints=st.lists(st.lists(EXPERT, min_size=1, max_size=2), min_size=2, max_size=4), slots=st.integers(1, 2))
def test_a_slot_has_one_writer_at_a_time(
    driven: Driven, judge: Judge, kind: ExecutorKind, hints: list[list[int]], slots: int
) -> None:
    executor, store = opened(driven, kind, slots)
    store.slow = dict.fromkeys(range(6), 0.002)
    for hint in hints:
        executor.release_hints()
        executor.prepare(hint)
    routing = one_token(0, 3, 5)
    wanted = oracles.experts_output(X, routing, store.experts, judge.profile)
    judge.bound(executor(X, routing), *wanted, f"hints {hints} one after the other, {slots} slots")
    judge.state(store.overlaps, [], f"reads into a slot that was being written, hints {hints}, {slots} slots")
    driven.close()


@kinds("staged", "hot", "whole_layer")
@pytest.mark.spec("STO-032")
def test_close_waits_for_reads_in_flight(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    executor, store = opened(driven, kind, 4)
    store.slow = dict.fromkeys(range(6), 0.02)
    executor.prepare([1, 2, 3])
    store.begin()
    executor.close()
    judge.state(store.unfinished, 0, "reads in flight after close")


@every_executor
@pytest.mark.spec("BCK-010")
def test_an_executor_may_be_closed_twice(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    executor, _ = opened(driven, kind, 4)
    executor(X, one_token(0, 3))
    for _ in range(2):
        executor.close()
        judge.state(executor.resident, frozenset(), "resident after close")


@kinds("whole_layer")
@pytest.mark.spec("EXE-040")
@pytest.mark.parametrize("hint", [None, "nobody", "the last"])
@examples(0.25)
@given(experts=st.sampled_from((1, 2, 5, 60)), seed=cases.SEEDS)
def test_whole_layer_reads_every_expert_once_ascending(
    driven: Driven, judge: Judge, kind: ExecutorKind, experts: int, hint: str | None, seed: int
) -> None:
    executor, store = opened(driven, kind, 1, experts)
    store.slow = dict.fromkeys(range(experts), 0.0005)
    if hint:
        executor.prepare([] if hint == "nobody" else [experts - 1])
        judge.state(executor.resident, set(range(experts)), "resident after a hint")
        reads = store.settle(0, range(experts))
        # threads may overtake each other by a few reads, never by a third of the layer
        early = [expert for expert in reads[: experts // 3] if expert >= experts - experts // 3]
        judge.state(early, [], f"reads of the last third among the first, {reads}")
    needed = cases.RoutingRecipe(1, experts, min(3, experts), "random", seed).build()
    for _ in range(2):
        executor(X, needed)
    judge.state(sorted(store.settle(0, range(experts))), list(range(experts)), "reads")
    driven.close()
