"""Gated softmax attention with grouped key-value heads (Qwen3.5: every fourth layer).

Source: Qwen3-Next / Qwen3.5 attention as in transformers and mlx-lm.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64

from edge0_ref.config import AttentionConfig
from edge0_ref.contract import Array
from edge0_ref.functions import sigmoid
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]


@dataclass
class KeyValueCache:
    """Keys and values of all positions so far, [capacity, kv_heads, head_size]; `length` of them are filled."""

    keys: Array
    values: Array
    length: int = 0

    def append(self, keys: Array, values: Array) -> None:
        """Add positions; the capacity doubles when it is reached."""
        end = self.length + keys.shape[0]
        while end > self.keys.shape[0]:
            self.keys = np.concatenate([self.keys, np.empty_like(self.keys)])
            self.values = np.concatenate([self.values, np.empty_like(self.values)])
        self.keys[self.length : end], self.values[self.length : end] = keys, values
        self.length = end

    def copy(self) -> "KeyValueCache":
        return KeyValueCache(self.keys.copy(), self.values.copy(), self.length)


def rotary_angles(positions: Array, size: int, theta: float) -> Float64[np.ndarray, "tokens half"]:
    """[DEC-011] Angles in float64: in float32 they are off by 5e-3 at position 100,000."""
    frequencies = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    return positions[:, None].astype(np.float64) * frequencies


def rotate_halves(
    x: Float32[np.ndarray, "tokens heads size"], angles: Array, rotary_size: int
) -> Float32[np.ndarray, "tokens heads size"]:
    """[DEC-011] Rotate the pairs (i, i + rotary_size / 2) of the first `rotary_size` dims; the rest pass through.

    >>> x = np.array([[[1.0, 2.0, 0.0, 0.0, 5.0]]], np.float32)
    >>> rotate_halves(x, np.array([[np.pi / 2, 0.0]]), 4).round(6)
    array([[[0., 2., 1., 0., 5.]]], dtype=float32)
    """
    half = rotary_size // 2
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = (part.astype(np.float64) for part in (x[..., :half], x[..., half:rotary_size]))
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return np.concatenate([rotated.astype(np.float32), x[..., rotary_size:]], axis=-1)


class Attention:
    """[DEC-010] One attention layer's weights; the state is a KeyValueCache."""

    def __init__(self, weights: Weights, path: str, config: AttentionConfig, epsilon: float) -> None:
        self.config, self.epsilon, self.arithmetic = config, epsilon, weights.arithmetic
        self.qkv_proj = weights.joined(*(f"{path}.{name}_proj" for name in "qkv"))
        self.o_proj = weights.linear(f"{path}.o_proj")
        self.q_norm, self.k_norm = weights.vector(f"{path}.q_norm.weight"), weights.vector(f"{path}.k_norm.weight")

    def new_state(self) -> KeyValueCache:
        shape = (64, self.config.kv_heads, self.config.head_size)
        return KeyValueCache(np.empty(shape, np.float32), np.empty(shape, np.float32))

    def __call__(self, x: Activations, cache: KeyValueCache) -> Activations:
        config, tokens = self.config, x.shape[0]
        first = cache.length
        angles = rotary_angles(np.arange(first, first + tokens), config.rotary_size, config.rope_theta)
        raw, keys, values = self.qkv_proj(x)
        # q_proj interleaves: each head's query, then the gate of its output
        queries = raw.reshape(tokens, config.heads, 2, config.head_size)
        q = self._normalized(queries[:, :, 0], self.q_norm, angles)
        gate = queries[:, :, 1].reshape(tokens, -1)
        k = self._normalized(keys.reshape(tokens, config.kv_heads, -1), self.k_norm, angles)
        cache.append(k, values.reshape(tokens, config.kv_heads, -1))
        scale, size = config.head_size**-0.5, config.head_size
        attended = self.arithmetic.causal_attention(q, cache.keys, cache.values, first, scale, size)
        return self.o_proj(attended.reshape(tokens, -1) * sigmoid(gate))

    def _normalized(self, x: Array, weight: Array, angles: Array) -> Array:
        """RMS-normalise per head, then rotate."""
        return rotate_halves(rms_norm(x, weight, self.epsilon), angles, self.config.rotary_size)
