"""Cases and values of the vector files, written without a line of edge0."""

from fractions import Fraction
from typing import Any

import numpy as np

Json = dict[str, Any]
WORDS = {
    "float16": (np.float16, np.uint16, 4),
    "bfloat16": (np.uint16, np.uint16, 4),
    "float32": (np.float32, np.uint32, 8),
    "uint32": (np.uint32, np.uint32, 8),
    "float64": (np.float64, np.uint64, 16),
}


def tensor(values: Any, dtype: str, shape: tuple[int, ...] | None = None) -> Json:
    """The JSON form of an array; bfloat16 values are given as patterns. Equal elements are written once."""
    if dtype == "int64":
        whole = np.asarray(values, np.int64)
        return {"shape": list(shape or whole.shape), "int64": whole.ravel().tolist()}
    kind, word, digits = WORDS[dtype]
    array = np.ascontiguousarray(np.asarray(values).astype(kind))
    shape = array.shape if shape is None and np.ndim(values) else shape or ()
    words = [f"{int(pattern):0{digits}x}" for pattern in array.reshape(-1).view(word)]
    same = len(words) > 8 and len(set(words)) == 1
    return {"shape": list(shape), dtype: words[0] if same else words}


def filled(word: str, dtype: str, *shape: int) -> Json:
    return {"shape": list(shape), dtype: word}


def case(
    name: str,
    requirements: str,
    operation: str,
    flags: str,
    comment: str,
    source: str,
    inputs: Json,
    **result: Any,
) -> Json:
    """One case; `requirements` and `flags` are words in a string. result: expected (and bound), either, or error."""
    return {
        "id": name,
        "requirements": requirements.split(),
        "operation": operation,
        "flags": flags.split(),
        "comment": comment,
        "source": source,
        "inputs": inputs,
        **result,
    }


def error(kind: str, *mentions: str) -> Json:
    return {"kind": kind, "mentions": list(mentions)}


def round_to(value: Fraction, precision: int, smallest: int) -> Fraction:
    """The nearest number of `precision` significant bits and at least 2**smallest apart, ties to even."""
    if value == 0:
        return value
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, smallest)
    return round(value / unit) * unit


def float32(value: Fraction) -> Fraction:
    return round_to(value, 24, -149)


def bfloat16(value: Fraction) -> Fraction:
    return round_to(value, 8, -133)


def patterns(values: Any) -> np.ndarray:
    """bfloat16 patterns of numbers that bfloat16 holds exactly."""
    words = np.asarray(values, np.float32).view(np.uint32)
    if (words & 0xFFFF).any():
        raise ValueError(f"{values}: not bfloat16 numbers")
    return (words >> 16).astype(np.uint16)


def numbers(array: np.ndarray, dtype: str) -> list[list[float]]:
    """A coefficient array [rows, groups] as Python floats."""
    if dtype == "bfloat16":
        array = (np.asarray(array).astype(np.uint32) << 16).view(np.float32)
    return [[float(x) for x in row] for row in np.asarray(array)]


def pack(codes: list[list[int]], bits: int) -> np.ndarray:
    """Words of codes, the first code in the lowest bits, by place value."""
    each = 32 // bits
    return np.array(
        [
            [sum(code * 2 ** (bits * j) for j, code in enumerate(row[i : i + each])) for i in range(0, len(row), each)]
            for row in codes
        ],
        np.uint32,
    )


class Matrix:
    """A quantised matrix of chosen codes [rows][cols], scales and biases [rows][groups] (bfloat16: exact numbers)."""

    def __init__(
        self, codes: Any, scales: Any, biases: Any, bits: int = 4, group: int = 32, dtype: str = "float32"
    ) -> None:
        self.codes = [[int(code) for code in row] for row in codes]
        self.bits, self.group, self.dtype = bits, group, dtype
        stored = [patterns(c) if dtype == "bfloat16" else np.asarray(c, dtype) for c in (scales, biases)]
        self.stored = stored
        self.scales, self.biases = (numbers(c, dtype) for c in stored)

    def json(self) -> Json:
        scales, biases = (tensor(c, self.dtype) for c in self.stored)
        packed = tensor(pack(self.codes, self.bits), "uint32")
        return {"packed": packed, "scales": scales, "biases": biases, "bits": self.bits, "group_size": self.group}

    def parts(self, row: int, col: int) -> tuple[Fraction, Fraction, Fraction]:
        """(code, scale, bias) of an element, exactly."""
        group = col // self.group
        return Fraction(self.codes[row][col]), Fraction(self.scales[row][group]), Fraction(self.biases[row][group])

    def unfused(self) -> list[list[float]]:
        return self._each(lambda code, scale, bias: float32(float32(code * scale) + bias))

    def fused(self) -> list[list[float]]:
        return self._each(lambda code, scale, bias: float32(code * scale + bias))

    def magnitude(self) -> list[list[float]]:
        """|code * scale| + |bias|: what error bounds are relative to."""
        return self._each(lambda code, scale, bias: abs(code * scale) + abs(bias))

    def _each(self, rule: Any) -> list[list[float]]:
        cols = range(len(self.codes[0]))
        return [[float(rule(*self.parts(row, col))) for col in cols] for row in range(len(self.codes))]
