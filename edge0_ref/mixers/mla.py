"""Multi-head latent attention: every head reads its keys and values out of one small latent a position (Ling 3).

Source: DeepSeek-V2 (arXiv 2405.04434), in the form of Ling 3.0 with one output gate a head.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32

from edge0_ref.arithmetic import Arithmetic
from edge0_ref.config import MlaConfig
from edge0_ref.contract import Array
from edge0_ref.functions import sigmoid
from edge0_ref.mixers.attention import rotary_angles
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]
Heads = Float32[np.ndarray, "tokens heads size"]
Queries = Float32[np.ndarray, "tokens heads key"]
RotaryQueries = Float32[np.ndarray, "tokens heads rotary"]
Values = Float32[np.ndarray, "tokens heads value"]


@dataclass
class LatentCache:
    """All that is kept of a position, [capacity, latent + rotary]: its normalised latent and its one rotated key."""

    rows: Array
    length: int = 0

    def append(self, rows: Array) -> None:
        """Add positions; the capacity doubles when it is reached."""
        end = self.length + rows.shape[0]
        while end > self.rows.shape[0]:
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)])
        self.rows[self.length : end] = rows
        self.length = end

    def copy(self) -> "LatentCache":
        return LatentCache(self.rows.copy(), self.length)


def rotate_pairs(x: Heads, angles: Array) -> Heads:
    """[DEC-053] Rotate the pairs (2i, 2i + 1), where the gated attention of Qwen3.5 takes (i, i + size / 2).

    >>> rotate_pairs(np.array([[[1.0, 2.0, 3.0, 0.0]]], np.float32), np.array([[np.pi / 2, np.pi]])).round(6)
    array([[[-2.,  1., -3.,  0.]]], dtype=float32)
    """
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = x[..., 0::2].astype(np.float64), x[..., 1::2].astype(np.float64)
    turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(np.float32)


@dataclass(frozen=True)
class LatentReader:
    """[DEC-054] How heads read latents: W_UK [heads, key_size, latent] makes a key, W_UV [heads, value_size, latent] a
    value.
    """

    w_uk: Array
    w_uv: Array
    scale: float
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def per_head(
        self, x: Heads, weights: Float32[np.ndarray, "heads rows size"]
    ) -> Float32[np.ndarray, "tokens heads rows"]:
        """Each head's own linear layer: y[t, h] = weights[h] x[t, h]."""
        return np.stack([self.arithmetic.linear(x[:, h], weights[h]) for h in range(weights.shape[0])], axis=1)

    def absorbed(self, q: Queries, q_rotary: RotaryQueries, rows: Array, first: int) -> Values:
        """W_UV (P c) with scores q^T W_UK c: the query is carried into the latent space once, the positions stay there.

        rows [positions, latent + rotary]. Nothing is computed for a position but its dot
        products, so a step costs the same as with one key-value head.
        """
        into_latent = self.per_head(q, np.ascontiguousarray(self.w_uk.swapaxes(1, 2)))
        query = np.concatenate([into_latent, q_rotary], axis=-1)
        shared = rows[:, None, :]  # as values, a row's first dims: its latent
        mixed = self.arithmetic.causal_attention(query, shared, shared, first, self.scale, into_latent.shape[2])
        return self.per_head(mixed, self.w_uv)

    def expanded(self, q: Queries, q_rotary: RotaryQueries, rows: Array, first: int) -> Values:
        """The same with every position's keys and values written out: the textbook form, and the cheaper one for long
        prompts on hardware that multiplies matrices. The decoder does not use it: bits would depend on chunks.
        """
        latent = self.w_uk.shape[2]
        latents = np.repeat(rows[:, None, :latent], self.w_uk.shape[0], axis=1)
        shared = np.broadcast_to(rows[:, None, latent:], (*latents.shape[:2], rows.shape[1] - latent))
        keys = np.concatenate([self.per_head(latents, self.w_uk), shared], axis=-1)
        values = self.per_head(latents, self.w_uv)
        query = np.concatenate([q, q_rotary], axis=-1)
        attended: Values = self.arithmetic.causal_attention(query, keys, values, first, self.scale, values.shape[2])
        return attended


class Mla:
    """[DEC-052] One latent attention layer's weights; the state is a LatentCache."""

    def __init__(self, weights: Weights, path: str, config: MlaConfig, epsilon: float) -> None:
        self.config, self.epsilon = config, epsilon
        self.in_proj = weights.joined(*(f"{path}.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")))
        self.q_b_proj, self.dense = weights.linear(f"{path}.q_b_proj"), weights.linear(f"{path}.dense")
        self.q_norm = weights.vector(f"{path}.q_a_layernorm.weight")
        self.latent_norm = weights.vector(f"{path}.kv_a_layernorm.weight")
        kv_b = weights.dense(f"{path}.kv_b_proj").reshape(config.heads, -1, config.latent_size)
        scale = (config.key_size + config.rotary_size) ** -0.5
        self.reader = LatentReader(kv_b[:, : config.key_size], kv_b[:, config.key_size :], scale, weights.arithmetic)

    def new_state(self) -> LatentCache:
        return LatentCache(np.empty((64, self.config.latent_size + self.config.rotary_size), np.float32))

    def __call__(self, x: Activations, cache: LatentCache) -> Activations:
        config, tokens, first = self.config, x.shape[0], cache.length
        angles = rotary_angles(np.arange(first, first + tokens), config.rotary_size, config.rope_theta)
        q_a, kv_a, gate = self.in_proj(x)
        queries = self.q_b_proj(rms_norm(q_a, self.q_norm, self.epsilon)).reshape(tokens, config.heads, -1)
        q, q_rotary = np.split(queries, [config.key_size], axis=-1)
        latent, key = np.split(kv_a, [config.latent_size], axis=-1)
        latent = rms_norm(latent, self.latent_norm, self.epsilon)
        cache.append(np.concatenate([latent, rotate_pairs(key[:, None], angles)[:, 0]], axis=-1))
        attended = self.reader.absorbed(q, rotate_pairs(q_rotary, angles), cache.rows[: cache.length], first)
        gated = attended * sigmoid(gate)[:, :, None]
        return self.dense(gated.reshape(tokens, -1))
