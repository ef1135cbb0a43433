"""Multi-head latent attention: every head reads its keys and values out of one small latent a position (Ling 3)."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float

from edge0_mlx import kernels
from edge0_mlx.arrays import widened
from edge0_mlx.functions import sigmoid
from edge0_mlx.mixers.attention import FIRST_CAPACITY, cos_and_sin, rotary_angles
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.weights import Weights
from edge0_ref.config import MlaConfig

Activations = Float[mx.array, "tokens hidden"]


class LatentCache(NamedTuple):
    """All that is kept of a position, [1, 1, capacity, latent + rotary]: its normalised latent and its rotated key."""

    rows: mx.array
    length: int = 0

    def append(self, rows: mx.array) -> "LatentCache":
        """A cache with these positions added; the capacity doubles when it is reached."""
        end = self.length + rows.shape[2]
        if end > self.rows.shape[2]:
            twice = mx.concatenate([self.rows, mx.zeros_like(self.rows)], axis=2)
            return LatentCache(twice, self.length).append(rows)
        return LatentCache(mx.slice_update(self.rows, rows, mx.array([self.length]), axes=[2]), end)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.rows,)


def rotate_pairs(
    x: Float[mx.array, "tokens heads size"], cos: mx.array, sin: mx.array
) -> Float[mx.array, "tokens heads size"]:
    """[DEC-053] Rotate the pairs (2i, 2i + 1), where the gated attention of Qwen3.5 takes (i, i + size / 2)."""
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def per_head(
    x: Float[mx.array, "heads tokens size"], weights: Float[mx.array, "heads rows size"]
) -> Float[mx.array, "heads tokens rows"]:
    """Each head's own linear layer: y[h, t] = weights[h] x[h, t]. Heads first, as MLX multiplies stacks."""
    return mx.matmul(widened(x, weights.dtype), weights.swapaxes(1, 2)).astype(x.dtype)


@dataclass(frozen=True, eq=False)
class LatentReader:
    """[DEC-054] How heads read latents: W_UK [heads, key_size, latent] makes a key, W_UV [heads, value_size, latent] a
    value. Only the absorbed form: the query is carried into the latent space, the positions stay there.
    """

    w_uk: mx.array
    w_uv: mx.array
    scale: float

    def query(self, q: mx.array, q_rotary: mx.array) -> Float[mx.array, "1 heads tokens row"]:
        """What is held against the rows of the cache: q^T W_UK, and the rotated part."""
        into_latent = per_head(q, self.w_uk.swapaxes(1, 2))
        return mx.concatenate([into_latent, q_rotary], axis=-1)[None]

    def read(
        self, query: mx.array, rows: Float[mx.array, "1 1 positions row"]
    ) -> Float[mx.array, "heads tokens value"]:
        """W_UV (P c): the values are the rows' first dims."""
        latents = rows[..., : self.w_uv.shape[2]]
        return per_head(kernels.causal_attention(query, rows, latents, self.scale)[0], self.w_uv)


class Mla:
    """[DEC-052] One latent attention layer's weights; the state is a LatentCache."""

    def __init__(self, weights: Weights, path: str, config: MlaConfig, epsilon: float) -> None:
        self.config, self.epsilon, self.dtype = config, epsilon, weights.device.activations
        self.in_proj = weights.joined(*(f"{path}.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")))
        self.q_b_proj, self.dense = weights.linear(f"{path}.q_b_proj"), weights.linear(f"{path}.dense")
        self.q_norm = weights.vector(f"{path}.q_a_layernorm.weight")
        self.latent_norm = weights.vector(f"{path}.kv_a_layernorm.weight")
        kv_b = weights.dense(f"{path}.kv_b_proj").reshape(config.heads, -1, config.latent_size)
        scale = (config.key_size + config.rotary_size) ** -0.5
        self.reader = LatentReader(kv_b[:, : config.key_size], kv_b[:, config.key_size :], scale)

    def new_state(self) -> LatentCache:
        row = self.config.latent_size + self.config.rotary_size
        return LatentCache(mx.zeros((1, 1, FIRST_CAPACITY, row), self.dtype))

    def angles(self, first: int, tokens: int) -> tuple[mx.array, mx.array]:
        """cos and sin of the positions from `first` on, [tokens, 1, half]."""
        positions = np.arange(first, first + tokens)
        return cos_and_sin(rotary_angles(positions, self.config.rotary_size, self.config.rope_theta))

    def __call__(self, x: Activations, cache: LatentCache) -> tuple[Activations, LatentCache]:
        begun = self.project(x, *self.angles(cache.length, x.shape[0]))
        attended, gate, cache = self.attend(begun, cache)
        return self.output(attended, gate), cache

    def project(self, x: Activations, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """Queries [1, heads, tokens, row], the tokens' own rows [1, 1, tokens, row], and the gate [tokens, heads]."""
        config, tokens = self.config, x.shape[0]
        q_a, kv_a, gate = self.in_proj(x)
        queries = self.q_b_proj(rms_norm(q_a, self.q_norm, self.epsilon)).reshape(tokens, config.heads, -1)
        q, q_rotary = mx.split(queries, [config.key_size], axis=-1)
        latent, key = mx.split(kv_a, [config.latent_size], axis=-1)
        key = rotate_pairs(key[:, None], cos, sin)[:, 0]
        rows = mx.concatenate([rms_norm(latent, self.latent_norm, self.epsilon), key], axis=-1)
        query = self.reader.query(q.swapaxes(0, 1), rotate_pairs(q_rotary, cos, sin).swapaxes(0, 1))
        return query, rows[None, None], gate

    def attend(self, begun: tuple[mx.array, ...], cache: LatentCache) -> tuple[mx.array, mx.array, LatentCache]:
        """[heads, tokens, value] of what each query sees: the part whose shapes grow with the text."""
        query, rows, gate = begun
        cache = cache.append(rows)
        return self.reader.read(query, cache.rows[:, :, : cache.length]), gate, cache

    def output(self, attended: mx.array, gate: mx.array) -> Activations:
        gated = attended.swapaxes(0, 1) * sigmoid(gate)[:, :, None]
        return self.dense(gated.reshape(gate.shape[0], -1))
