"""From logits to the next token: NumPy, the same for every backend, bit for bit given the logits.

The order, one function a step:

    penalties -> temperature -> top-k -> top-p -> min-p -> renormalise -> draw

Tokens are ordered by (logit descending, id ascending) once; every later step keeps a front part of that order. Weights
are `exp` in float64 rounded once to float32, as everywhere in edge0, and sums run along the order: so a seed gives the
same text on any machine whose logits agree.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from edge0_ref.errors import NonFiniteError, UsageError

Scores = Float64[np.ndarray, " vocab"]
Weights = Float64[np.ndarray, " ranked"]


@dataclass(frozen=True)
class SamplingSettings:
    """[ENG-010] How tokens are chosen; checked once. Defaults choose the most likely token.

    temperature: 0 is greedy; top_k: 0 is off; top_p: 1 is off; min_p: 0 is off; repetition_penalty: 1 is off;
    presence_penalty, frequency_penalty: 0 is off; seed: 0 .. 2**64 - 1, or None for a fresh one. Raises UsageError.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, value, allowed, wanted in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1 (off)"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (off) to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0.01 <= self.repetition_penalty <= 100,
                "0.01 to 100; 1 is off",
            ),
            ("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 100, "-100 to 100"),
            ("frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 100, "-100 to 100"),
            ("seed", self.seed or 0, 0 <= (self.seed or 0) < 2**64, "0 to 2**64 - 1"),
        ):
            if not allowed:
                raise UsageError(f"{name} is {value}, wanted {wanted}")


class DrawStream:
    """[ENG-011] The random numbers of one text: draw i of a seed is double i of Philox(key=seed), used once.

    >>> first, again = DrawStream(7), DrawStream(7)
    >>> [first.next() for _ in range(3)] == [again.next() for _ in range(3)]
    True
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def next(self) -> float:
        """A double in [0, 1)."""
        return float(self._generator.random())


def sample(
    logits: Float32[np.ndarray, " vocab"],
    settings: SamplingSettings,
    prompt: Sequence[int],
    generated: Sequence[int],
    draws: DrawStream,
) -> int:
    """[ENG-012] The next token id from logits [vocab]. Greedy takes no draw. Raises NonFiniteError."""
    if not np.isfinite(logits).all():
        raise NonFiniteError("the logits hold NaN or infinity, so no token can be chosen")
    scores = penalize(logits.astype(np.float64), settings, prompt, generated)
    if settings.temperature == 0:
        return int(np.argmax(scores))  # the first of equals: the lower id
    ids = rank(scores, settings.top_k)
    weights = relative_weights(scores[ids], settings.temperature)
    kept = keep_min_p(keep_top_p(weights, settings.top_p), settings.min_p)
    return int(ids[draw_index(kept, draws.next())])


def penalize(scores: Scores, settings: SamplingSettings, prompt: Sequence[int], generated: Sequence[int]) -> Scores:
    """[ENG-013] Repetition divides positive and multiplies negative scores of tokens of prompt and text so far.

    Presence and frequency subtract from tokens of the generated text alone: once, and for each occurrence.
    """
    scores = scores.copy()
    seen = np.unique(np.array([*prompt, *generated], np.int64))
    penalty = settings.repetition_penalty
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    for token, count in Counter(generated).items():
        scores[token] -= settings.presence_penalty + settings.frequency_penalty * count
    return scores


def rank(scores: Scores, top_k: int) -> Int64[np.ndarray, " ranked"]:
    """[ENG-014] Ids by (score descending, id ascending), only the first `top_k` of them if that is not 0.

    >>> rank(np.array([1.0, 3.0, 3.0, 2.0]), top_k=3).tolist()
    [1, 2, 3]
    """
    candidates = np.arange(scores.size)
    if 0 < top_k < scores.size:
        boundary = np.partition(scores, -top_k)[-top_k]
        candidates = np.flatnonzero(scores >= boundary)
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    return np.asarray(order[:top_k] if top_k else order)


def relative_weights(scores: Weights, temperature: float) -> Weights:
    """[ENG-015] exp((score - highest) / temperature), rounded once to float32; scores in rank order.

    The highest is taken off before the division: no temperature is too small.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.exp((scores - scores[0]) / temperature).astype(np.float32)
    return np.asarray(rounded, np.float64)


def keep_top_p(weights: Weights, top_p: float) -> Float64[np.ndarray, " kept"]:
    """[ENG-016] The shortest front part with at least `top_p` of the mass: the token that crosses the line is kept.

    >>> keep_top_p(np.array([5.0, 3.0, 2.0]), 0.6).tolist()
    [5.0, 3.0]
    """
    mass = np.cumsum(weights)
    return weights[: int(np.searchsorted(mass, top_p * mass[-1], side="left")) + 1] if top_p < 1 else weights


def keep_min_p(weights: Weights, min_p: float) -> Float64[np.ndarray, " kept"]:
    """[ENG-017] Tokens at least `min_p` times as likely as the most likely one."""
    return np.asarray(weights[weights >= min_p * weights[0]])


def draw_index(weights: Weights, draw: float) -> int:
    """[ENG-018] Inverse CDF: the first place whose running sum exceeds `draw` of the total. Weight 0 is never drawn.

    >>> [draw_index(np.array([3.0, 1.0]), draw) for draw in (0.0, 0.74, 0.75)]
    [0, 0, 1]
    """
    mass = np.cumsum(weights)
    return int(np.searchsorted(mass, draw * mass[-1], side="right"))
