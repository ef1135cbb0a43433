"""Kimi delta attention: the gated delta net in which every key channel of a head forgets at its own rate (Ling 3).

Source: Kimi Linear (arXiv 2510.26692), in the form of Ling 3.0 with its bounded ("safe") gate.
"""

import numpy as np
from jaxtyping import Float32

from edge0_ref.config import KdaConfig
from edge0_ref.contract import Array
from edge0_ref.functions import l2_normalize, sigmoid
from edge0_ref.mixers.gated_delta import L2_EPSILON, DeltaState
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]
PerChannel = Float32[np.ndarray, "tokens heads size"]


def channel_decay(
    f: PerChannel, a_log: Float32[np.ndarray, " heads"], dt_bias: Float32[np.ndarray, "heads size"], lower_bound: float
) -> PerChannel:
    """[DEC-051] exp(lower_bound * sigmoid(exp(A_log) * (f + dt_bias))), rounded once: never below exp(lower_bound).

    log sigmoid z is -logaddexp(0, -z), which overflows on neither side.
    """
    z = np.exp(a_log.astype(np.float64))[:, None] * (f.astype(np.float64) + dt_bias)
    decay: PerChannel = np.exp(lower_bound * np.exp(-np.logaddexp(0.0, -z))).astype(np.float32)
    return decay


class Kda:
    """[DEC-050] One Kimi delta attention layer's weights; the state is a DeltaState.

    The convolutions of q, k and v are one over their channels side by side. No rotary embedding: the decay is what
    tells positions apart.
    """

    def __init__(self, weights: Weights, path: str, config: KdaConfig, epsilon: float) -> None:
        self.config, self.epsilon, self.arithmetic = config, epsilon, weights.arithmetic
        self.in_proj = weights.joined(*(f"{path}.{name}_proj" for name in "qkvfbg"))
        self.o_proj = weights.linear(f"{path}.o_proj")
        self.taps = np.concatenate(
            [weights.vector(f"{path}.{name}_conv1d.weight")[:, :, 0].T for name in "qkv"], axis=1
        )
        self.a_log = weights.vector(f"{path}.A_log")
        self.dt_bias = weights.vector(f"{path}.dt_bias").reshape(config.heads, config.head_size)
        self.o_norm = weights.vector(f"{path}.o_norm.weight")

    def new_state(self) -> DeltaState:
        config = self.config
        conv = np.zeros((config.conv_kernel - 1, self.taps.shape[1]), np.float32)
        return DeltaState(conv, np.zeros((config.heads, config.head_size, config.head_size), np.float32))

    def __call__(self, x: Activations, state: DeltaState) -> Activations:
        config, tokens = self.config, x.shape[0]
        *raw, f, b, g = self.in_proj(x)
        q, k, v = self._convolved(np.concatenate(raw, axis=1), state)
        q = l2_normalize(q, config.head_size**-0.5, L2_EPSILON)
        k = l2_normalize(k, 1.0, L2_EPSILON)
        decay = channel_decay(f.reshape(v.shape), self.a_log, self.dt_bias, config.lower_bound)
        y = self.arithmetic.delta_rule(q, k, v, sigmoid(b), decay, state.memory)
        return self.o_proj(rms_norm(y, self.o_norm, self.epsilon).reshape(tokens, -1) * sigmoid(g))

    def _convolved(self, raw: Array, state: DeltaState) -> tuple[Array, Array, Array]:
        """[DEC-050] Convolve, silu: q, k, v, each [tokens, heads, head_size]."""
        mixed = self.arithmetic.causal_conv(raw, self.taps, state.conv)
        by_head = self.arithmetic.silu(mixed).reshape(raw.shape[0], 3, self.config.heads, self.config.head_size)
        q, k, v = (np.ascontiguousarray(by_head[:, part]) for part in range(3))
        return q, k, v
