"""What the right answer is: slow, obvious, float64, and foreign to every implementation it judges.

Nothing here is taken from a backend. Where an answer comes with an error bound, the bound is derived beside it:
u = 2**-24 is float32's unit roundoff, and a dot product of n terms summed in float32 in any order, over weights that
were rounded when they were dequantised, is off by at most (2n + 8) u times the sum of its terms' magnitudes.
"""

import math
from typing import NamedTuple

import numpy as np

from conformance.profiles import FLOAT32, Profile
from edge0_ref.contract import Expert, Lora, PrerouterHead, QuantizedMatrix, Routing, SigmoidGroup

U = 2.0**-24
FLUSHED = 2.0**-126  # what an operation may lose that has no subnormals: less than the smallest normal float32
CODES = 2.0**9  # a group's scale and bias may be lost so, of which the largest code is a multiple


class Bounded(NamedTuple):
    """A value and how far a float32 implementation may be from it."""

    value: np.ndarray
    bound: np.ndarray


def real(values: np.ndarray) -> np.ndarray:
    """float64 of float32, float16 or bfloat16 patterns (uint16), from the definition of the format."""
    if values.dtype != np.uint16:
        return values.astype(np.float64)
    words = values.astype(np.int64)
    sign, exponent, fraction = 1 - 2 * (words // 2**15), words // 2**7 % 2**8, words % 2**7
    normal = (1 + fraction / 128) * 2.0 ** (exponent - 127)
    subnormal = fraction / 128 * 2.0**-126
    special = np.where(fraction == 0, np.inf, np.nan)
    values64 = np.where(exponent == 0, subnormal, np.where(exponent == 255, special, normal))
    return np.copysign(values64, sign)


def codes(matrix: QuantizedMatrix) -> np.ndarray:
    """Integer codes [rows, cols]: each word is a number in base 2**bits, its last digit first."""
    base, digits = 2**matrix.bits, 32 // matrix.bits
    words = matrix.packed.astype(np.int64)
    unpacked = np.stack([words // base**digit % base for digit in range(digits)], axis=-1)
    return unpacked.reshape(words.shape[0], -1)


def per_element(coefficients: np.ndarray, group_size: int) -> np.ndarray:
    """Column j uses the coefficient of group j // group_size."""
    columns = np.arange(coefficients.shape[1] * group_size) // group_size
    return real(coefficients)[:, columns]


def dense(weight: QuantizedMatrix | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight in float64, and the magnitude its rounding errors are relative to."""
    if not isinstance(weight, QuantizedMatrix):
        return real(weight), np.abs(real(weight))
    product = codes(weight) * per_element(weight.scales, weight.group_size)
    bias = per_element(weight.biases, weight.group_size)
    return product + bias, np.abs(product) + np.abs(bias)


def dequantized(matrix: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray]:
    """float32 weights rounded twice, and rounded once (fused): both are right.

    A product of a code and a float32 is exact in float64, and float64 has more than twice float32's digits, so
    rounding a float64 sum of two float32 to float32 is float32 addition.
    """
    product = codes(matrix) * per_element(matrix.scales, matrix.group_size)
    bias = per_element(matrix.biases, matrix.group_size)
    twice = (product.astype(np.float32).astype(np.float64) + bias).astype(np.float32)
    return twice, to_odd(product, bias).astype(np.float32)


def to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Round a + b to float64, an inexact sum with its last bit set: rounding that again is as rounding a + b once."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    words = total.view(np.int64)
    even = (words & 1) == 0
    towards = np.where((lost > 0) == (total > 0), words + 1, words - 1)
    return np.where((lost != 0) & even, towards, words).view(np.float64)


def quantized(weights: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, biases) by the stated algorithm, one group after the other, every operation in float32."""
    rows = real(weights).astype(np.float32)
    groups = rows.shape[1] // group_size
    found = np.zeros(rows.shape, np.int64)
    scales, biases = np.zeros((rows.shape[0], groups), np.float32), np.zeros((rows.shape[0], groups), np.float32)
    for r in range(rows.shape[0]):
        for g in range(groups):
            columns = slice(g * group_size, (g + 1) * group_size)
            scales[r, g], biases[r, g] = group_coefficients(rows[r, columns], bits)
            for c in range(columns.start, columns.stop):
                step = (rows[r, c] - biases[r, g]) / scales[r, g]
                found[r, c] = 0 if np.isnan(step) else min(max(round(float(step)), 0), 2**bits - 1)
    return found, scales, biases


def group_coefficients(group: np.ndarray, bits: int) -> tuple[np.float32, np.float32]:
    """The unrounded scale and bias of a group. Python's `round` is rint: to even."""
    numbers = [w for w in group if not np.isnan(w)]
    highest, lowest = max(numbers), min(numbers)
    scale = max((highest - lowest) / np.float32(2**bits - 1), np.float32(1e-7))
    edge = lowest if abs(lowest) > abs(highest) else highest
    scale = scale if abs(lowest) > abs(highest) else -scale
    steps = np.float32(round(float(edge / scale)))
    return (scale, np.float32(0)) if steps == 0 else (edge / steps, edge)


def stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 rounded to the dtype of a file; bfloat16 by choosing the nearer of its two neighbours."""
    if dtype != np.uint16:
        return values.astype(dtype)
    below = values.view(np.uint32) // 2**16
    above = below + 1
    low, high = real(below.astype(np.uint16)), real(above.astype(np.uint16))
    middle = (low + high) / 2
    wide = values.astype(np.float64)
    up = (np.abs(wide) > np.abs(middle)) | ((wide == middle) & (below % 2 == 1))
    return np.where(up, above, below).astype(np.uint16)


def folded(terms: list[float]) -> float:
    """The stated order of a sum: the upper half onto the lower half, until one is left."""
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        lower, upper = terms[:half], terms[half:]
        terms = [a + b for a, b in zip(lower, upper, strict=False)] + lower[len(upper) :]
    return terms[0]


def rounded(x: np.ndarray, profile: Profile) -> np.ndarray:
    """The same numbers as a profile keeps them."""
    if profile is FLOAT32:
        return x
    if profile.name == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(x.dtype)
    return real(stored(x.astype(np.float32), np.dtype(np.uint16))).astype(x.dtype)


def product(
    x: np.ndarray,
    weight: QuantizedMatrix | np.ndarray,
    x_error: np.ndarray | None = None,
    profile: Profile = FLOAT32,
) -> Bounded:
    """W x for rows of x, each known up to x_error; a narrow profile rounds x on the way in and W x on the way out."""
    w, magnitude = dense(weight)
    wide = x.astype(np.float64)
    size = np.abs(wide) if x_error is None else np.abs(wide) + x_error
    error = size - np.abs(wide) + profile.roundoff * size + profile.smallest + FLUSHED
    value, terms = wide @ w.T, size @ magnitude.T
    bound = (2 * w.shape[1] + 8) * U * terms + error @ np.abs(w).T * (1 + 1e-3)
    bound += FLUSHED * (2 * w.shape[1] + CODES * size.sum(axis=1, keepdims=True))
    bound = bound + profile.roundoff * (np.abs(value) + bound) + profile.smallest
    beyond = (terms > profile.largest) | (size.max(axis=1, initial=0.0, keepdims=True) > profile.largest)
    return Bounded(value, np.where(beyond, np.inf, bound))


def linear(
    x: np.ndarray, weight: QuantizedMatrix | np.ndarray, lora: Lora | None = None, profile: Profile = FLOAT32
) -> Bounded:
    """[LOR-001] W x + scale * B (A x)."""
    base = product(x, weight, None, profile)
    if lora is None:
        return base
    inner = product(x, lora.down, None, profile)
    update = product(inner.value, lora.up, inner.bound, profile)
    value = base.value + lora.scale * update.value
    rounding = (4 * U + 2 * profile.roundoff) * (np.abs(base.value) + np.abs(lora.scale * update.value))
    return Bounded(value, base.bound + abs(lora.scale) * update.bound + rounding + profile.smallest + 2 * FLUSHED)


def sigmoid(z: np.ndarray) -> np.ndarray:
    powers = np.exp(-np.abs(z.astype(np.float64)))
    return np.where(z >= 0, 1.0, powers) / (1 + powers)


def expert_output(x: np.ndarray, expert: Expert, profile: Profile = FLOAT32) -> Bounded:
    """down(silu(gate x) * (up x)); |silu'| < 1.1 carries the error of the gate onwards."""
    gate, up = product(x, expert.gate, None, profile), product(x, expert.up, None, profile)
    opened = gate.value * sigmoid(gate.value)
    inner = opened * up.value
    error = 1.1 * gate.bound * (np.abs(up.value) + up.bound) + np.abs(opened) * up.bound
    error += (8 * U + 2 * profile.roundoff) * np.abs(inner) + 2 * profile.smallest
    error += FLUSHED * (1 + 2**7 * (np.abs(up.value) + up.bound))  # the sigmoid of -88 is subnormal
    return product(inner, expert.down, error, profile)


def experts_output(x: np.ndarray, routing: Routing, experts: list[Expert], profile: Profile = FLOAT32) -> Bounded:
    """y[t] = sum over j of weights[t, j] * expert[t, j](x[t])."""
    values, bounds = np.zeros(x.shape), np.zeros(x.shape)
    k = routing.experts.shape[1]
    for expert in np.unique(routing.experts):
        tokens, places = np.nonzero(routing.experts == expert)
        weights = routing.weights[tokens, places, None].astype(np.float64)
        y = expert_output(x[tokens], experts[int(expert)], profile)
        rounding = ((k + 2) * U + 2 * profile.roundoff) * np.abs(y.value)
        np.add.at(values, tokens, weights * y.value)
        np.add.at(bounds, tokens, np.abs(weights) * (y.bound + rounding + FLUSHED) + 2 * FLUSHED + profile.smallest)
    return Bounded(values, bounds)


def plain_experts_output(
    x: np.ndarray, routing: Routing, experts: list[Expert], profile: Profile = FLOAT32
) -> np.ndarray:
    """The same in plain float32: the yardstick of what rounding costs on these very numbers."""
    y, x = np.zeros(x.shape, np.float32), rounded(x, profile)
    for expert in np.unique(routing.experts):
        gate, up, down = (dequantized(m)[0] for m in (experts[expert].gate, experts[expert].up, experts[expert].down))
        opened = x @ gate.T
        inner = opened / (1 + np.exp(-opened)) * (x @ up.T)
        weights = (routing.weights * (routing.experts == expert)).sum(axis=1, keepdims=True, dtype=np.float32)
        y += weights * (rounded(inner, profile) @ down.T)
    return y


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest, largest first, equal ones by ascending id."""
    return np.array([sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in values.tolist()], np.int64)


def softmax_weights(logits: np.ndarray, experts: np.ndarray) -> Bounded:
    """Softmax over the chosen; a float32 exp of z - top is off by u * (|z - top| + a few) of itself."""
    chosen = np.take_along_axis(logits.astype(np.float64), experts, axis=1)
    away = chosen - chosen.max(axis=1, keepdims=True)
    powers = np.exp(away)
    weights = powers / powers.sum(axis=1, keepdims=True)
    return Bounded(weights, weights * U * (2 * experts.shape[1] + 16 + 2 * np.abs(away)) + 2 * FLUSHED)


class GroupChoice(NamedTuple):
    """experts [tokens, k]; gap [tokens]: the smallest difference, other than a tie, that the choice rests on."""

    experts: np.ndarray
    gap: np.ndarray


def sigmoid_group_choice(logits: np.ndarray, spec: SigmoidGroup) -> GroupChoice:
    """The choice of the sigmoid family in float64, and how safe it is from another rounding of the scores."""
    bias = np.zeros(logits.shape[1]) if spec.expert_bias is None else real(spec.expert_bias)
    chosen, gaps = [], []
    for row in sigmoid(logits.astype(np.float64)) + bias:
        groups = row.reshape(spec.num_groups, -1)
        sums = np.array([sum(sorted(group.tolist())[-2:]) for group in groups])
        kept = largest(sums[None], spec.top_groups)[0]
        left = [e for e in range(len(row)) if e // groups.shape[1] in kept]
        chosen.append(sorted(left, key=lambda e: (-row[e], e))[: spec.top_k])
        gaps.append(min(smallest_gap(sums), smallest_gap(row[left])))
    return GroupChoice(np.array(chosen, np.int64), np.array(gaps))


def smallest_gap(values: np.ndarray) -> float:
    differences = np.diff(np.sort(values))
    return float(differences[differences > 0].min(initial=np.inf))


def sigmoid_group_weights(logits: np.ndarray, experts: np.ndarray, scale: float) -> Bounded:
    """Raw scores, without bias, over their sum plus 1e-20, times the scale."""
    scores = sigmoid(np.take_along_axis(logits.astype(np.float64), experts, axis=1))
    total = scores.sum(axis=1, keepdims=True) + 1e-20
    weights = scores / total * scale
    lost = FLUSHED * (1 + abs(scale) * (experts.shape[1] + 2) / total)
    return Bounded(weights, np.abs(weights) * U * (2 * experts.shape[1] + 16) + lost)


def gelu(z: np.ndarray) -> np.ndarray:
    return np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in z.ravel()]).reshape(z.shape)


def head_logits(head: PrerouterHead, features: np.ndarray, profile: Profile = FLOAT32) -> Bounded:
    """[PRE-001] linear f + fc2 gelu(fc1 f); |gelu'| < 1.13."""
    direct, inner = product(features, head.linear, None, profile), product(features, head.fc1, None, profile)
    opened = gelu(inner.value)
    error = 1.13 * inner.bound + (8 * U + profile.roundoff) * np.abs(inner.value) + 2 * FLUSHED + profile.smallest
    learned = product(opened, head.fc2, error, profile)
    value = direct.value + learned.value
    rounding = (2 * U + profile.roundoff) * np.abs(value) + profile.smallest + FLUSHED
    return Bounded(value, direct.bound + learned.bound + rounding)
