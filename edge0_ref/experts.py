"""What one expert computes, and how a token's experts are added up."""

import numpy as np
from jaxtyping import Float32

from edge0_ref import kernels
from edge0_ref.contract import Expert
from edge0_ref.functions import swiglu
from edge0_ref.lora import linear

Activations = Float32[np.ndarray, "tokens hidden"]


def run_expert(x: Activations, expert: Expert) -> Activations:
    """[EXE-003] One routed expert on its tokens: down(silu(gate x) * (up x)). A LoRA never touches it."""
    return linear(swiglu(linear(x, expert.gate), linear(x, expert.up)), expert.down)


def combine(outputs: Float32[np.ndarray, "tokens k hidden"], weights: Float32[np.ndarray, "tokens k"]) -> Activations:
    """[EXE-004] y = sum over j of weights[j] * outputs[j]: float64, best expert first, rounded once.

    The order belongs to the routing, not to the executor: that is why all executors agree to the bit.
    """
    y = np.empty((outputs.shape[0], outputs.shape[2]), np.float32)
    kernels.weighted_sum(outputs, weights, y)
    return y
