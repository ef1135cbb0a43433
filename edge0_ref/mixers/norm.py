"""RMS normalisation, used by every mixer and every layer."""

import numpy as np
from jaxtyping import Float32

from edge0_ref import kernels


def rms_norm(
    x: Float32[np.ndarray, "*batch size"], weight: Float32[np.ndarray, " size"], epsilon: float
) -> Float32[np.ndarray, "*batch size"]:
    """[DEC-001] x / sqrt(mean(x^2) + epsilon) * weight, rounded once.

    >>> rms_norm(np.array([[3.0, 4.0]], np.float32), np.ones(2, np.float32), 0.0)
    array([[0.84852815, 1.1313709 ]], dtype=float32)
    """
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)
    y = np.empty_like(flat)
    kernels.rms_norm(flat, weight, epsilon, y)
    return y.reshape(x.shape)
