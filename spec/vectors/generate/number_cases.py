"""Chapter 1: the fold, and conversions between float formats."""

import math
from collections.abc import Callable

from oracles import gelu, sigmoid
from values import Json, case, tensor

BIG = 2.0**53


def cases() -> list[Json]:
    return [*fold(), *widening(), *narrowing(), *functions()]


def fold() -> list[Json]:
    rows = [
        ("one", [3.5], 3.5, "single-term", "A sum of one term is the term."),
        ("halves", [BIG, 1.0, -BIG, 1.0], 2.0, "ascending-sum", "(2^53 - 2^53) + (1 + 1); ascending order gives 1."),
        ("middle", [BIG, 1.0, 1.0, -BIG, 1.0], 3.0, "odd-middle", "0, 2, 1, then 0 + 1 and 2: the middle one stays."),
        (
            "neighbors",
            [BIG, -BIG, 1.0, 1.0],
            1.0,
            "pairwise-neighbors exact-sum",
            "2^53 + 1 ties to 2^53, -2^53 + 1 is exact: the stated order gives 1, not the true 2.",
        ),
    ]
    return [
        case(
            f"numbers/fold-{name}",
            "NUM-002",
            "fold",
            flags,
            comment,
            "hand",
            {"terms": tensor(terms, "float64")},
            expected={"sum": tensor(total, "float64")},
        )
        for name, terms, total, flags, comment in rows
    ]


def words(dtype: str, text: str) -> Json:
    listed = text.split()
    return {"shape": [len(listed)], dtype: listed}


def widening() -> list[Json]:
    rows = [
        ("bfloat16", "3f80 c000 0001 8000 7f80 ff80", "3f800000 c0000000 00010000 80000000 7f800000 ff800000"),
        ("float16", "3c00 c000 0001 8000 7c00 03ff", "3f800000 c0000000 33800000 80000000 7f800000 387fc000"),
    ]
    return [
        case(
            f"numbers/widen-{dtype}",
            "NUM-004",
            "widen",
            "flush-subnormals wrong-format sign-of-zero",
            "1, -2, the smallest subnormal, -0, infinity and one more, exactly.",
            "hand",
            {"values": words(dtype, narrow)},
            expected={"values": words("float32", wide)},
        )
        for dtype, narrow, wide in rows
    ]


def narrowing() -> list[Json]:
    rows = [
        ("bfloat16-ties", "3f808000 3f818000 bf808000", "3f80 3f82 bf80", "half-even", "Ties go to the even pattern."),
        ("bfloat16-near-ties", "3f808001 3f807fff", "3f81 3f80", "truncation half-up", "One bit beside a tie decides."),
        ("bfloat16-overflow", "7f7f8000 7f7f7fff ff7fffff", "7f80 7f7f ff80", "saturation", "Rounds up to infinity."),
        (
            "bfloat16-nan",
            "7fc00001 7f800001 ffc00000",
            "7fc0 7fc0 ffc0",
            "nan-to-infinity",
            "A NaN whose payload sits low.",
        ),
        (
            "bfloat16-small",
            "00000001 00008001 80000000",
            "0000 0001 8000",
            "flush-subnormals",
            "Subnormals round, too.",
        ),
        ("float16-ties", "3f801000 3f803000", "3c00 3c02", "half-even", "1 + 2^-11 and 1 + 3 * 2^-11."),
        (
            "float16-overflow",
            "477fefff 477ff000",
            "7bff 7c00",
            "saturation",
            "65520 is the first number above the range.",
        ),
        ("float16-small", "33000000 33000001 b3800000", "0000 0001 8001", "flush-subnormals", "2^-25 ties to zero."),
    ]
    return [
        case(
            f"numbers/narrow-{name}",
            "NUM-004",
            "narrow",
            flags,
            comment,
            "hand",
            {"values": words("float32", wide), "dtype": name.split("-")[0]},
            expected={"values": words(name.split("-")[0], narrow)},
        )
        for name, wide, narrow, flags, comment in rows
    ]


def softplus(z: float) -> float:
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def functions() -> list[Json]:
    """Float64 values rounded once; none lies so near the middle of two float32 that an ulp of float64 would matter."""
    points = [-200.0, -100.0, -20.5, -3.25, -1.0, -0.1015625, 0.0, 0.375, 1.0, 2.5, 10.75, 88.5, 100.0, 1000.0]
    table: dict[str, tuple[Callable[[float], float], str]] = {
        "sigmoid": (sigmoid, "float32-exp overflow"),
        "silu": (lambda z: z * sigmoid(z), "float32-exp sigmoid-rounded-first"),
        "softplus": (softplus, "float32-exp overflow log-of-sum"),
        "gelu": (gelu, "float32-erf gelu-tanh"),
    }
    return [
        case(
            f"numbers/function-{name}",
            "NUM-003",
            "elementwise",
            flags,
            "In float64, rounded once, over a wide range.",
            "float64 oracle",
            {"function": name, "x": tensor(points, "float32")},
            expected={"y": tensor([function(z) for z in points], "float32")},
        )
        for name, (function, flags) in table.items()
    ]
