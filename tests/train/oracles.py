"""Divergences by the book: plain Python, one class after the other, sums without rounding."""

import math
from collections.abc import Sequence


def chances(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    powers = [math.exp(value - largest) for value in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def divergence(first: Sequence[float], second: Sequence[float]) -> float:
    """sum of first * log(first / second)."""
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(first, second, strict=True) if a > 0)


def with_tail(values: Sequence[float], kept: Sequence[int]) -> list[float]:
    """The kept classes and, last, what all others come to."""
    return [values[c] for c in kept] + [math.fsum(v for c, v in enumerate(values) if c not in set(kept))]


def likeliest(logits: Sequence[float], k: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda c: (-logits[c], c))[:k]
