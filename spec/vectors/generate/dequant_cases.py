"""Chapter 2, dequantisation: by hand, and in exact fractions rounded as the requirement says."""

# ruff: noqa: E501 (a case is a row of a table)

import mlx.core as mx
import numpy as np
from values import Json, Matrix, case, error, numbers, patterns, tensor

RAMP = list(range(16)) * 2
MLX = f"mlx {mx.__version__} cpu"


def cases() -> list[Json]:
    return [*exact(), *rounded(), *refused(), *own_dtype()]


def exact() -> list[Json]:
    """Products and sums that need no rounding: fused and unfused agree."""
    # ruff: noqa: E501 (a case is a row of a table)
    steps, halves = [[RAMP[j // 2] for j in range(64)]], [[j % 16 for j in range(128)]]
    rows = [
        ("ramp", "DEQ-003", "nibble-order", "Codes 0 to 15, twice.", Matrix([RAMP], [[1.0]], [[0.0]])),
        (
            "bytes",
            "DEQ-003",
            "byte-order bits-ignored",
            "8-bit codes, four a word.",
            Matrix([[(j * 37) % 256 for j in range(32)]], [[1.0]], [[-128.0]], 8),
        ),
        ("negative-scale", "DEQ-005", "scale-sign", "Scale -0.5.", Matrix([RAMP], [[-0.5]], [[1.0]])),
        ("bias", "DEQ-002", "bias-dropped zero-point", "A bias is added, not subtracted before scaling.",
         Matrix([RAMP], [[2.0]], [[-3.0]])),
        ("two-groups", "DEQ-006", "group-index", "Each group its own scale and bias.",
         Matrix([RAMP * 2], [[1.0, 0.25]], [[0.0, 8.0]])),
        ("group-of-64", "DEQ-006", "group-size-ignored", "Columns 32 to 63 still belong to group 0.",
         Matrix([[*steps[0], *RAMP, *RAMP]], [[1.0, -1.0]], [[0.5, 0.0]], 4, 64)),
        ("group-of-128", "DEQ-006", "group-size-ignored", "One group a row.", Matrix(halves, [[0.125]], [[1.0]], 4, 128)),
        ("rows", "DEQ-006", "row-stride", "Coefficients differ from row to row.",
         Matrix([RAMP * 2, RAMP[::-1] * 2], [[1.0, 2.0], [4.0, 8.0]], [[0.0, 1.0], [2.0, 3.0]])),
        ("bfloat16", "DEQ-002 NUM-004", "bfloat16-as-float16 bfloat16-as-integer", "Coefficients as published.",
         Matrix([RAMP], [[0.0078125]], [[-0.0625]], dtype="bfloat16")),
        ("float16", "DEQ-002 NUM-004", "float16-as-bfloat16", "float16 coefficients, one of them subnormal.",
         Matrix([RAMP * 2], [[2.0**-24, 0.5]], [[0.0, -2.0]], dtype="float16")),
        ("subnormal-scale", "DEQ-002", "flush-subnormals", "Coefficients below the smallest normal float32, and products of them.",
         Matrix([RAMP * 2], [[2.0**-149, -(2.0**-128)]], [[0.0, 2.0**-130]])),
        ("subnormal-bfloat16", "DEQ-002 NUM-004", "flush-subnormals", "The smallest bfloat16, whose float32 is subnormal.",
         Matrix([RAMP * 2], [[2.0**-133, 2.0**-126]], [[0.0, 2.0**-133]], dtype="bfloat16")),
        ("subnormal-weight", "DEQ-002", "flush-subnormals", "Normal coefficients that cancel to less than the smallest normal number.",
         Matrix([RAMP], [[2.0**-126]], [[-1.5 * 2.0**-126]])),
        ("constant", "DEQ-002", "division-by-scale", "Scale 0: every weight is the bias.",
         Matrix([RAMP], [[0.0]], [[0.75]])),
    ]  # fmt: skip
    listed = []
    for name, ids, flags, comment, matrix in rows:
        if matrix.fused() != matrix.unfused():
            raise ValueError(f"{name}: rounds")
        result = {"weights": tensor(matrix.unfused(), "float32")}
        listed.append(
            case(
                f"dequant/{name}", ids, "dequantize", flags, comment, "hand", {"matrix": matrix.json()}, expected=result
            )
        )
    return listed


def random_matrix(seed: int, bits: int, group: int, dtype: str, rows: int = 1, cols: int = 64) -> Matrix:
    rng = np.random.default_rng(seed)
    shape = (rows, cols // group)
    signs = rng.choice([-1.0, 1.0], shape)
    coefficients = [signs * rng.uniform(0.01, 0.1, shape), rng.normal(0, 0.3, shape)]
    if dtype == "bfloat16":  # keep the upper half: any bfloat16 will do
        coefficients = [(c.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for c in coefficients]
    return Matrix(rng.integers(0, 2**bits, (rows, cols)), *coefficients, bits=bits, group=group, dtype=dtype)


def rounded() -> list[Json]:
    rows = [(1, 4, 32, "float32"), (2, 4, 64, "bfloat16"), (3, 8, 32, "float32"), (4, 8, 64, "float16")]
    rows += [(71, 8, 64, "bfloat16"), (72, 4, 32, "float16")]
    listed = []
    for seed, bits, group, dtype in rows:
        matrix = random_matrix(seed, bits, group, dtype)
        alternatives = [{"weights": tensor(w, "float32")} for w in (matrix.unfused(), matrix.fused())]
        listed.append(
            case(
                f"dequant/random-{bits}-bit-{dtype}",
                "DEQ-002 DEQ-005",
                "dequantize",
                "one-rounding-to-float16 float64-result scale-sign",
                "Two roundings, or one fused; each element may be either.",
                f"float64 oracle, seed {seed}",
                {"matrix": matrix.json()},
                either=alternatives,
            )
        )
    return listed


def refused() -> list[Json]:
    good = Matrix([RAMP * 2], [[1.0, 1.0]], [[0.0, 0.0]]).json()
    changes = {
        "group-count": ({"scales": tensor([[1.0]], "float32"), "biases": tensor([[0.0]], "float32")}, ["scales"]),
        "biases-shape": ({"biases": tensor([[0.0]], "float32")}, ["biases"]),
        "group-size": ({"group_size": 48}, ["48"]),
        "bits": ({"bits": 3}, ["3"]),
        "code-dtype": ({"packed": tensor([[0] * 8], "int64")}, ["int64", "uint32"]),
        "mixed-dtypes": ({"biases": tensor([[0.0, 0.0]], "float16")}, ["float32", "float16"]),
        "coefficient-dtype": ({"scales": tensor([[1.0, 1.0]], "float64")}, ["scales", "float64"]),
    }
    return [
        case(
            f"dequant/refuses-{name}",
            "DEQ-001",
            "dequantize",
            "unchecked-shapes",
            "Three tensors that do not describe one matrix.",
            "hand",
            {"matrix": {**good, **change}},
            error=error("ShapeError", *mentions),
        )
        for name, (change, mentions) in changes.items()
    ]


def own_dtype() -> list[Json]:
    """The dequantisation of mlx itself, which rounds to the coefficients' dtype twice."""
    listed = []
    for seed, bits, dtype in (
        (5, 4, "bfloat16"),
        (6, 4, "float16"),
        (7, 8, "bfloat16"),
        (8, 4, "float32"),
        (73, 8, "float16"),
        (74, 8, "float32"),
    ):
        matrix = random_matrix(seed, bits, 32, dtype)
        if dtype == "bfloat16":
            stored = [mx.array(np.array(numbers(c, dtype), np.float32)).astype(mx.bfloat16) for c in matrix.stored]
        else:
            stored = [mx.array(c) for c in matrix.stored]
        packed = mx.array(np.array([[int(w, 16) for w in matrix.json()["packed"]["uint32"]]], np.uint32))
        weights = mx.dequantize(packed, *stored, group_size=32, bits=bits)
        plain = np.array(weights.astype(mx.float32))
        listed.append(
            case(
                f"dequant/own-dtype-{bits}-bit-{dtype}",
                "DEQ-004",
                "dequantize_as",
                "one-rounding float32-result",
                "The product is rounded before the bias is added, both to the coefficients' dtype.",
                f"{MLX}, seed {seed}",
                {"matrix": matrix.json()},
                expected={"weights": tensor(patterns(plain) if dtype == "bfloat16" else plain, dtype)},
            )
        )
    return listed
