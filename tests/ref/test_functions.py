"""Elementwise functions: computed in double, rounded once; against the mathematics of Python's own library."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.functions import gelu, l2_normalize, sigmoid, silu, softplus, swiglu

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.lists(FLOATS, min_size=1, max_size=12)


def sigmoid64(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


TRUE: list[tuple[Callable[[np.ndarray], np.ndarray], Callable[[float], float]]] = [
    (sigmoid, sigmoid64),
    (silu, lambda x: x * sigmoid64(x)),
    (softplus, lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x)))),
    (gelu, lambda x: x * math.erfc(-x / math.sqrt(2)) / 2),
]


@pytest.mark.spec("NUM-003", "PRE-004")
@pytest.mark.parametrize(("function", "true"), TRUE, ids=[function.__name__ for function, _ in TRUE])
@given(row=ROWS)
def test_a_function_is_its_double_value_rounded_once(
    function: Callable[[np.ndarray], np.ndarray], true: Callable[[float], float], row: list[float]
) -> None:
    """Half a unit in the last place, and 2**-48 of the operand for what the double arithmetic itself loses."""
    got = function(np.array(row, np.float32)).astype(np.float64)
    for x, y in zip(row, got.tolist(), strict=True):
        wanted = true(x)
        assert abs(y - wanted) <= abs(wanted) * 2**-24 + min(abs(x), 40.0) * 2**-48 + 2**-150


@pytest.mark.spec("NUM-003")
@given(row=ROWS)
def test_sigmoids_of_opposite_signs_add_up_to_one(row: list[float]) -> None:
    x = np.array(row, np.float32)
    both = sigmoid(x).astype(np.float64) + sigmoid(-x)
    assert (np.abs(both - 1) <= 2**-24).all()
    assert (sigmoid(np.sort(x))[:-1] <= sigmoid(np.sort(x))[1:]).all()


@pytest.mark.spec("EXE-003")
@given(gate=ROWS, up=FLOATS)
def test_swiglu_rounds_once_and_takes_the_gate_first(gate: list[float], up: float) -> None:
    x = np.array(gate, np.float32)
    with np.errstate(over="ignore"):
        got = swiglu(x, np.full_like(x, up))
        wanted = np.array([v * sigmoid64(v) * up for v in gate]).astype(np.float32)
    np.testing.assert_array_max_ulp(got, wanted, maxulp=1)


@pytest.mark.spec("DEC-022")
@given(row=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12), scale=st.floats(0.1, 2))
def test_a_normalised_vector_has_the_length_of_its_scale(row: list[float], scale: float) -> None:
    """Epsilon is on the sum of squares: a vector of length l comes out with length scale * l / sqrt(l**2 + 1e-6)."""
    x = np.array([row], np.float32)
    length = math.sqrt(math.fsum(v * v for v in x[0].tolist()))
    got = math.sqrt(math.fsum(v * v for v in l2_normalize(x, scale, 1e-6)[0].tolist()))
    wanted = scale * length / math.sqrt(length * length + 1e-6)
    assert abs(got - wanted) <= wanted * 2**-23 + 1e-40
