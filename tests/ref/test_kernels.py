"""The compiled loops against their own Python source, and the laws that source keeps."""

import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref import kernels
from edge0_ref.bits import float32_to_bfloat16
from tests.ref.builders import Recipe, build

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 9)
Draw = Callable[..., np.ndarray]


def drawer(seed: int) -> Draw:
    """float32 values over many magnitudes, zeros, subnormals and both signs."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        values = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape)
        special = rng.choice([0.0, -0.0, 1e-42, -1e-42], shape)
        return np.where(rng.random(shape) < 0.1, special, values).astype(np.float32)

    return draw


def codes_and_coefficients(draw: Draw, rows: int, groups: int, form: str) -> list[Any]:
    """Codes as bytes, coefficients of the form's kind ("4_bfloat16"), and its bits."""
    bits, kind = form.split("_")
    packed = draw(rows, groups * int(bits)).view(np.uint8)
    scales, biases = draw(rows, groups), draw(rows, groups)
    if kind == "bfloat16":
        scales, biases = float32_to_bfloat16(scales), float32_to_bfloat16(biases)
    return [packed, scales, biases, int(bits)]


def empty(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def arguments(name: str, draw: Draw, t: int, n: int, h: int) -> list[Any]:
    """Arguments of a kernel for sizes t (tokens), n (a length) and h (heads)."""
    name, _, form = name.partition(":")
    match name:
        case "fold_sum":
            return [draw(n).astype(np.float64), n]
        case "linear_float32":
            return [draw(t, n), draw(h, n), empty(t, h)]
        case "dequantize_rows":
            return [*codes_and_coefficients(draw, n, h, form), empty(n, 32 * h)]
        case "linear_quantized":
            return [draw(t, 32 * h), *codes_and_coefficients(draw, n, h, form), empty(t, n)]
        case "weighted_sum":
            return [draw(t, h, n), draw(t, h), empty(t, n)]
        case "rms_norm":
            return [draw(t, n), draw(n), 1e-6, empty(t, n)]
        case "l2_normalize":
            return [draw(t, n), 0.25, 1e-6, empty(t, n)]
        case "causal_conv":
            return [draw(t, n), draw(h + 1, n), draw(h, n), empty(t, n)]
        case "delta_rule":
            q, k = draw(t, h, n), draw(t, h, n)
            return [q, k, draw(t, 2 * h, 3), draw(t, 2 * h), draw(t, 2 * h, n), draw(2 * h, 3, n), empty(t, 2 * h, 3)]
        case "gated":
            return [draw(n), draw(n), empty(n)]
        case "causal_attention":
            return [draw(t, 2 * h, n), draw(t + 5, h, n), draw(t + 5, h, n), 3, 0.5, empty(t, 2 * h, n)]
        case _:
            return [draw(n).astype(np.float64), np.full(n, np.nan)]


NAMES = [kernel.__name__ for kernel in (kernels.fold_sum, *kernels.KERNELS)]
QUANTIZED = ("dequantize_rows", "linear_quantized")
FORMS = ("4_float32", "8_float32", "4_bfloat16", "8_bfloat16")
CASES = [name for name in NAMES if name not in QUANTIZED]
CASES += [f"{name}:{form}" for name in QUANTIZED for form in FORMS]


@pytest.mark.spec("NUM-001")
@pytest.mark.skipif(not hasattr(kernels.fold_sum, "py_func"), reason="Numba is switched off: there is one version only")
@pytest.mark.parametrize("name", CASES)
@given(seed=SEEDS, t=st.integers(1, 3), n=SIZES, h=st.integers(1, 3))
def test_a_kernel_equals_its_own_source_to_the_bit(name: str, seed: int, t: int, n: int, h: int) -> None:
    kernel = getattr(kernels, name.partition(":")[0])
    compiled, plain = (arguments(name, drawer(seed), t, n, h) for _ in range(2))
    with np.errstate(all="ignore"):  # NumPy scalars warn where compiled code does not
        results = kernel(*compiled), kernel.py_func(*plain)
    assert np.array_equal(*results, equal_nan=True) if results[0] is not None else results[1] is None
    for got, wanted in zip(compiled, plain, strict=True):
        if isinstance(got, np.ndarray):
            assert got.tobytes() == wanted.tobytes()


DECODE = """
import sys, zlib
from edge0_ref.backend import create
from edge0_ref.contract import Plan
from edge0_ref.inventory import open_checkpoint
decoder = create().decoder(open_checkpoint(sys.argv[1]), Plan(top_k=2))
print(zlib.crc32(decoder.all_logits([3, 1, 4]).tobytes()), zlib.crc32(decoder.step(1).tobytes()))
"""


@pytest.mark.spec("NUM-001", "DEC-040")
def test_a_model_gives_the_same_bits_with_numba_switched_off(tmp_path: Path) -> None:
    folder = build(tmp_path, Recipe(hidden=32, inner=32, head_dim=32, heads=1, value_heads=1, vocab=16, experts=3))
    said = set()
    for switch in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": switch}
        command = [sys.executable, "-c", DECODE, str(folder)]
        said.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(said) == 1


@pytest.mark.spec("NUM-002")
@given(terms=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_folding_errs_by_its_depth_at_most(terms: list[float]) -> None:
    exact = sum(map(Fraction, terms), Fraction(0))
    depth = (len(terms) - 1).bit_length()
    got = Fraction(float(kernels.fold_sum(np.array(terms), len(terms))))
    assert abs(got - exact) <= depth * Fraction(2) ** -52 * sum(abs(Fraction(term)) for term in terms)


@pytest.mark.spec("NUM-002")
@given(seed=SEEDS, count=st.integers(1, 40), beyond=st.integers(0, 4))
def test_folding_uses_count_terms_and_halves_them_from_the_top(seed: int, count: int, beyond: int) -> None:
    terms = drawer(seed)(count + beyond).astype(np.float64)
    left = terms[:count]
    while len(left) > 1:
        half = (len(left) + 1) // 2
        left = np.concatenate([left[: len(left) - half] + left[half:], left[len(left) - half : half]])
    assert kernels.fold_sum(terms.copy(), count) == left[0]


@pytest.mark.spec("DEC-020", "DEC-021", "DEC-010", "NUM-010")
@given(seed=SEEDS, cut=st.integers(1, 5), n=SIZES, h=st.integers(1, 3))
def test_a_sequence_may_be_cut_anywhere(seed: int, cut: int, n: int, h: int) -> None:
    """State carries everything: six tokens at once, or `cut` and then the rest."""
    for name, by_token in (("causal_conv", (0, 3)), ("delta_rule", (0, 1, 2, 3, 4, 6))):
        kernel = getattr(kernels, name)
        whole, parts = (arguments(name, drawer(seed), 6, n, h) for _ in range(2))
        kernel(*whole)
        for piece in (slice(0, cut), slice(cut, 6)):
            kernel(*(a[piece] if i in by_token else a for i, a in enumerate(parts)))
        for got, wanted in zip(parts, whole, strict=True):
            assert got.tobytes() == wanted.tobytes()
    q, keys, values, first, scale, y = arguments("causal_attention", drawer(seed), 6, n, h)
    again = y.copy()
    kernels.causal_attention(q, keys, values, first, scale, y)
    for t in range(6):
        kernels.causal_attention(q[t : t + 1], keys, values, first + t, scale, again[t : t + 1])
    assert y.tobytes() == again.tobytes()
