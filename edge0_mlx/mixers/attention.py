"""Gated softmax attention with grouped key-value heads (Qwen3.5: every fourth layer)."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float64

from edge0_mlx import kernels
from edge0_mlx.functions import sigmoid
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.weights import Weights
from edge0_ref.config import AttentionConfig
from edge0_ref.contract import Array

Activations = Float[mx.array, "tokens hidden"]
FIRST_CAPACITY = 64


class KeyValueCache(NamedTuple):
    """Keys and values of all positions so far, [1, kv_heads, capacity, head_size]: as MLX attends.

    `length` of the positions are filled. The arrays of an old cache stay as they were: MLX writes in place only what
    nobody else holds.
    """

    keys: mx.array
    values: mx.array
    length: int = 0

    def append(self, keys: mx.array, values: mx.array) -> "KeyValueCache":
        """A cache with these positions added; the capacity doubles when it is reached."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            more = mx.zeros_like(self.keys)
            keys_twice, values_twice = (mx.concatenate([held, more], axis=2) for held in self.arrays)
            return KeyValueCache(keys_twice, values_twice, self.length).append(keys, values)
        first = mx.array([self.length])
        held = mx.slice_update(self.keys, keys, first, axes=[2]), mx.slice_update(self.values, values, first, axes=[2])
        return KeyValueCache(*held, end)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.keys, self.values


def rotary_angles(positions: Array, size: int, theta: float) -> Float64[np.ndarray, "tokens half"]:
    """[DEC-011] Angles in float64, on the host: in float32 they are off by 5e-3 at position 100,000.

    That rules `mx.fast.rope` out.
    """
    angles: Float64[np.ndarray, "tokens half"] = positions[:, None].astype(np.float64) * _frequencies(size, theta)
    return angles


@cache
def _frequencies(size: int, theta: float) -> Float64[np.ndarray, " half"]:
    """Of every token the same."""
    frequencies: Float64[np.ndarray, " half"] = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    frequencies.setflags(write=False)
    return frequencies


def cos_and_sin(angles: Float64[np.ndarray, "tokens half"]) -> tuple[mx.array, mx.array]:
    """Both [tokens, 1, half], float32 of float64 values."""
    cos, sin = (turned(angles)[:, None].astype(np.float32) for turned in (np.cos, np.sin))
    return mx.array(cos), mx.array(sin)


def rotate_halves(
    x: Float[mx.array, "*batch tokens heads size"], cos: mx.array, sin: mx.array
) -> Float[mx.array, "*batch tokens heads size"]:
    """[DEC-011] Rotate the pairs (i, i + half) of the first 2 * half dims by angles [tokens, 1, half]; others pass."""
    half = cos.shape[-1]
    first, second, rest = mx.split(x.astype(mx.float32), [half, 2 * half], axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


class Attention:
    """[DEC-010] One attention layer's weights; the state is a KeyValueCache."""

    def __init__(self, weights: Weights, path: str, config: AttentionConfig, epsilon: float) -> None:
        self.config, self.epsilon, self.dtype = config, epsilon, weights.device.activations
        self.qkv_proj = weights.joined(*(f"{path}.{name}_proj" for name in "qkv"))
        self.o_proj = weights.linear(f"{path}.o_proj")
        self.q_norm, self.k_norm = weights.vector(f"{path}.q_norm.weight"), weights.vector(f"{path}.k_norm.weight")

    def new_state(self) -> KeyValueCache:
        empty = mx.zeros((1, self.config.kv_heads, FIRST_CAPACITY, self.config.head_size), self.dtype)
        return KeyValueCache(empty, empty)

    def angles(self, first: int, tokens: int) -> tuple[mx.array, mx.array]:
        """cos and sin of the positions from `first` on, [tokens, 1, half]."""
        positions = np.arange(first, first + tokens)
        return cos_and_sin(rotary_angles(positions, self.config.rotary_size, self.config.rope_theta))

    def __call__(self, x: Activations, cache: KeyValueCache) -> tuple[Activations, KeyValueCache]:
        begun = self.project(x, *self.angles(cache.length, x.shape[0]))
        attended, gate, cache = self.attend(begun, cache)
        return self.output(attended, gate), cache

    def project(self, x: Activations, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """Queries, keys, values [1, heads, tokens, size], rotated, and the gate [tokens, heads * size]."""
        config, tokens = self.config, x.shape[0]
        queries, keys, values = self.qkv_proj(x)
        # q_proj interleaves: each head's query, then the gate of its output
        q, gate = mx.split(queries.reshape(1, tokens, config.heads, 2 * config.head_size), 2, axis=-1)
        q = rotate_halves(rms_norm(q, self.q_norm, self.epsilon), cos, sin)
        keys, values = (part.reshape(1, tokens, config.kv_heads, config.head_size) for part in (keys, values))
        k = rotate_halves(rms_norm(keys, self.k_norm, self.epsilon), cos, sin)
        return q.swapaxes(1, 2), k.swapaxes(1, 2), values.swapaxes(1, 2), gate.reshape(tokens, -1)

    def attend(self, begun: tuple[mx.array, ...], cache: KeyValueCache) -> tuple[mx.array, mx.array, KeyValueCache]:
        """[1, heads, tokens, size] of what each query sees: the part whose shapes grow with the text."""
        q, k, v, gate = begun
        cache = cache.append(k, v)
        keys, values = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]
        return kernels.causal_attention(q, keys, values, self.config.head_size**-0.5), gate, cache

    def output(self, attended: mx.array, gate: mx.array) -> Activations:
        tokens = gate.shape[0]
        return self.o_proj(attended.swapaxes(1, 2).reshape(tokens, -1) * sigmoid(gate))
