"""Gated delta net: a short convolution, then a matrix state that forgets and corrects itself (Qwen3.5).

Between its projections everything is float32 on every device.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32

from edge0_mlx import kernels
from edge0_mlx.arrays import from_numpy
from edge0_mlx.functions import l2_normalize, sigmoid, silu, softplus
from edge0_mlx.kernels import Rows
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.weights import Weights
from edge0_ref.config import GatedDeltaConfig
from edge0_ref.contract import Array

Activations = Float[mx.array, "tokens hidden"]
L2_EPSILON = 1e-6


class DeltaState(NamedTuple):
    """conv: the last raw rows, each [1, channels]; memory [1, key_heads, share, value_size, key_size], zeros at start.

    A key head's value heads lie together, so that its key reaches them without being repeated.
    """

    conv: Rows
    memory: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return *self.conv, self.memory

    @classmethod
    def of(cls, *arrays: mx.array) -> "DeltaState":
        """The way back from `arrays`."""
        return cls(arrays[:-1], arrays[-1])


def rows_of(values: Array) -> Rows:
    """The rows of a matrix, each [1, channels]."""
    return tuple(from_numpy(row[None]) for row in values)


def decay_of(a: mx.array, a_log: mx.array, dt_bias: mx.array) -> Float[mx.array, "tokens heads"]:
    """[DEC-023] exp(-exp(A_log) * softplus(a + dt_bias)): in (0, 1]."""
    return mx.exp(-mx.exp(a_log) * softplus(a + dt_bias))


def query_and_key_scales(heads: int, size: int) -> Float32[mx.array, "heads 1 1 1"]:
    """[DEC-022] What unit vectors are multiplied by, queries first: size ** -0.5, and 1."""
    return from_numpy(np.repeat(np.array([size**-0.5, 1.0], np.float32), heads)[:, None, None, None])


class GatedDelta:
    """[DEC-020] One gated delta net layer's weights; the state is a DeltaState."""

    def __init__(self, weights: Weights, path: str, config: GatedDeltaConfig, epsilon: float) -> None:
        self.config, self.epsilon = config, epsilon
        self.in_proj = weights.joined(*(f"{path}.in_proj_{name}" for name in ("qkv", "z", "a", "b")))
        self.out_proj = weights.linear(f"{path}.out_proj")
        self.taps = rows_of(weights.checkpoint.vector(f"{path}.conv1d.weight")[:, :, 0].T)
        self.a_log, self.dt_bias = weights.vector(f"{path}.A_log"), weights.vector(f"{path}.dt_bias")
        self.norm = weights.vector(f"{path}.norm.weight")
        self.key_scales = query_and_key_scales(config.key_heads, config.key_size)

    def new_state(self) -> DeltaState:
        config = self.config
        conv = (mx.zeros(self.taps[0].shape),) * (config.conv_kernel - 1)
        return DeltaState(conv, mx.zeros((1, *self._heads, config.value_size, config.key_size)))

    @property
    def _heads(self) -> tuple[int, int]:
        """Key heads, and the value heads that share one."""
        return self.config.key_heads, self.config.value_heads // self.config.key_heads

    def __call__(self, x: Activations, state: DeltaState) -> tuple[Activations, DeltaState]:
        tokens = x.shape[0]
        raw, z, a, b = (projected.astype(mx.float32) for projected in self.in_proj(x))
        mixed, conv = kernels.causal_conv(raw, self.taps, state.conv)
        q, k, v = self._split(silu(mixed))
        beta, decay = sigmoid(b), decay_of(a, self.a_log, self.dt_bias)
        heads = (tokens, *self._heads, 1, 1)
        y, memory = kernels.delta_rule(q, k, v, beta.reshape(heads), decay.reshape(heads), state.memory)
        gated = rms_norm(y, self.norm, self.epsilon).reshape(tokens, -1) * silu(z)
        return self.out_proj(gated.astype(x.dtype)), DeltaState(conv, memory)

    def _split(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """q, k, both of unit length but q scaled, and v, in the shapes of `kernels.delta_rule`."""
        config, tokens = self.config, mixed.shape[0]
        keys, values = mx.split(mixed, [2 * config.key_heads * config.key_size], axis=1)
        keys = keys.reshape(tokens, 2 * config.key_heads, 1, 1, config.key_size)
        q, k = mx.split(l2_normalize(keys, self.key_scales, L2_EPSILON), 2, axis=1)
        return q, k, values.reshape(tokens, *self._heads, config.value_size, 1)
