"""Kimi delta attention: the gated delta net in which every key channel of a head forgets at its own rate (Ling 3).

Between its projections everything is float32 on every device.
"""

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32

from edge0_mlx import kernels
from edge0_mlx.functions import l2_normalize, sigmoid, silu
from edge0_mlx.mixers.gated_delta import L2_EPSILON, DeltaState, query_and_key_scales, rows_of
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.weights import Weights
from edge0_ref.config import KdaConfig

Activations = Float[mx.array, "tokens hidden"]
PerChannel = Float32[mx.array, "tokens heads size"]


def channel_decay(f: PerChannel, a_log: mx.array, dt_bias: mx.array, lower_bound: float) -> PerChannel:
    """[DEC-051] exp(lower_bound * sigmoid(exp(A_log) * (f + dt_bias))): never below exp(lower_bound)."""
    return mx.exp(lower_bound * sigmoid(mx.exp(a_log)[:, None] * (f + dt_bias)))


class Kda:
    """[DEC-050] One Kimi delta attention layer's weights; the state is a DeltaState.

    The convolutions of q, k and v are one over their channels side by side. No rotary embedding: the decay is what
    tells positions apart.
    """

    def __init__(self, weights: Weights, path: str, config: KdaConfig, epsilon: float) -> None:
        self.config, self.epsilon = config, epsilon
        self.in_proj = weights.joined(*(f"{path}.{name}_proj" for name in "qkvfbg"))
        self.o_proj = weights.linear(f"{path}.o_proj")
        taps = [weights.checkpoint.vector(f"{path}.{name}_conv1d.weight")[:, :, 0] for name in "qkv"]
        self.taps = rows_of(np.concatenate(taps).T)
        self.a_log = weights.vector(f"{path}.A_log")
        self.dt_bias = weights.vector(f"{path}.dt_bias").reshape(config.heads, config.head_size)
        self.key_scales = query_and_key_scales(config.heads, config.head_size)
        self.o_norm = weights.vector(f"{path}.o_norm.weight")

    def new_state(self) -> DeltaState:
        config = self.config
        conv = (mx.zeros(self.taps[0].shape),) * (config.conv_kernel - 1)
        return DeltaState(conv, mx.zeros((1, config.heads, 1, config.head_size, config.head_size)))

    def __call__(self, x: Activations, state: DeltaState) -> tuple[Activations, DeltaState]:
        config, tokens = self.config, x.shape[0]
        *qkv, f, b, g = (projected.astype(mx.float32) for projected in self.in_proj(x))
        mixed, conv = kernels.causal_conv(mx.concatenate(qkv, axis=1), self.taps, state.conv)
        keys, v = mx.split(silu(mixed), [2 * config.heads * config.head_size], axis=1)
        keys = keys.reshape(tokens, 2 * config.heads, 1, 1, config.head_size)
        q, k = mx.split(l2_normalize(keys, self.key_scales, L2_EPSILON), 2, axis=1)
        by_head = (tokens, config.heads, config.head_size)
        decay = channel_decay(f.reshape(by_head), self.a_log, self.dt_bias, config.lower_bound)
        y, memory = kernels.delta_rule(
            q,
            k,
            v.reshape(tokens, config.heads, 1, config.head_size, 1),
            sigmoid(b).reshape(tokens, config.heads, 1, 1, 1),
            decay.reshape(tokens, config.heads, 1, 1, config.head_size),
            state.memory,
        )
        normed = rms_norm(y, self.o_norm, self.epsilon).reshape(tokens, -1)
        return self.o_proj((normed * sigmoid(g)).astype(x.dtype)), DeltaState(conv, memory)
