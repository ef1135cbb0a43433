"""The pieces of training on MLX against what they stand for, values and gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_mlx import functions
from edge0_mlx.train import elementwise
from edge0_mlx.train.delta import chunked_delta_rule, unit_lower_inverse
from edge0_mlx.train.experts import SortedCall, gathered_experts
from edge0_mlx.train.floats import ExpertWeights
from edge0_mlx.train.losses import forward_kl, tail_reverse_kl
from edge0_ref import losses as reference
from edge0_ref.contract import Array

# Sums of at most n float32 terms in two orders: both within (n + 8) units of the sum of sizes. Sizes here are near 1,
# n is at most some hundreds, and a gradient's chain is a handful of such sums.
BOUND = 5 * 512 * 2.0**-24


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(11)


def value_and_slopes(function: Callable[..., mx.array], *inputs: Array) -> tuple[Array, list[Array]]:
    """A function's value, and the gradients of a weighted sum of it."""
    arrays = [mx.array(part.astype(np.float32)) for part in inputs]
    weights = mx.array(np.random.default_rng(1).normal(size=function(*arrays).shape).astype(np.float32))
    slopes = mx.grad(lambda *parts: (function(*parts) * weights).sum(), argnums=tuple(range(len(arrays))))(*arrays)
    return np.array(function(*arrays)), [np.array(slope) for slope in slopes]


def assert_same(one: Callable[..., mx.array], other: Callable[..., mx.array], *inputs: Array) -> None:
    """Values and gradients agree, relative to the largest."""
    (value, slopes), (wanted, wanted_slopes) = (value_and_slopes(each, *inputs) for each in (one, other))
    for got, right in zip([value, *slopes], [wanted, *wanted_slopes], strict=True):
        assert np.abs(got - right).max() <= BOUND * max(1.0, np.abs(right).max())


ONE_INPUT = {
    "exp": mx.exp,
    "sigmoid": functions.sigmoid,
    "silu": functions.silu,
    "softmax": lambda x: mx.softmax(x, axis=-1),
    "log_softmax": lambda x: x - mx.logsumexp(x, axis=-1, keepdims=True),
}


@pytest.mark.parametrize("name", ONE_INPUT)
def test_functions_of_the_host_are_those_of_mlx(name: str, random: np.random.Generator) -> None:
    x = random.normal(size=(6, 9)) * 4
    x[0, :2] = -95.0, 95.0 if name != "exp" else 2.0  # beyond the range of float32 exponentials
    assert_same(getattr(elementwise, name), ONE_INPUT[name], x)


def test_swiglu_of_the_host_is_that_of_mlx(random: np.random.Generator) -> None:
    assert_same(elementwise.swiglu, functions.swiglu, random.normal(size=(6, 9)), random.normal(size=(6, 9)))


def token_by_token(q: mx.array, k: mx.array, v: mx.array, beta: mx.array, log_decay: mx.array) -> mx.array:
    """[DEC-021] The recurrence as it is written, [batch, tokens, key_heads, share, value_size]."""
    batch, tokens, key_heads, key_size = q.shape
    state = mx.zeros((batch, key_heads, v.shape[3], v.shape[4], key_size))
    rows = []
    for t in range(tokens):
        qt, kt = q[:, t, :, None, None], k[:, t, :, None, None]
        state = state * mx.exp(log_decay[:, t])[..., None, None]
        delta = (v[:, t] - (state * kt).sum(-1)) * beta[:, t][..., None]
        state = state + delta[..., None] * kt
        rows.append((state * qt).sum(-1))
    return mx.stack(rows, axis=1)


@pytest.mark.spec("DEC-021")
@pytest.mark.parametrize("tokens", [1, 5, 32, 70])
def test_the_delta_rule_in_chunks_is_the_delta_rule(tokens: int, random: np.random.Generator) -> None:
    """Keys that are almost parallel too: there a power series for the inverse would overflow."""
    shapes = {"q": (2, tokens, 2, 8), "k": (2, tokens, 2, 8), "v": (2, tokens, 2, 3, 4)}
    q, k, v = (random.normal(size=shape) for shape in shapes.values())
    k = k * 0.2 + 1.0
    q, k = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    beta, log_decay = random.uniform(0, 1, (2, tokens, 2, 3)), -random.uniform(0, 0.3, (2, tokens, 2, 3))

    def chunked(*parts: mx.array) -> mx.array:
        return chunked_delta_rule(*parts, mx.zeros((2, 2, 3, 8, 4)))[0]

    assert_same(chunked, token_by_token, q, k, v, beta, log_decay)


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_the_inverse_is_one(size: int, random: np.random.Generator) -> None:
    lower = np.tril(random.uniform(-1, 1, (3, size, size)), -1).astype(np.float32)
    inverse = np.array(unit_lower_inverse(mx.array(lower))).astype(np.float64)
    product = inverse @ (np.eye(size) + lower)
    assert np.abs(product - np.eye(size)).max() <= size * 2.0**-24 * np.abs(inverse).max() * size


def test_sorted_and_gathered_experts_are_each_tokens_experts(random: np.random.Generator) -> None:
    held = ExpertWeights(*(random.normal(size=s).astype(np.float32) / 4 for s in ((5, 8, 6), (5, 8, 6), (5, 6, 8))))
    weights = ExpertWeights(*map(mx.array, held))
    chosen = np.stack([random.permutation(5)[:2] for _ in range(9)])
    chosen[:, 0] = np.where(chosen[:, 0] == 3, chosen[:, 1], chosen[:, 0])  # an expert that is hardly used, and twice

    def one_by_one(x: mx.array, shares: mx.array) -> mx.array:
        rows = []
        for t, experts in enumerate(chosen.tolist()):
            outputs = [
                functions.swiglu(x[t] @ weights.gate[e], x[t] @ weights.up[e]) @ weights.down[e] for e in experts
            ]
            rows.append(sum((shares[t, j] * y for j, y in enumerate(outputs)), mx.array(0.0)))
        return mx.stack(rows)

    def sorted_by_expert(x: mx.array, shares: mx.array) -> mx.array:
        call = SortedCall(chosen, weights)
        return elementwise.on_host(call.forward, call.backward, one_by_one)(x, shares)

    x, shares = random.normal(size=(9, 8)), random.uniform(size=(9, 2))
    assert_same(sorted_by_expert, one_by_one, x, shares)
    assert_same(partial(gathered_experts, chosen, weights), one_by_one, x, shares)


@pytest.mark.spec("TRN-001", "TRN-002")
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (forward_kl, reference.forward_kl),
        (lambda t, s: tail_reverse_kl(t, s, 4), lambda t, s: reference.tail_reverse_kl(t, s, 4)),
    ],
    ids=["forward", "reverse with tail"],
)
def test_losses_are_those_of_the_reference(loss: Any, wanted: Any, random: np.random.Generator) -> None:
    teacher, student = random.normal(size=(5, 16)) * 3, random.normal(size=(5, 16)) * 3
    losses, slopes = wanted(teacher, student)
    told, slope = mx.value_and_grad(lambda s: loss(mx.array(teacher.astype(np.float32)), s).sum())(
        mx.array(student.astype(np.float32))
    )
    assert abs(told.item() - losses.sum()) <= BOUND * max(1.0, losses.sum())
    assert np.abs(np.array(slope) - slopes).max() <= BOUND * max(1.0, np.abs(slopes).max())
