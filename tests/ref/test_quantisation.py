"""Bits, bfloat16 and affine quantisation: exact laws, and oracles in rational or double arithmetic."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.bits import bfloat16_to_float32, float32_to_bfloat16, narrow, pack_codes, unpack_codes, widen
from edge0_ref.contract import QuantizedMatrix
from edge0_ref.dequant import dequantize, dequantize_as, embed, quantize
from edge0_ref.errors import ShapeError
from edge0_ref.lora import linear

BITS, GROUPS = st.sampled_from([4, 8]), st.sampled_from([32, 64, 128])
DTYPES = st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16)])
SEEDS = st.integers(0, 2**32 - 1)
PATTERNS = st.integers(0, 2**32 - 1)


def random_weights(seed: int, rows: int, cols: int) -> np.ndarray:
    """Rows of very different size; some constant, some of one sign, some zero: the awkward groups."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(rows, cols)) * 10.0 ** rng.integers(-4, 4, (rows, 1))
    kind = rng.integers(0, 6, (rows, 1))
    weights = np.select(
        [kind == 0, kind == 1, kind == 2, kind == 3], [np.abs(weights), -np.abs(weights), 0.0, 2.5], weights
    )
    return weights.astype(np.float32)


@pytest.mark.spec("DEQ-003")
@given(bits=BITS, rows=st.integers(0, 3), words=st.integers(1, 5), seed=SEEDS)
def test_packing_is_undone_by_unpacking_and_lies_lowest_bits_first(bits: int, rows: int, words: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, words * 32 // bits)).astype(np.uint8)
    packed = pack_codes(codes, bits)
    np.testing.assert_array_equal(unpack_codes(packed, bits), codes)
    for row, held in zip(codes.tolist(), packed, strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert int.from_bytes(held.astype("<u4").tobytes(), "little") == number


@pytest.mark.spec("DEQ-003", "DEQ-024")
def test_rows_that_fill_no_whole_words_or_groups_are_refused() -> None:
    with pytest.raises(ShapeError, match="a row of 7 codes"):
        pack_codes(np.zeros((1, 7), np.uint8), 4)
    with pytest.raises(ShapeError, match="not whole groups of 64"):
        quantize(np.zeros((2, 96), np.float32), 4, 64)


@pytest.mark.spec("NUM-004")
@given(pattern=PATTERNS)
def test_bfloat16_is_the_nearest_with_ties_to_even(pattern: int) -> None:
    """Against the two neighbours, in exact integers: patterns of one sign are ordered like their values."""
    value = np.array([pattern], np.uint32).view(np.float32)
    got = int(float32_to_bfloat16(value)[0])
    if np.isnan(value[0]):
        assert np.isnan(bfloat16_to_float32(np.array([got], np.uint16)))[0]
        return
    below, rest = pattern >> 16, pattern & 0xFFFF
    if rest == 0x8000:
        assert got == below + (below & 1)
    else:
        assert got == below + (rest > 0x8000)


@pytest.mark.spec("NUM-004")
@given(patterns=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20))
def test_widening_is_exact_and_undone_by_narrowing(patterns: list[int]) -> None:
    words = np.array(patterns, np.uint16)
    wide = widen(words)
    assert wide.tobytes() == b"".join(struct.pack("<I", pattern << 16) for pattern in patterns)
    finite = words[~np.isnan(wide)]
    np.testing.assert_array_equal(narrow(widen(finite), np.dtype(np.uint16)), finite)
    halves = words.view(np.float16)[np.isfinite(words.view(np.float16))]
    np.testing.assert_array_equal(narrow(widen(halves), np.dtype(np.float16)), halves)


@pytest.mark.spec("DEQ-002", "DEQ-004", "DEQ-005", "DEQ-006")
@given(bits=BITS, group=GROUPS, dtype=DTYPES, rows=st.integers(1, 3), groups=st.integers(1, 3), seed=SEEDS)
def test_dequantising_rounds_the_product_and_then_the_sum(
    bits: int, group: int, dtype: np.dtype, rows: int, groups: int, seed: int
) -> None:
    """Against double arithmetic: a product and a sum of two float32 round once when they are cast from double."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (rows, groups * group)).astype(np.uint8)
    scales, biases = (narrow(rng.normal(size=(rows, groups)).astype(np.float32), dtype) for _ in range(2))
    matrix = QuantizedMatrix(pack_codes(codes, bits), scales, biases, bits, group)
    scale, bias = (np.repeat(widen(c).astype(np.float64), group, axis=1) for c in (scales, biases))
    product = (codes * scale).astype(np.float32).astype(np.float64)
    wanted = (product + bias).astype(np.float32)
    np.testing.assert_array_equal(dequantize(matrix), wanted)
    if dtype == np.float32:
        np.testing.assert_array_equal(dequantize_as(matrix), wanted)
    tokens = rng.integers(0, rows, 4)
    np.testing.assert_array_equal(embed(matrix, tokens), wanted[tokens])
    if dtype == np.uint16:
        rounded = widen(narrow((codes * scale).astype(np.float32), dtype)).astype(np.float64)
        np.testing.assert_array_equal(dequantize_as(matrix), narrow((rounded + bias).astype(np.float32), dtype))


@pytest.mark.spec("DEQ-020", "DEQ-021", "DEQ-022")
@given(bits=BITS, group=GROUPS, dtype=DTYPES, rows=st.integers(1, 4), seed=SEEDS)
def test_a_weight_comes_back_within_a_step(bits: int, group: int, dtype: np.dtype, rows: int, seed: int) -> None:
    """A step of the group, and what rounding the coefficients to their dtype adds over the whole range."""
    weights = narrow(random_weights(seed, rows, 2 * group), dtype)
    wide = widen(weights).astype(np.float64)
    matrix = quantize(weights, bits, group)
    assert (matrix.bits, matrix.group_size, matrix.scales.dtype) == (bits, group, dtype)
    back = dequantize(matrix).astype(np.float64)
    grouped = wide.reshape(rows, 2, group)
    span = grouped.max(-1) - grouped.min(-1)
    largest = np.abs(grouped).max(-1)
    top = 2**bits - 1
    # the step grows when the edge's code is rounded down: by at most 1 / (2 * code), and the code is at least top / 2
    step = np.maximum(span / top, 1e-7) * (1 + 1 / top) * (1 + 2**-20)
    precision = {np.dtype(np.float32): 2**-23, np.dtype(np.float16): 2**-10, np.dtype(np.uint16): 2**-7}[dtype]
    slack = precision * (largest + top * step) + (2**-24 * top if dtype == np.float16 else 0)
    # a weight at the far end of the range may fall outside the codes by one rounding of the edge's code
    allowed = np.repeat((step + slack)[..., None], group, axis=2).reshape(wide.shape)
    assert (np.abs(back - wide) <= allowed).all()


@pytest.mark.spec("DEQ-021")
@given(bits=BITS, group=GROUPS, seed=SEEDS)
def test_the_larger_edge_of_a_group_is_exact_in_float32(bits: int, group: int, seed: int) -> None:
    weights = random_weights(seed, 3, group)
    matrix = quantize(weights, bits, group)
    codes = unpack_codes(matrix.packed, bits)
    for row, held, scale, bias in zip(weights, codes, matrix.scales[:, 0], matrix.biases[:, 0], strict=True):
        edge = row.min() if abs(row.min()) > abs(row.max()) else row.max()
        if bias != 0:
            assert bias == edge
            assert (held[row == edge] == 0).all()
            assert (scale > 0) == (edge < 0)


@pytest.mark.spec("DEQ-020", "DEQ-021")
@given(bits=BITS, group=GROUPS, seed=SEEDS)
def test_quantising_is_blind_to_the_sign_of_the_weights(bits: int, group: int, seed: int) -> None:
    """Codes of -w are those of w, with both coefficients negated, wherever one edge is strictly the larger."""
    weights = np.random.default_rng(seed).normal(size=(4, group)).astype(np.float32)
    first, second = quantize(weights, bits, group), quantize(-weights, bits, group)
    np.testing.assert_array_equal(first.packed, second.packed)
    np.testing.assert_array_equal(first.scales, -second.scales)
    np.testing.assert_array_equal(first.biases, -second.biases)


@pytest.mark.spec("DEQ-023")
@given(bits=BITS, group=GROUPS, seed=SEEDS, place=st.integers(0, 31))
def test_a_nan_takes_no_part_in_its_group(bits: int, group: int, seed: int, place: int) -> None:
    """The others are quantised as if the NaN were any value inside their range."""
    weights = np.random.default_rng(seed).normal(size=(1, group)).astype(np.float32)
    spoiled, filled = weights.copy(), weights.copy()
    spoiled[0, place] = np.nan
    filled[0, place] = weights[0, place - 1]
    got, wanted = quantize(spoiled, bits, group), quantize(filled, bits, group)
    np.testing.assert_array_equal(got.scales, wanted.scales)
    np.testing.assert_array_equal(got.biases, wanted.biases)
    others = np.arange(group) != place
    np.testing.assert_array_equal(
        unpack_codes(got.packed, bits)[:, others], unpack_codes(wanted.packed, bits)[:, others]
    )


@pytest.mark.spec("DEQ-010", "NUM-005")
@given(bits=BITS, group=GROUPS, tokens=st.integers(1, 3), rows=st.integers(1, 5), seed=SEEDS)
def test_a_linear_layer_is_its_dequantised_matrix_rounded_once(
    bits: int, group: int, tokens: int, rows: int, seed: int
) -> None:
    """Products are exact in double, so a sum in any order is within one rounding of the float32 of the true value."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, 2 * group)).astype(np.float32)
    matrix = quantize(random_weights(seed, rows, 2 * group), bits, group)
    weights = dequantize(matrix).astype(np.float64)
    got = linear(x, matrix)
    products = x[:, None, :].astype(np.float64) * weights
    wanted, size = products.sum(-1), np.abs(products).sum(-1)
    assert (np.abs(got - wanted) <= np.abs(wanted) * 2**-24 + size * 2**-52 * 2 * group + 2**-149).all()
    np.testing.assert_array_equal(got, linear(x, dequantize(matrix)))


@pytest.mark.spec("DEQ-001")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits: got 3, wanted 4 or 8"),
        ({"group_size": 16}, "group size: got 16"),
        ({"packed": np.zeros((2, 8), np.int32)}, "wanted uint32"),
        ({"packed": np.zeros((2, 7), np.uint32)}, "a row of 56 codes"),
        ({"packed": np.zeros((3, 8), np.uint32)}, r"scales: got shape \(2, 1\), wanted \(3, 1\)"),
        ({"scales": np.zeros((2, 1), np.float64)}, "scales: got float64"),
        ({"biases": np.zeros((2, 1), np.float16)}, "scales are float32, biases float16"),
    ],
)
def test_parts_that_make_no_matrix_are_refused(change: dict[str, object], message: str) -> None:
    sound = {"packed": np.zeros((2, 8), np.uint32), "bits": 4, "group_size": 64}
    sound |= {name: np.zeros((2, 1), np.float32) for name in ("scales", "biases")}
    QuantizedMatrix(**sound)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=message):
        QuantizedMatrix(**(sound | change))  # type: ignore[arg-type]
