"""Chapter 4: what one expert computes, and how a token's experts are added up. Judged through every executor."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import every_executor, examples
from conformance.recording_store import RecordingStore
from edge0_ref.contract import ExecutorKind, Routing


@st.composite
def layers(draw: Any) -> tuple[cases.ExpertsRecipe, cases.RoutingRecipe, cases.DenseRecipe]:
    experts = draw(cases.expert_layers(st.sampled_from((1, 2, 3, 5, 8))))
    routing = draw(cases.routings(experts.num_experts, most=4))
    names = st.sampled_from(("plain", "plain", "zeros", "equal", "integers"))
    x = cases.DenseRecipe(routing.tokens, experts.hidden, "float32", draw(names), draw(cases.SEEDS))
    return experts, routing, x


@every_executor
@pytest.mark.spec("EXE-003", "EXE-004", "NUM-006", "NUM-011", "STO-010")
@examples(0.75)
@given(layer=layers(), slots=st.integers(1, 6))
def test_output_is_the_weighted_sum_of_gated_experts(
    driven: Driven, judge: Judge, kind: ExecutorKind, layer: Any, slots: int
) -> None:
    recipe, routing, x = layer[0], layer[1].build(), layer[2].build()
    store = RecordingStore(recipe)
    executor = driven.executor(kind, store, slots)
    got, wanted = executor(x, routing), oracles.experts_output(x, routing, store.experts, judge.profile)
    judge.bound(got, *wanted, f"{layer}, {slots} slots")
    plain = oracles.plain_experts_output(x, routing, store.experts, judge.profile)
    judge.like_plain(got, wanted.value, plain, f"{layer}, {slots} slots")
    driven.close()


@every_executor
@pytest.mark.spec("EXE-004")
@examples(0.5)
@given(layer=layers())
def test_weights_reach_the_sum_in_full(driven: Driven, judge: Judge, kind: ExecutorKind, layer: Any) -> None:
    recipe, routing, x = layer[0], layer[1].build(), layer[2].build()
    executor = driven.executor(kind, RecordingStore(recipe), 4)
    k, one = routing.experts.shape[1], np.ones((routing.tokens, 1), np.float32)
    alone = [executor(x, Routing(routing.experts[:, j : j + 1], one)) for j in range(k)]
    weighted = np.stack([routing.weights[:, j, None].astype(np.float64) * y for j, y in enumerate(alone)])
    largest = np.abs(weighted).max(axis=2).sum(axis=0)  # per token; what an expert's own rounding is relative to
    rounding = (k + 34) * oracles.U + 4 * judge.profile.roundoff
    bound = np.repeat(rounding * largest[:, None] + 2 * oracles.FLUSHED + judge.profile.smallest, x.shape[1], axis=1)
    judge.bound(executor(x, routing), weighted.sum(axis=0), bound, f"{layer}")
    driven.close()


@every_executor
@pytest.mark.spec("EXE-005", "EXE-014")
@examples(0.25)
@given(seed=cases.SEEDS, weight=st.sampled_from((0.0, 0.25)))
def test_every_place_contributes_once_also_twice_the_same_and_weight_zero(
    driven: Driven, judge: Judge, kind: ExecutorKind, seed: int, weight: float
) -> None:
    store = RecordingStore(cases.ExpertsRecipe(3, seed=seed))
    x = cases.DenseRecipe(2, 32, seed=seed).build()
    weights = np.array([[0.5, 0.25, weight], [weight, 0.5, 0.25]], np.float32)
    routing = Routing(np.array([[1, 1, 2], [0, 2, 2]], np.int64), weights)
    executor = driven.executor(kind, store, 4)
    wanted = oracles.experts_output(x, routing, store.experts, judge.profile)
    judge.bound(executor(x, routing), *wanted, f"seed {seed}, {weight}")
    executed = executor.counters.hits + executor.counters.read_ahead + executor.counters.on_demand
    judge.state((executed, executor.counters.drops), (3, 0), "experts executed, dropped", blame="EXE-014")
    driven.close()


@every_executor
@pytest.mark.claim("bits")
@pytest.mark.spec("EXE-006", "EXE-002")
@examples(0.25)
@given(layer=layers())
def test_where_bits_are_promised_a_token_does_not_feel_who_shares_its_experts(
    driven: Driven, judge: Judge, kind: ExecutorKind, layer: Any
) -> None:
    recipe, routing, x = layer[0], layer[1].build(), layer[2].build()
    store = RecordingStore(recipe)
    executor = driven.executor(kind, store, 4)
    together = executor(x, routing)
    alone = [
        executor(x[t : t + 1], Routing(routing.experts[t : t + 1], routing.weights[t : t + 1]))
        for t in range(routing.tokens)
    ]
    judge.bits(together, np.concatenate(alone), f"one token at a time, {layer}")
    driven.close()
