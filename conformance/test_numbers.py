"""Chapter 1: numbers. What is asked of a backend that promises bits; error bounds are judged where results are."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.compare import SLACK, Judge
from conformance.driven import Driven
from conformance.test_dequant import weights_and_activations
from edge0_ref.contract import PrerouterHead, SigmoidGroup, SoftmaxTopK

pytestmark = pytest.mark.claim("bits")
dequant, linear = pytest.mark.claim("dequant"), pytest.mark.claim("linear")


@dequant
@pytest.mark.claim("bits")
@pytest.mark.spec("NUM-001")
@given(recipe=cases.matrices())
def test_where_bits_are_promised_a_weight_is_rounded_twice(
    driven: Driven, judge: Judge, recipe: cases.MatrixRecipe
) -> None:
    matrix = recipe.build()
    judge.bits(driven.dequantize(matrix), oracles.dequantized(matrix)[0], f"{recipe}")


@linear
@pytest.mark.claim("bits")
@pytest.mark.spec("NUM-001", "NUM-002")
@given(rows=st.integers(1, 3), cols=st.integers(1, 70), seed=cases.SEEDS)
def test_where_bits_are_promised_a_sum_is_folded(driven: Driven, judge: Judge, rows: int, cols: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((rows, cols)) * 2.0 ** random.integers(-30, 31, (rows, cols))).astype(np.float32)
    x = (random.standard_normal((2, cols)) * 2.0 ** random.integers(-30, 31, (2, cols))).astype(np.float32)
    half = (cols + 1) // 2
    weight[:, half:], x[:, half:] = -weight[:, : cols - half], x[:, : cols - half]
    x[:, ::3] *= np.float32(2.0**-60)  # large terms cancel in the first fold, and the small ones are what is left
    terms = weight.astype(np.float64)[None] * x.astype(np.float64)[:, None]
    wanted = np.array([[oracles.folded(row.tolist()) for row in token] for token in terms]).astype(np.float32)
    judge.bits(driven.linear(x, weight), wanted, f"{cols} terms that cancel, seed {seed}", blame="NUM-002")


@linear
@pytest.mark.claim("bits")
@pytest.mark.spec("NUM-010")
@given(pair=weights_and_activations())
def test_where_bits_are_promised_a_token_does_not_feel_its_neighbours(driven: Driven, judge: Judge, pair: Any) -> None:
    weight, x = pair[0].build(), pair[1].build()
    together = driven.linear(x, weight)
    alone = np.concatenate([driven.linear(row[None], weight) for row in x])
    strided = np.asfortranarray(x)
    judge.bits(together, alone, f"one token at a time, {pair}")
    judge.bits(driven.linear(strided, weight), alone, f"columns first in memory, {pair}")


def judge_rounded(judge: Judge, got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """The float32 nearest to a value that two correct float64 evaluations may put a few last bits apart."""
    away = np.abs(wanted) * SLACK
    judge.rounded_once(got, wanted - away, wanted + away, what)


@pytest.mark.claim("router")
@pytest.mark.spec("NUM-003")
@given(case=cases.logits())
def test_where_bits_are_promised_routing_weights_are_rounded_once(
    driven: Driven, judge: Judge, case: tuple[cases.LogitsRecipe, int]
) -> None:
    recipe, k = case
    logits = recipe.build()
    routing = driven.route(logits, SoftmaxTopK(k))
    judge_rounded(judge, routing.weights, oracles.softmax_weights(logits, routing.experts).value, f"{recipe}, k = {k}")


@pytest.mark.claim("router")
@pytest.mark.spec("NUM-003")
@given(z=st.floats(-80, 80, width=32))
def test_where_bits_are_promised_a_sigmoid_is_rounded_once(driven: Driven, judge: Judge, z: float) -> None:
    logits = np.full((1, 1), z, np.float32)
    score = oracles.sigmoid(logits.astype(np.float64)).astype(np.float32).astype(np.float64)
    got = driven.route(logits, SigmoidGroup(1, 1, 1, 1.0)).weights
    judge_rounded(judge, got, score / (score + 1e-20), f"the weight of an only expert with logit {z}")


@pytest.mark.claim("prerouter")
@pytest.mark.spec("NUM-003")
@given(z=st.floats(-6, 6, width=32))
def test_where_bits_are_promised_a_gelu_is_rounded_once(driven: Driven, judge: Judge, z: float) -> None:
    one, x = np.ones((1, 1), np.float32), np.full((1, 1), z, np.float32)
    head = PrerouterHead(one, one, np.zeros((1, 1), np.float32))
    away = abs(z) * SLACK  # erf is near -1 for negative z: what is left is known to the last bits of z
    wanted = oracles.gelu(x.astype(np.float64))
    judge.rounded_once(driven.predict(head, x), wanted - away, wanted + away, f"gelu({z})")
