"""Slow float64 oracles with error bounds: plain loops, exact sums, nothing shared with what they judge.

A function returns (value, bound) lists. `UNIT` is half a unit in the last place of a float32 near 1; how bounds are
derived and composed is written in spec/01-numbers.md.
"""

import math
from collections.abc import Sequence

UNIT = 2.0**-24
TINY = 2.0**-126
Row = Sequence[float]
Rows = Sequence[Row]


def dot(w: Row, size: Row, x: Row, slack: Row) -> tuple[float, float]:
    """Sum w x, with |w| <= size, and x known up to slack."""
    value = math.fsum(a * b for a, b in zip(w, x, strict=True))
    total = math.fsum(s * abs(b) for s, b in zip(size, x, strict=True))
    spread = math.fsum(s * d for s, d in zip(size, slack, strict=True))
    return value, (2 * len(w) + 8) * UNIT * (total + spread) + spread


def linear(weights: Rows, sizes: Rows, x: Row, slack: Row | None = None) -> tuple[list[float], list[float]]:
    slack = slack or [0.0] * len(x)
    pairs = [dot(w, s, x, slack) for w, s in zip(weights, sizes, strict=True)]
    return [v for v, _ in pairs], [b for _, b in pairs]


def absolute(weights: Rows) -> list[list[float]]:
    return [[abs(w) for w in row] for row in weights]


def add(a: Row, a_bound: Row, b: Row, b_bound: Row, scale: float = 1.0) -> tuple[list[float], list[float]]:
    """A + scale * b."""
    value = [x + scale * y for x, y in zip(a, b, strict=True)]
    bound = [
        d + abs(scale) * e + 4 * UNIT * (abs(x) + abs(scale * y))
        for x, d, y, e in zip(a, a_bound, b, b_bound, strict=True)
    ]
    return value, bound


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def gelu(z: float) -> float:
    return z * (1 + math.erf(z / math.sqrt(2))) / 2


def gelu_row(z: Row, slack: Row) -> tuple[list[float], list[float]]:
    """Gelu rises by at most 1.13 per unit; its own rounding is a few units of |z|."""
    return [gelu(v) for v in z], [1.13 * d + 8 * UNIT * abs(v) for v, d in zip(z, slack, strict=True)]


def swiglu_row(gate: Row, gate_slack: Row, up: Row, up_slack: Row) -> tuple[list[float], list[float]]:
    """Silu rises by at most 1.1 per unit."""
    values, bounds = [], []
    for g, dg, u, du in zip(gate, gate_slack, up, up_slack, strict=True):
        s = g * sigmoid(g)
        values.append(s * u)
        bounds.append(1.1 * dg * (abs(u) + du) + abs(s) * du + 8 * UNIT * abs(s * u))
    return values, bounds


def largest(values: Row, k: int) -> list[int]:
    """Ids of the k largest, one after the other; of equal ones the first."""
    left, chosen = list(range(len(values))), []
    for _ in range(k):
        best = left[0]
        for i in left:
            if values[i] > values[best]:
                best = i
        chosen.append(best)
        left.remove(best)
    return chosen


def softmax_routing(logits: Row, k: int) -> tuple[list[int], list[float], list[float]]:
    experts = largest(logits, k)
    top = logits[experts[0]]
    powers = [math.exp(logits[e] - top) for e in experts]
    total = math.fsum(powers)
    weights = [p / total for p in powers]
    bounds = [(2 * k + 16 + 2 * (top - logits[e])) * UNIT * w + TINY for e, w in zip(experts, weights, strict=True)]
    return experts, weights, bounds


def sigmoid_routing(
    logits: Row, k: int, groups: int, kept: int, scale: float, bias: Row | None
) -> tuple[list[int], list[float], list[float]]:
    scores = [sigmoid(z) for z in logits]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(logits), strict=True)]
    size = len(logits) // groups
    sums = [math.fsum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    stay = largest(sums, kept)
    experts = largest([c if e // size in stay else -math.inf for e, c in enumerate(choice)], k)
    total = math.fsum(scores[e] for e in experts) + 1e-20
    weights = [scores[e] / total * scale for e in experts]
    return experts, weights, [(2 * k + 16) * UNIT * abs(w) + TINY for w in weights]
