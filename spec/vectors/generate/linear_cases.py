"""Chapters 2 and 8: linear layers, quantised and plain, with and without a LoRA, against the float64 oracle."""

from typing import Any

import numpy as np
from dequant_cases import RAMP, random_matrix
from oracles import absolute, add, linear
from values import Json, Matrix, case, error, patterns, tensor


def cases() -> list[Json]:
    return [*plain(), *quantized(), *refused(), *loras()]


def judged(
    name: str,
    ids: str,
    flags: str,
    comment: str,
    source: str,
    x: np.ndarray,
    weight: Json,
    values: list[list[float]],
    sizes: list[list[float]],
    lora: Any = None,
) -> Json:
    """One case; lora: (down, up, scale) as float32 arrays and a number."""
    inputs: Json = {"x": tensor(x, "float32"), "weight": weight}
    if lora is not None:
        inputs["lora"] = {"down": tensor(lora[0], "float32"), "up": tensor(lora[1], "float32"), "scale": lora[2]}
    y, bounds = [], []
    for row in x.tolist():
        value, bound = linear(values, sizes, row)
        if lora is not None:
            down, up = lora[0].tolist(), lora[1].tolist()
            inner, slack = linear(down, absolute(down), row)
            update, update_bound = linear(up, absolute(up), inner, slack)
            value, bound = add(value, bound, update, update_bound, lora[2])
        y.append(value)
        bounds.append(bound)
    return case(
        f"linear/{name}",
        ids,
        "linear",
        flags,
        comment,
        source,
        inputs,
        expected={"y": tensor(y, "float64")},
        bound={"y": tensor(bounds, "float64")},
    )


def whole(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Small whole numbers: every dtype holds them."""
    return rng.integers(-4, 5, shape).astype(np.float32)


def plain() -> list[Json]:
    listed = []
    for seed, dtype in ((21, "float32"), (22, "float16"), (23, "bfloat16")):
        rng = np.random.default_rng(seed)
        x, w = rng.normal(size=(2, 32)).astype(np.float32), whole(rng, 3, 32)
        stored = tensor(patterns(w) if dtype == "bfloat16" else w, dtype)
        listed.append(
            judged(
                f"plain-{dtype}",
                "DEQ-010 NUM-005 NUM-008",
                "transposed dtype-of-weight",
                "y = x W^T in float32.",
                f"float64 oracle, seed {seed}",
                x,
                stored,
                w.tolist(),
                absolute(w.tolist()),
            )
        )
    x = np.float32([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    w = np.float32([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    listed.append(
        judged(
            "orientation",
            "DEQ-010",
            "transposed",
            "Rows of the weight are outputs.",
            "hand",
            x,
            tensor(w, "float32"),
            w.tolist(),
            absolute(w.tolist()),
        )
    )
    return listed


def quantized() -> list[Json]:
    rows = [
        ("int4", 24, 4, 32, "float32", 1, "nibble-order scale-sign bias-dropped"),
        ("int4-rows", 25, 4, 64, "float32", 3, "row-stride transposed"),
        ("int4-bfloat16", 26, 4, 64, "bfloat16", 2, "bfloat16-accumulation"),
        ("int4-float16", 27, 4, 32, "float16", 2, "float16-accumulation"),
        ("int8", 28, 8, 32, "float32", 2, "byte-order bits-ignored"),
        ("int8-bfloat16", 29, 8, 128, "bfloat16", 2, "bfloat16-accumulation"),
    ]
    listed = []
    for name, seed, bits, group, dtype, tokens, flags in rows:
        matrix = random_matrix(seed, bits, group, dtype, rows=2, cols=128)
        x = np.random.default_rng(seed + 100).normal(size=(tokens, 128)).astype(np.float32)
        listed.append(
            judged(
                name,
                "DEQ-010 NUM-005",
                flags,
                "Dequantised rows times float32 activations.",
                f"float64 oracle, seed {seed}",
                x,
                matrix.json(),
                matrix.unfused(),
                matrix.magnitude(),
            )
        )
    cancel = Matrix([RAMP * 4], [[0.1] * 4], [[-0.75] * 4])
    x = np.float32([[1000.0 * (-1) ** (j // 16) for j in range(128)]])
    listed.append(
        judged(
            "cancellation",
            "DEQ-010 NUM-005",
            "float16-accumulation",
            "Large terms that cancel to nothing.",
            "float64 oracle",
            x,
            cancel.json(),
            cancel.unfused(),
            cancel.magnitude(),
        )
    )
    return listed


def refused() -> list[Json]:
    return [
        case(
            "linear/refuses-columns",
            "DEQ-011",
            "linear",
            "unchecked-shapes",
            "33 columns against a weight of 32.",
            "hand",
            {"x": {"shape": [1, 33], "float32": "3f800000"}, "weight": {"shape": [2, 32], "float32": "3f800000"}},
            error=error("ShapeError", "33", "32"),
        ),
        case(
            "linear/refuses-lora-ranks",
            "LOR-001",
            "linear",
            "unchecked-shapes",
            "lora_A of rank 2 beside lora_B of rank 3.",
            "hand",
            {
                "x": {"shape": [1, 32], "float32": "3f800000"},
                "weight": {"shape": [4, 32], "float32": "3f800000"},
                "lora": {
                    "down": {"shape": [2, 32], "float32": "3f800000"},
                    "up": {"shape": [4, 3], "float32": "3f800000"},
                    "scale": 1.0,
                },
            },
            error=error("ShapeError", "2", "3"),
        ),
    ]


def loras() -> list[Json]:
    rows = [
        ("lora", 31, 4, 2.0, "scale-ignored a-b-swapped", "Rank 4, alpha / r = 2."),
        ("lora-rank-1", 32, 1, 0.5, "scale-ignored", "Rank 1."),
        ("lora-negative-scale", 33, 2, -1.0, "scale-ignored", "The scale is any number."),
        ("lora-small", 34, 2, 2.0**-12, "merged-into-int4", "An update far below one int4 step is kept."),
    ]
    listed = []
    for name, seed, rank, scale, flags, comment in rows:
        rng = np.random.default_rng(seed)
        matrix = random_matrix(seed, 4, 32, "float32", rows=3, cols=64)
        x = rng.normal(size=(2, 64)).astype(np.float32)
        lora = rng.normal(size=(rank, 64)).astype(np.float32), rng.normal(size=(3, rank)).astype(np.float32), scale
        listed.append(
            judged(
                name,
                "LOR-001",
                flags,
                comment,
                f"float64 oracle, seed {seed}",
                x,
                matrix.json(),
                matrix.unfused(),
                matrix.magnitude(),
                lora,
            )
        )
    x, w = np.float32([[1.0, 2.0]]), np.float32([[1.0, 0.0], [0.0, 1.0]])
    lora = np.float32([[1.0, 1.0]]), np.float32([[2.0], [-1.0]]), 0.5
    listed.append(
        judged(
            "lora-by-hand",
            "LOR-001",
            "a-b-swapped scale-ignored",
            "A x = 3, B 3 = [6, -3]: y = [4, 0.5].",
            "hand",
            x,
            tensor(w, "float32"),
            w.tolist(),
            absolute(w.tolist()),
            lora,
        )
    )
    return listed
