"""Gated delta net: a short convolution, then a matrix state that forgets and corrects itself (Qwen3.5).

Source: Gated Delta Networks (arXiv 2412.06464), in the form of Qwen3-Next / Qwen3.5.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from edge0_ref.config import GatedDeltaConfig
from edge0_ref.contract import Array
from edge0_ref.functions import l2_normalize, sigmoid, softplus
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]
L2_EPSILON = 1e-6


@dataclass
class DeltaState:
    """conv [kernel - 1, channels]: the last raw rows; memory [value_heads, value_size, key_size], zeros at start."""

    conv: Array
    memory: Array

    def copy(self) -> "DeltaState":
        return DeltaState(self.conv.copy(), self.memory.copy())


def decay_of(a: Array, a_log: Array, dt_bias: Array) -> Float32[np.ndarray, "tokens heads"]:
    """[DEC-023] exp(-exp(A_log) * softplus(a + dt_bias)): in (0, 1], rounded once."""
    step = softplus(a + dt_bias).astype(np.float64)
    return np.exp(-np.exp(a_log.astype(np.float64)) * step).astype(np.float32)


class GatedDelta:
    """[DEC-020] One gated delta net layer's weights; the state is a DeltaState."""

    def __init__(self, weights: Weights, path: str, config: GatedDeltaConfig, epsilon: float) -> None:
        self.config, self.epsilon, self.arithmetic = config, epsilon, weights.arithmetic
        self.in_proj = weights.joined(*(f"{path}.in_proj_{name}" for name in ("qkv", "z", "a", "b")))
        self.out_proj = weights.linear(f"{path}.out_proj")
        self.taps = np.ascontiguousarray(weights.vector(f"{path}.conv1d.weight")[:, :, 0].T)
        self.a_log, self.dt_bias = weights.vector(f"{path}.A_log"), weights.vector(f"{path}.dt_bias")
        self.norm = weights.vector(f"{path}.norm.weight")

    def new_state(self) -> DeltaState:
        config = self.config
        conv = np.zeros((config.conv_kernel - 1, self.taps.shape[1]), np.float32)
        return DeltaState(conv, np.zeros((config.value_heads, config.value_size, config.key_size), np.float32))

    def __call__(self, x: Activations, state: DeltaState) -> Activations:
        config, tokens = self.config, x.shape[0]
        raw, z, a, b = self.in_proj(x)
        q, k, v = self._convolved(raw, state)
        q = l2_normalize(q, config.key_size**-0.5, L2_EPSILON)
        k = l2_normalize(k, 1.0, L2_EPSILON)
        beta, decay = sigmoid(b), decay_of(a, self.a_log, self.dt_bias)
        per_channel = np.repeat(decay[:, :, None], config.key_size, axis=2)
        y = self.arithmetic.delta_rule(q, k, v, beta, per_channel, state.memory)
        normed = rms_norm(y, self.norm, self.epsilon).reshape(tokens, -1)
        return self.out_proj(normed * self.arithmetic.silu(z))

    def _convolved(self, raw: Array, state: DeltaState) -> tuple[Array, Array, Array]:
        """[DEC-020] Convolve, silu; split into q, k [tokens, key_heads, key_size] and v."""
        config, tokens = self.config, raw.shape[0]
        mixed = self.arithmetic.causal_conv(raw, self.taps, state.conv)
        keys = config.key_heads * config.key_size
        mixed = self.arithmetic.silu(mixed)
        q, k, v = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        by_key = (tokens, config.key_heads, config.key_size)
        values = v.reshape(tokens, config.value_heads, config.value_size)
        return q.reshape(by_key), k.reshape(by_key), np.ascontiguousarray(values)
