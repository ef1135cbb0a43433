"""Attention and the gated delta net for a batch of sequences, with the state that lets a sequence be cut anywhere.

The layers' maths is that of `edge0_mlx/mixers`; here activations are [batch, tokens, hidden] and float32.
"""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float32

from edge0_mlx.arrays import from_numpy
from edge0_mlx.functions import l2_normalize, softplus
from edge0_mlx.mixers.attention import cos_and_sin, rotary_angles, rotate_halves
from edge0_mlx.mixers.gated_delta import L2_EPSILON
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.train.delta import chunked_delta_rule
from edge0_mlx.train.elementwise import sigmoid, silu, softmax
from edge0_mlx.train.floats import FloatWeights
from edge0_ref.bits import widen
from edge0_ref.config import AttentionConfig, GatedDeltaConfig, LayerConfig
from edge0_ref.contract import Lora
from edge0_ref.errors import AdapterError, UnsupportedModelError

Activations = Float32[mx.array, "batch tokens hidden"]
LoraPair = dict[str, mx.array]  # "lora_A" [rank, cols], "lora_B" [rows, rank], as files have them


class Loras(NamedTuple):
    """What is trained beside the frozen base: module -> pair; scale is alpha / r."""

    pairs: Mapping[str, LoraPair]
    scale: float

    @classmethod
    def of(cls, loras: Mapping[str, Lora]) -> "Loras":
        """What adapters hold, float32. Raises AdapterError where they differ in scale."""
        pairs = {
            module: {"lora_A": from_numpy(widen(lora.down)), "lora_B": from_numpy(widen(lora.up))}
            for module, lora in loras.items()
        }
        scales = {lora.scale for lora in loras.values()} or {0.0}
        if len(scales) > 1:
            raise AdapterError(f"training takes a LoRA of one scale, got {', '.join(f'{s:g}' for s in sorted(scales))}")
        return cls(pairs, scales.pop())


NO_LORAS = Loras({}, 0.0)


class Projection:
    """Frozen linear layers of the same input as one product; their LoRA, where there is one, beside each."""

    def __init__(self, weights: FloatWeights, *modules: str) -> None:
        self.modules = modules
        rows = [weights.checkpoint.config.tensors.linears[module][0] for module in modules]
        self._ends = [int(end) for end in np.cumsum(rows)[:-1]]
        self._weight = weights.joined(*modules)

    def __call__(self, x: mx.array, loras: Loras) -> list[mx.array]:
        """[LOR-001] W x + scale * B (A x), for each module."""
        bases: list[mx.array] = list(mx.split(x @ self._weight, self._ends, axis=-1))
        held = [(number, loras.pairs[module]) for number, module in enumerate(self.modules) if module in loras.pairs]
        if not held:
            return bases
        downs = mx.concatenate([pair["lora_A"] for _, pair in held])
        ranks = np.cumsum([pair["lora_A"].shape[0] for _, pair in held])[:-1]
        for (number, pair), low in zip(held, mx.split(x @ downs.T, ranks.tolist(), axis=-1), strict=True):
            bases[number] = bases[number] + loras.scale * (low @ pair["lora_B"].T)
        return bases


class AttentionState(NamedTuple):
    """keys, values [batch, kv_heads, positions, head_size]."""

    keys: mx.array
    values: mx.array


class BatchAttention:
    """[DEC-010] Gated softmax attention."""

    def __init__(self, weights: FloatWeights, path: str, config: AttentionConfig, epsilon: float) -> None:
        self.config, self.epsilon = config, epsilon
        self.qkv_proj = Projection(weights, *(f"{path}.{name}_proj" for name in "qkv"))
        self.o_proj = Projection(weights, f"{path}.o_proj")
        self.q_norm, self.k_norm = weights.vector(f"{path}.q_norm.weight"), weights.vector(f"{path}.k_norm.weight")

    def new_state(self, batch: int) -> AttentionState:
        empty = mx.zeros((batch, self.config.kv_heads, 0, self.config.head_size))
        return AttentionState(empty, empty)

    def __call__(self, x: Activations, state: AttentionState, loras: Loras) -> tuple[Activations, AttentionState]:
        config, (batch, tokens, _) = self.config, x.shape
        queries, keys, values = self.qkv_proj(x, loras)
        first = state.keys.shape[2]
        cos, sin = cos_and_sin(rotary_angles(np.arange(first, first + tokens), config.rotary_size, config.rope_theta))
        q, gate = mx.split(queries.reshape(batch, tokens, config.heads, 2 * config.head_size), 2, axis=-1)
        q = rotate_halves(rms_norm(q, self.q_norm, self.epsilon), cos, sin).swapaxes(1, 2)
        keys, values = (part.reshape(batch, tokens, config.kv_heads, -1) for part in (keys, values))
        keys = rotate_halves(rms_norm(keys, self.k_norm, self.epsilon), cos, sin).swapaxes(1, 2)
        keys = mx.concatenate([state.keys, keys], axis=2)
        values = mx.concatenate([state.values, values.swapaxes(1, 2)], axis=2)
        attended = causal_attention(q, keys, values, config.head_size**-0.5)
        gated = attended.swapaxes(1, 2).reshape(batch, tokens, -1) * sigmoid(gate.reshape(batch, tokens, -1))
        return self.o_proj(gated, loras)[0], AttentionState(keys, values)


