"""A layer around its experts, as graphs: what comes before them and what comes after.

For one token each is one compiled function, so that a decoded token costs the host a few calls a layer instead of
sixty. A prompt's chunks have any length and are built operation by operation: a compiled function would be traced
anew, and kept, for each length.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from edge0_mlx.mixers.attention import Attention, KeyValueCache
from edge0_mlx.mixers.gated_delta import DeltaState, GatedDelta
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.moe import GatedMlp, Moe
from edge0_ref.config import AttentionConfig

Angles = dict[AttentionConfig, tuple[mx.array, mx.array]]
MixerState = KeyValueCache | DeltaState


class Mixed(NamedTuple):
    """mixer output; hidden after the residual sum; that, normalised: what router, experts and heads see."""

    mixed: mx.array
    hidden: mx.array
    x: mx.array


class Norms(NamedTuple):
    """A layer's two norm weights and their epsilon."""

    mixer: mx.array
    mlp: mx.array
    epsilon: float

    def before(self, hidden: mx.array) -> mx.array:
        return rms_norm(hidden, self.mixer, self.epsilon)

    def after(self, hidden: mx.array, mixed: mx.array) -> Mixed:
        total = hidden + mixed
        return Mixed(mixed, total, rms_norm(total, self.mlp, self.epsilon))


class DeltaBlock:
    """[DEC-042] norm, gated delta net, residual, norm."""

    def __init__(self, mixer: GatedDelta, norms: Norms) -> None:
        self.mixer, self._norms = mixer, norms
        self._run_token = mx.compile(self._run)

    def __call__(self, hidden: mx.array, state: DeltaState, angles: Angles) -> tuple[Mixed, DeltaState]:
        run = self._run_token if hidden.shape[0] == 1 else self._run
        mixed, total, x, conv, memory = run(hidden, state.conv, state.memory)
        return Mixed(mixed, total, x), DeltaState(conv, memory)

    def _run(self, hidden: mx.array, conv: mx.array, memory: mx.array) -> tuple[mx.array, ...]:
        mixed, state = self.mixer(self._norms.before(hidden), DeltaState(conv, memory))
        return (*self._norms.after(hidden, mixed), *state.arrays)


class AttentionBlock:
    """[DEC-042] norm, attention, residual, norm. Two functions: between them lies what grows with the text."""

    def __init__(self, mixer: Attention, norms: Norms) -> None:
        self.mixer, self._norms = mixer, norms
        self._open_token, self._close_token = mx.compile(self._open), mx.compile(self._close)

    def __call__(self, hidden: mx.array, cache: KeyValueCache, angles: Angles) -> tuple[Mixed, KeyValueCache]:
        one = hidden.shape[0] == 1
        config = self.mixer.config
        if config not in angles:  # all attention layers of a model turn alike
            angles[config] = self.mixer.angles(cache.length, hidden.shape[0])
        q, k, v, gate = (self._open_token if one else self._open)(hidden, *angles[config])
        cache = cache.append(k, v)
        attended = self.mixer.attend(q, cache)
        return Mixed(*(self._close_token if one else self._close)(hidden, attended, gate)), cache

    def _open(self, hidden: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        return self.mixer.project(self._norms.before(hidden), cos, sin)

    def _close(self, hidden: mx.array, attended: mx.array, gate: mx.array) -> tuple[mx.array, ...]:
        return self._norms.after(hidden, self.mixer.output(attended, gate))


class MoeFinish:
    """[DEC-030] The shared expert, and the sums that end a layer of experts."""

    def __init__(self, moe: Moe) -> None:
        self.moe = moe
        self._run_token: Callable[..., tuple[mx.array, mx.array]] = mx.compile(self._run)

    def __call__(self, hidden: mx.array, x: mx.array, routed: mx.array) -> tuple[mx.array, mx.array]:
        """(shared output, hidden after the layer)."""
        return (self._run_token if hidden.shape[0] == 1 else self._run)(hidden, x, routed)

    def _run(self, hidden: mx.array, x: mx.array, routed: mx.array) -> tuple[mx.array, mx.array]:
        shared = self.moe.shared_output(x)
        return shared, hidden + (routed + shared)


class DenseFinish:
    """[DEC-055] The feed-forward part of a layer without experts, and the sum that ends it."""

    def __init__(self, mlp: GatedMlp) -> None:
        self._mlp = mlp
        self._run_token: Callable[..., tuple[mx.array, mx.array]] = mx.compile(self._run)

    def __call__(self, hidden: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        """(dense output, hidden after the layer)."""
        return (self._run_token if hidden.shape[0] == 1 else self._run)(hidden, x)

    def _run(self, hidden: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        dense = self._mlp(x)
        return dense, hidden + dense
