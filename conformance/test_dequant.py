"""Chapter 2: quantised weights, and the linear layers over them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.compare import Judge
from conformance.driven import Driven
from edge0_ref.contract import QuantizedMatrix
from edge0_ref.errors import ShapeError

dequant, quantize, linear = (pytest.mark.claim(claim) for claim in ("dequant", "quantize", "linear"))


@dequant
@pytest.mark.spec("DEQ-002", "DEQ-003", "DEQ-005", "DEQ-006", "NUM-004")
@given(recipe=cases.matrices())
def test_a_weight_is_code_times_scale_plus_bias_rounded_twice_or_once(
    driven: Driven, judge: Judge, recipe: cases.MatrixRecipe
) -> None:
    matrix = recipe.build()
    judge.either(driven.dequantize(matrix), oracles.dequantized(matrix), f"{recipe}")


@dequant
@pytest.mark.spec("DEQ-003")
@given(position=st.integers(0, 63), bits=st.sampled_from((4, 8)))
def test_a_code_sits_at_its_own_bits_of_its_own_word(driven: Driven, judge: Judge, position: int, bits: int) -> None:
    digits = 32 // bits
    words = np.zeros((1, 64 // digits), np.uint32)
    words[0, position // digits] = (2**bits - 1) << (bits * (position % digits))
    matrix = QuantizedMatrix(words, np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32), bits, 64)
    wanted = np.zeros((1, 64), np.float32)
    wanted[0, position] = 2**bits - 1
    judge.bits(driven.dequantize(matrix), wanted, f"the only code that is not 0 is number {position}")


@dequant
@pytest.mark.spec("DEQ-005")
@given(recipe=cases.matrices())
def test_negating_scales_and_biases_negates_the_weights(
    driven: Driven, judge: Judge, recipe: cases.MatrixRecipe
) -> None:
    matrix = recipe.build()
    sign = np.uint16(0x8000) if matrix.scales.dtype == np.uint16 else None
    scales, biases = (c ^ sign if sign else -c for c in (matrix.scales, matrix.biases))
    negated = QuantizedMatrix(matrix.packed, scales, biases, matrix.bits, matrix.group_size)
    judge.holds(
        bool((driven.dequantize(negated) == -driven.dequantize(matrix)).all()), f"{recipe}", "another magnitude", "-w"
    )


@dequant
@pytest.mark.spec("DEQ-006")
@given(group=st.integers(0, 3), group_size=cases.GROUPS, bits=st.sampled_from((4, 8)))
def test_a_bias_reaches_its_group_and_no_other(
    driven: Driven, judge: Judge, group: int, group_size: int, bits: int
) -> None:
    words = np.zeros((1, 4 * group_size * bits // 32), np.uint32)
    biases = np.zeros((1, 4), np.float32)
    biases[0, group] = 1.0
    matrix = QuantizedMatrix(words, np.ones((1, 4), np.float32), biases, bits, group_size)
    wanted = np.repeat(biases, group_size, axis=1)
    judge.bits(driven.dequantize(matrix), wanted, f"bias 1 in group {group} of {group_size}")


@st.composite
def float_weights(draw: Any) -> cases.DenseRecipe:
    group_size = draw(cases.GROUPS)
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    character = draw(st.sampled_from(("plain", "zeros", "equal", "integers", "tiny", "wide")))
    return cases.DenseRecipe(rows, groups * group_size, draw(cases.COEFFICIENTS), character, draw(cases.SEEDS))


@quantize
@pytest.mark.spec("DEQ-020", "DEQ-021", "DEQ-022")
@given(recipe=float_weights(), bits=st.sampled_from((4, 8)), flip=st.sampled_from(("no", "all negative", "one sign")))
def test_quantising_follows_the_stated_algorithm_to_the_bit(
    driven: Driven, judge: Judge, recipe: cases.DenseRecipe, bits: int, flip: str
) -> None:
    weights, group_size = recipe.build(), next(g for g in (128, 64, 32) if recipe.cols % g == 0)
    if flip != "no":
        weights = magnitude(weights)
        weights = weights ^ np.uint16(0x8000) if weights.dtype == np.uint16 else -weights
    judge_quantised(driven, judge, weights, bits, group_size, f"{recipe}, {flip}")


def magnitude(weights: np.ndarray) -> np.ndarray:
    return weights & np.uint16(0x7FFF) if weights.dtype == np.uint16 else np.abs(weights)


def judge_quantised(driven: Driven, judge: Judge, weights: np.ndarray, bits: int, group_size: int, what: str) -> None:
    codes, scales, biases = oracles.quantized(weights, bits, group_size)
    got = driven.quantize(weights, bits, group_size)
    judge.bits(oracles.codes(got), codes, f"codes of {what}", blame="DEQ-020")
    for name, values, wanted in (("scales", got.scales, scales), ("biases", got.biases, biases)):
        judge.bits(values, oracles.stored(wanted, weights.dtype), f"{name} of {what}", blame="DEQ-021")


@quantize
@pytest.mark.spec("DEQ-020")
@given(seed=cases.SEEDS)
def test_a_weight_half_way_between_two_codes_takes_the_even_one(driven: Driven, judge: Judge, seed: int) -> None:
    codes = np.random.default_rng(seed).permutation(32) % 16
    weights = (codes + 0.5).astype(np.float32)[None]
    weights[0, :2] = 0.0, 15.0  # the edge is 15 and the scale -1: no rounding before rint
    judge_quantised(driven, judge, weights, 4, 32, f"halves, seed {seed}")


@quantize
@pytest.mark.spec("DEQ-023")
@given(recipe=float_weights(), position=st.integers(0, 31))
def test_a_nan_weight_does_not_move_the_range_of_its_group(
    driven: Driven, judge: Judge, recipe: cases.DenseRecipe, position: int
) -> None:
    weights = recipe.build()
    weights[:, position] = 0x7FC0 if weights.dtype == np.uint16 else np.nan
    _, scales, biases = oracles.quantized(weights, 4, 32)
    got = driven.quantize(weights, 4, 32)
    for name, values, wanted in (("scales", got.scales, scales), ("biases", got.biases, biases)):
        judge.bits(values, oracles.stored(wanted, weights.dtype), f"{name} of {recipe}")


@quantize
@pytest.mark.spec("DEQ-024")
@given(cols=st.integers(1, 300), group_size=cases.GROUPS)
def test_rows_that_are_not_whole_groups_are_refused(driven: Driven, judge: Judge, cols: int, group_size: int) -> None:
    cols = cols + 1 if cols % group_size == 0 else cols
    weights = np.ones((2, cols), np.float32)
    judge.error(ShapeError, lambda: driven.backend.quantize(weights, 4, group_size), f"{cols} columns", str(group_size))


@st.composite
def weights_and_activations(draw: Any) -> tuple[cases.MatrixRecipe | cases.DenseRecipe, cases.DenseRecipe]:
    if draw(st.booleans()):
        weight = draw(cases.matrices())
        return weight, draw(cases.activations(cases.TOKENS, weight.cols))
    cols = draw(st.integers(1, 200))
    character = draw(st.sampled_from(("plain", "wide", "integers")))
    dense = cases.DenseRecipe(draw(st.integers(1, 9)), cols, draw(cases.COEFFICIENTS), character, draw(cases.SEEDS))
    return dense, draw(cases.activations(cases.TOKENS, cols))


@linear
@pytest.mark.spec("DEQ-010", "NUM-005", "NUM-008", "NUM-011")
@given(pair=weights_and_activations())
def test_a_linear_layer_is_a_sum_over_columns(driven: Driven, judge: Judge, pair: Any) -> None:
    weight, x = pair[0].build(), pair[1].build()
    wanted = oracles.linear(x, weight, None, judge.profile)
    judge.bound(driven.linear(x, weight), *wanted, f"W x of {pair}")


@linear
@pytest.mark.spec("DEQ-011")
@given(recipe=cases.matrices(max_rows=3), tokens=cases.TOKENS, off=st.sampled_from((-1, 1, 32)))
def test_activations_of_another_width_are_refused(
    driven: Driven, judge: Judge, recipe: cases.MatrixRecipe, tokens: int, off: int
) -> None:
    x = driven.backend.from_numpy(np.zeros((tokens, recipe.cols + off), np.float32))
    judge.error(ShapeError, lambda: driven.backend.linear(x, recipe.build()), f"{recipe.cols + off} for {recipe.cols}")