def causal_attention(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """[DEC-010] [batch, heads, tokens, size]: the last token sees all positions, the one before it all but one ..."""
    batch, heads, tokens, size = q.shape
    kv_heads, positions = keys.shape[1:3]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, tokens, size)
    scores = (grouped * scale) @ keys[:, :, None].swapaxes(-1, -2)
    seen = mx.array(np.tri(tokens, positions, positions - tokens, dtype=bool))
    attended = softmax(mx.where(seen, scores, -1e30)) @ values[:, :, None]
    return attended.reshape(q.shape)


class DeltaState(NamedTuple):
    """conv [batch, kernel - 1, channels]; memory [batch, key_heads, share, key_size, value_size], zeros at start."""

    conv: mx.array
    memory: mx.array


class BatchGatedDelta:
    """[DEC-020] The gated delta net, its rule in chunks."""

    def __init__(self, weights: FloatWeights, path: str, config: GatedDeltaConfig, epsilon: float) -> None:
        self.config, self.epsilon = config, epsilon
        self.in_proj = Projection(weights, *(f"{path}.in_proj_{name}" for name in ("qkv", "z", "a", "b")))
        self.out_proj = Projection(weights, f"{path}.out_proj")
        self.taps = mx.contiguous(weights.vector(f"{path}.conv1d.weight")[:, :, 0].T)
        self.rate, self.dt_bias = mx.exp(weights.vector(f"{path}.A_log")), weights.vector(f"{path}.dt_bias")
        self.norm = weights.vector(f"{path}.norm.weight")

    def new_state(self, batch: int) -> DeltaState:
        config = self.config
        conv = mx.zeros((batch, config.conv_kernel - 1, self.taps.shape[1]))
        heads = (config.key_heads, config.value_heads // config.key_heads)
        return DeltaState(conv, mx.zeros((batch, *heads, config.key_size, config.value_size)))

    def __call__(self, x: Activations, state: DeltaState, loras: Loras) -> tuple[Activations, DeltaState]:
        config, (batch, tokens, _) = self.config, x.shape
        raw, z, a, b = self.in_proj(x, loras)
        rows = mx.concatenate([state.conv, raw], axis=1)
        mixed = sum((rows[:, j : j + tokens] * self.taps[j] for j in range(config.conv_kernel)), mx.array(0.0))
        keys = config.key_heads * config.key_size
        q, k, v = mx.split(silu(mixed), [keys, 2 * keys], axis=-1)
        q, k = (part.reshape(batch, tokens, config.key_heads, config.key_size) for part in (q, k))
        q, k = l2_normalize(q, config.key_size**-0.5, L2_EPSILON), l2_normalize(k, 1.0, L2_EPSILON)
        heads = (batch, tokens, config.key_heads, config.value_heads // config.key_heads)
        log_decay = -self.rate * softplus(a + self.dt_bias)
        y, memory = chunked_delta_rule(
            q, k, v.reshape(*heads, -1), sigmoid(b).reshape(heads), log_decay.reshape(heads), state.memory
        )
        normed = rms_norm(y.reshape(batch, tokens, config.value_heads, -1), self.norm, self.epsilon)
        gated = normed.reshape(batch, tokens, -1) * silu(z)
        return self.out_proj(gated, loras)[0], DeltaState(rows[:, tokens:], memory)


def make_mixer(weights: FloatWeights, layer: LayerConfig, epsilon: float) -> BatchAttention | BatchGatedDelta:
    """Raises UnsupportedModelError for mixers that have no form for whole sequences yet."""
    match layer.mixer:
        case AttentionConfig():
            return BatchAttention(weights, layer.mixer_path, layer.mixer, epsilon)
        case GatedDeltaConfig():
            return BatchGatedDelta(weights, layer.mixer_path, layer.mixer, epsilon)
        case _:
            kind = type(layer.mixer).__name__.removesuffix("Config")
            raise UnsupportedModelError(
                f"training runs attention and the gated delta net; {layer.mixer_path} is {kind}"
            )
