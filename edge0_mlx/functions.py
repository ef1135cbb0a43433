"""Elementwise functions, in float32 whatever the dtype of their operands, rounded to it once at the end."""

import math

import mlx.core as mx
from jaxtyping import Float

Vector = Float[mx.array, "..."]


def sigmoid(x: Vector) -> Vector:
    return mx.sigmoid(x.astype(mx.float32)).astype(x.dtype)


def silu(x: Vector) -> Vector:
    wide = x.astype(mx.float32)
    return (wide * mx.sigmoid(wide)).astype(x.dtype)


def swiglu(gate: Vector, up: Vector) -> Vector:
    """[EXE-003] silu(gate) * up."""
    wide = gate.astype(mx.float32)
    return (wide * mx.sigmoid(wide) * up.astype(mx.float32)).astype(gate.dtype)


def softplus(x: Vector) -> Vector:
    return mx.logaddexp(x.astype(mx.float32), 0.0).astype(x.dtype)


def gelu(x: Vector) -> Vector:
    """[PRE-004] The exact gelu, x * (1 + erf(x / sqrt 2)) / 2; never the tanh form."""
    wide = x.astype(mx.float32)
    return (wide * (1.0 + mx.erf(wide * math.sqrt(0.5))) * 0.5).astype(x.dtype)


def l2_normalize(x: Float[mx.array, "*batch size"], scale: float | mx.array, epsilon: float) -> Vector:
    """[DEC-022] x * scale / sqrt(sum(x^2) + epsilon): epsilon is on the sum, not on the mean."""
    wide = x.astype(mx.float32)
    return (wide * (scale * mx.rsqrt((wide * wide).sum(-1, keepdims=True) + epsilon))).astype(x.dtype)
