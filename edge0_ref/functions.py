"""Elementwise functions: computed in float64, rounded once to float32 ([NUM-003]).

float32 `exp` and `tanh` change their last bits with the CPU; float64 ones, rounded once, do not.
"""

import numpy as np
from jaxtyping import Float32

from edge0_ref import kernels

Vector = Float32[np.ndarray, "..."]


def sigmoid(x: Vector) -> Vector:
    """1 / (1 + exp(-x)), without overflow on either side.

    >>> sigmoid(np.array([0.0, -200.0], np.float32)).tolist()
    [0.5, 0.0]
    """
    y = np.empty(x.shape, np.float32)
    kernels.sigmoid(np.ascontiguousarray(x).reshape(-1), y.reshape(-1))
    return y


def silu(x: Vector) -> Vector:
    """x * sigmoid(x), rounded once."""
    return swiglu(x, np.ones_like(x))


def swiglu(gate: Vector, up: Vector) -> Vector:
    """[EXE-003] silu(gate) * up, rounded once.

    >>> swiglu(np.array([1.0], np.float32), np.array([2.0], np.float32))
    array([1.4621172], dtype=float32)
    """
    y = np.empty(gate.shape, np.float32)
    kernels.gated(np.ascontiguousarray(gate).reshape(-1), np.ascontiguousarray(up).reshape(-1), y.reshape(-1))
    return y


def softplus(x: Vector) -> Vector:
    """log(1 + exp(x)), rounded once.

    >>> softplus(np.array([-100.0, 0.0, 100.0], np.float32)).tolist()
    [3.783505853677006e-44, 0.6931471824645996, 100.0]
    """
    return np.logaddexp(0.0, x.astype(np.float64)).astype(np.float32)


def gelu(x: Vector) -> Vector:
    """[PRE-004] The exact gelu, x * (1 + erf(x / sqrt 2)) / 2; never the tanh form.

    >>> gelu(np.array([1.0], np.float32))
    array([0.8413448], dtype=float32)
    """
    flat = x.astype(np.float64).ravel()
    error = np.empty_like(flat)
    kernels.erf(flat / np.sqrt(2.0), error)
    return (flat * (1.0 + error) / 2.0).reshape(x.shape).astype(np.float32)


def l2_normalize(x: Float32[np.ndarray, "*batch size"], scale: float, epsilon: float) -> Vector:
    """[DEC-022] x * scale / sqrt(sum(x^2) + epsilon): epsilon is on the sum, not on the mean."""
    y = np.empty(x.shape, np.float32)
    vectors = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    kernels.l2_normalize(vectors, scale, epsilon, y.reshape(vectors.shape))
    return y
