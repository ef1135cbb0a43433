"""RMS normalisation, used by every mixer and every layer."""

import mlx.core as mx
from jaxtyping import Float

from edge0_mlx import kernels


def rms_norm(
    x: Float[mx.array, "*batch size"], weight: Float[mx.array, " size"], epsilon: float
) -> Float[mx.array, "*batch size"]:
    """[DEC-001] x / sqrt(mean(x^2) + epsilon) * weight, in the dtype of x, which MLX would widen to the weight's."""
    return kernels.rms_norm(x, weight, epsilon).astype(x.dtype)
