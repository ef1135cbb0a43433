"""Chapter 2, quantisation: what mlx on its CPU device makes of chosen weights."""

import mlx.core as mx
import numpy as np
from values import Json, case, error, filled, tensor

MLX = f"mlx {mx.__version__} cpu"
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def cases() -> list[Json]:
    return [*chosen(), *drawn(), *refused()]


def encoded(array: mx.array, dtype: str) -> Json:
    if dtype != "bfloat16":
        return tensor(np.array(array), dtype)
    words = np.array(array.astype(mx.float32)).view(np.uint32) >> 16
    return tensor(words.astype(np.uint16), dtype)


def quantized(
    name: str,
    weights: np.ndarray,
    dtype: str,
    bits: int,
    group: int,
    flags: str,
    comment: str,
    ids: str = "DEQ-020 DEQ-021 DEQ-022",
    seed: str = "",
) -> Json:
    stored = mx.array(weights.astype(np.float32)).astype(DTYPES[dtype])
    packed, scales, biases = mx.quantize(stored, group_size=group, bits=bits)
    expected = {
        "packed": tensor(np.array(packed), "uint32"),
        "scales": encoded(scales, dtype),
        "biases": encoded(biases, dtype),
    }
    inputs = {"weights": encoded(stored, dtype), "bits": bits, "group_size": group}
    return case(f"quantize/{name}", ids, "quantize", flags, comment, f"{MLX}{seed}", inputs, expected=expected)


def chosen() -> list[Json]:
    line = np.linspace(-1, 1, 32)
    outlier = np.where(np.arange(32) == 5, -7.0, 0.01 * np.arange(32))
    ties = (np.arange(32) % 15 + 0.5).clip(0, 15)  # with 0 and 15 present, scale -1: each is a tie
    ties[[0, 1]] = 0.0, 15.0
    rows = [
        ("line", line, "symmetric-range", "|low| = |high|: the high end is the edge, the scale is negative."),
        ("zeros", np.zeros(32), "division-by-zero scale-floor", "All zero: the scale is the smallest one, 1e-7."),
        ("constant", np.full(32, 0.3), "division-by-zero", "No range, a large edge: the edge code is clamped away."),
        ("all-positive", np.linspace(1, 2, 32), "range-starts-at-zero", "The range is that of the weights, without 0."),
        (
            "all-negative",
            np.linspace(-2, -1, 32),
            "range-starts-at-zero",
            "The low end is the edge, the scale positive.",
        ),
        ("outlier", outlier, "edge-not-exact", "One weight is the edge and comes back exactly."),
        ("ties", ties, "half-even", "(w - bias) / scale lies on halves: rint goes to even."),
        ("tiny-range", 1 + np.arange(32) * 1e-9, "scale-floor", "A range below 15e-7."),
        (
            "zero-edge-code",
            np.linspace(0, 1e-8, 32),
            "edge-code-zero",
            "The edge rounds to code 0: bias 0, scale kept.",
        ),
        ("huge", np.linspace(-1e30, 2e30, 32), "overflow", "Large weights."),
    ]
    listed = [quantized(name, w[None], "float32", 4, 32, flags, comment) for name, w, flags, comment in rows]
    two = np.stack([np.r_[line, 2 * line], np.r_[-3 * line, line + 5]])
    listed.append(
        quantized("rows-and-groups", two, "float32", 4, 32, "group-index row-stride", "Four different groups.")
    )
    nan = np.where(np.arange(64) == 40, np.nan, np.r_[line, line])
    return [*listed, *without_nan_codes(nan[None])]


def without_nan_codes(weights: np.ndarray) -> list[Json]:
    """The coefficients of a group with a NaN, which are those of its other weights."""
    whole = quantized(
        "nan-range", weights, "float32", 4, 32, "nan-poisons-range", "A NaN does not widen the range.", "DEQ-023"
    )
    del whole["expected"]["packed"]  # the code of a NaN is not specified
    return [whole]


def drawn() -> list[Json]:
    rows = [
        (11, "float32", 4, 32),
        (12, "float32", 4, 64),
        (13, "float32", 4, 128),
        (14, "bfloat16", 4, 32),
        (15, "bfloat16", 4, 64),
        (16, "float16", 4, 64),
        (17, "float32", 8, 32),
        (18, "bfloat16", 8, 64),
        (19, "float16", 8, 128),
        (61, "float32", 8, 64),
        (62, "float32", 8, 128),
        (63, "bfloat16", 4, 128),
        (64, "bfloat16", 8, 32),
        (65, "bfloat16", 8, 128),
        (66, "float16", 4, 32),
        (67, "float16", 4, 128),
        (68, "float16", 8, 32),
        (69, "float16", 8, 64),
    ]
    listed = []
    for seed, dtype, bits, group in rows:
        weights = np.random.default_rng(seed).normal(0, 0.05, (1, 128)).astype(np.float32)
        flags = "coefficients-rounded-first nibble-order" if dtype != "float32" else "half-even nibble-order"
        comment = "Codes come from the unrounded scale and bias; only the stored coefficients are rounded."
        listed.append(
            quantized(
                f"random-{dtype}-{bits}-bit-{group}", weights, dtype, bits, group, flags, comment, seed=f", seed {seed}"
            )
        )
    return listed


def refused() -> list[Json]:
    rows = {"ragged-rows": filled("3f800000", "float32", 2, 48), "one-axis": filled("3f800000", "float32", 64)}
    return [
        case(
            f"quantize/refuses-{name}",
            "DEQ-024",
            "quantize",
            "ragged-groups",
            "Rows that are not whole groups of 32.",
            "hand",
            {"weights": weights, "bits": 4, "group_size": 32},
            error=error("ShapeError", "32"),
        )
        for name, weights in rows.items()
    ]
