"""Which experts `edge0 bench` has executed: what is simulated, and what is read ahead."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app.bench_routing import SimulatedRouting, parse_routing
from edge0_ref.app.scenario import Case, open_case
from edge0_ref.contract import Routing
from edge0_ref.engine.session import counters_between
from edge0_ref.errors import UsageError
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, experts=16, top_k=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = build(tmp_path_factory.mktemp("model"), RECIPE)
    build_adapters(made / "adapters", RECIPE, [1, 2], {})
    return made


@pytest.mark.spec("ENG-072")
@given(
    experts=st.integers(1, 40),
    k=st.integers(1, 8),
    reuse=st.sampled_from([None, 0.0, 0.45, 1.0]),
    seed=st.integers(0, 9),
    in_turn=st.booleans(),
)
def test_simulated_tokens_use_k_distinct_experts_and_are_known_ahead(experts, k, reuse, seed, in_turn) -> None:
    k = min(k, experts)
    rule = parse_routing("uniform" if reuse is None else f"replay:reuse={reuse}")
    model = Routing(np.zeros((1, k), np.int64), np.full((1, k), 0.25, np.float32))
    sources = [SimulatedRouting(rule, {3: experts}, 7, seed, in_turn=in_turn) for _ in range(2)]
    assert sources[0](3, 6, model) is model
    ahead = sources[1](3, 16, model)
    tokens = [sources[0](3, position, model) for position in range(7, 17)]
    assert np.array_equal(ahead.experts, tokens[-1].experts)
    for token in tokens:
        assert token.weights is model.weights
        chosen = set(token.experts[0].tolist())
        assert len(chosen) == k
        assert chosen <= set(range(experts))
    if in_turn:
        covering = tokens[: -(-experts // k)]
        assert {expert for token in covering for expert in token.experts[0].tolist()} >= set(
            range(min(experts, k * len(covering)))
        )
    for before, after in pairwise(tokens):
        kept = set(before.experts[0].tolist()) & set(after.experts[0].tolist())
        if not in_turn and reuse == 1:
            assert len(kept) == k
        if not in_turn and reuse == 0 and experts >= 2 * k:
            assert not kept


@pytest.mark.spec("ENG-072")
@pytest.mark.parametrize(("routing", "share"), [("uniform", 8 / 64), ("replay:reuse=0.45", 0.45)])
def test_the_share_of_reused_experts_is_what_the_rule_says(routing, share) -> None:
    """Over n choices the share of a fair draw is off by more than 5 sqrt(p (1 - p) / n) once in a million times."""
    k, tokens = 8, 1000
    source = SimulatedRouting(parse_routing(routing), {0: 64}, 0, seed=0, in_turn=False)
    model = Routing(np.zeros((1, k), np.int64), np.ones((1, k), np.float32))
    chosen = [set(source(0, position, model).experts[0].tolist()) for position in range(tokens)]
    reused = sum(len(before & after) for before, after in pairwise(chosen))
    choices = k * (tokens - 1)
    assert abs(reused / choices - share) <= 5 * (share * (1 - share) / choices) ** 0.5
    used = Counter(expert for one in chosen for expert in one)
    assert len(used) == 64


@pytest.mark.spec("ENG-071")
@pytest.mark.parametrize(("scenario", "ahead"), [("on-demand", False), ("prefetch", True)])
def test_only_what_is_predicted_is_read_ahead(folder, scenario, ahead) -> None:
    case = Case(scenario, str(folder), slots=2 * RECIPE.top_k, routing="uniform")
    with open_case(case, 40, lambda text: None) as running:
        running.decoder.prefill(running.prompt()[:6])
        running.simulate(case.rule, cached=False)
        before = replace(running.decoder.counters)
        for token in range(6):
            running.decoder.step(token)
        spent = counters_between(before, running.decoder.counters)
    assert (spent.read_ahead > 0) == ahead
    assert spent.on_demand > 0  # in layers that nobody predicts for


@pytest.mark.spec("ENG-071", "ENG-072")
def test_what_is_simulated_is_what_is_executed(folder) -> None:
    """Predicted layers and routed ones alike; the first simulated token is routed by the model, as it was predicted."""
    seen: dict[tuple[int, int], list[int]] = {}
    case = Case("prefetch", str(folder), routing="uniform")
    holder: list[object] = []

    def observe(point: str, layer: int, value: object) -> None:
        if point == "routing" and holder:
            seen[layer, holder[0].position] = value.experts[0].tolist()

    with open_case(case, 40, lambda text: None, observe) as running:
        running.decoder.prefill(running.prompt()[:6])
        running.simulate(case.rule, cached=False)
        holder.append(running.decoder)
        for token in range(5):
            running.decoder.step(token)
    pool = dict.fromkeys(range(RECIPE.layers), RECIPE.experts)
    wanted = SimulatedRouting(case.rule, pool, 7, 0, in_turn=False)
    model = Routing(np.zeros((1, RECIPE.top_k), np.int64), np.ones((1, RECIPE.top_k), np.float32))
    for layer in pool:
        for position in range(7, 11):
            assert seen[layer, position] == wanted(layer, position, model).experts[0].tolist()


@pytest.mark.spec("ENG-072")
@pytest.mark.parametrize("cached", [False, True])
def test_nothing_is_drawn_while_steps_are_timed(folder, monkeypatch, cached) -> None:
    case = Case("prefetch", str(folder), routing="replay:reuse=0.45")
    with open_case(case, 20, lambda text: None) as running:
        running.decoder.prefill(running.prompt()[:6])
        running.simulate(case.rule, cached=cached)
        monkeypatch.setattr(SimulatedRouting, "_draw", lambda *given: pytest.fail("a draw"))
        while running.decoder.position < 20:
            running.decoder.step(1)


@pytest.mark.spec("ENG-072")
def test_a_decoder_that_asks_no_source_of_routing_is_refused(folder) -> None:
    case = Case("prefetch", str(folder), routing="uniform")
    with open_case(case, 40, lambda text: None) as running:
        del running.decoder.routing_source
        with pytest.raises(UsageError, match="reference"):
            running.simulate(case.rule, cached=False)
