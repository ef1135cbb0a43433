"""A layer around its experts, as graphs: what comes before them and what comes after.

For one token each is one compiled function, so that a decoded token costs the host one or two calls a layer instead of
a hundred. A prompt's chunks have any length and are built operation by operation: a compiled function would be traced
anew, and kept, for each length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from edge0_mlx.executors.exact import Held
from edge0_mlx.mixers.attention import Attention, KeyValueCache
from edge0_mlx.mixers.gated_delta import DeltaState, GatedDelta
from edge0_mlx.mixers.kda import Kda
from edge0_mlx.mixers.mla import LatentCache, Mla
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.moe import GatedMlp, Moe
from edge0_mlx.slots import Bank

Angles = dict[Any, tuple[mx.array, mx.array]]  # rotary settings -> cos and sin of a call's positions
Arrays = tuple[mx.array, ...]
AttentionState = KeyValueCache | LatentCache


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
    """[DEC-042] norm, a mixer whose state has a fixed size, residual, norm."""

    def __init__(self, mixer: GatedDelta | Kda, norms: Norms) -> None:
        self.mixer, self._norms = mixer, norms
        self._begin_token = mx.compile(self.begin)

    def __call__(self, hidden: mx.array, state: DeltaState, angles: Angles) -> tuple[Mixed, DeltaState]:
        begin = self._begin_token if hidden.shape[0] == 1 else self.begin
        return self.end(hidden, begin(hidden, *state), state)

    def inputs(self, state: DeltaState, angles: Angles, tokens: int) -> Arrays:
        """What `begin` takes besides the hidden states: arrays of fixed shape for a fixed number of tokens."""
        return state

    def begin(self, hidden: mx.array, conv: mx.array, memory: mx.array) -> Arrays:
        mixed, state = self.mixer(self._norms.before(hidden), DeltaState(conv, memory))
        return (*self._norms.after(hidden, mixed), *state)

    def end(self, hidden: mx.array, begun: Arrays, state: DeltaState) -> tuple[Mixed, DeltaState]:
        mixed, total, x, conv, memory = begun
        return Mixed(mixed, total, x), DeltaState(conv, memory)


class AttentionBlock:
    """[DEC-042] norm, attention of either kind, residual, norm.

    Two functions: between them lies what grows with the text.
    """

    def __init__(self, mixer: Attention | Mla, norms: Norms) -> None:
        self.mixer, self._norms = mixer, norms
        self._begin_token, self._close_token = mx.compile(self.begin), mx.compile(self._close)

    def __call__(self, hidden: mx.array, state: AttentionState, angles: Angles) -> tuple[Mixed, AttentionState]:
        tokens = hidden.shape[0]
        begin = self._begin_token if tokens == 1 else self.begin
        return self.end(hidden, begin(hidden, *self.inputs(state, angles, tokens)), state)

    def inputs(self, state: AttentionState, angles: Angles, tokens: int) -> Arrays:
        config = self.mixer.config
        if config not in angles:  # all attention layers of a model turn alike
            angles[config] = self.mixer.angles(state.length, tokens)
        return angles[config]

    def begin(self, hidden: mx.array, cos: mx.array, sin: mx.array) -> Arrays:
        return self.mixer.project(self._norms.before(hidden), cos, sin)

    def end(self, hidden: mx.array, begun: Arrays, state: Any) -> tuple[Mixed, AttentionState]:
        attended, gate, state = self.mixer.attend(begun, state)
        close = self._close_token if hidden.shape[0] == 1 else self._close
        return Mixed(*close(hidden, attended, gate)), state

    def _close(self, hidden: mx.array, attended: mx.array, gate: mx.array) -> Arrays:
        return self._norms.after(hidden, self.mixer.output(attended, gate))


Block = DeltaBlock | AttentionBlock


class MoeFinish:
    """[DEC-030] The shared expert, and the sums that end a layer of experts. following: the next layer's block."""

    def __init__(self, moe: Moe, following: Block | None) -> None:
        self.moe, self.between = moe, Between(self.run, following)
        self._run_token: Callable[..., tuple[mx.array, mx.array]] = mx.compile(self.run)

    def __call__(self, hidden: mx.array, x: mx.array, routed: mx.array) -> tuple[mx.array, mx.array]:
        """(shared output, hidden after the layer)."""
        return (self._run_token if hidden.shape[0] == 1 else self.run)(hidden, x, routed)

    def run(self, hidden: mx.array, x: mx.array, routed: mx.array) -> tuple[mx.array, mx.array]:
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


class Between:
    """One token from one layer's experts to where the next layer must be routed, as one function.

    Routing is all that the host has a say in, so this is the largest graph of fixed shape there is.
    """

    def __init__(self, finish: Callable[..., tuple[mx.array, mx.array]], following: Block | None) -> None:
        self._finish, self._following = finish, following
        self._bank: Bank | None = None

    def __call__(self, held: Held, weights: mx.array, before: Mixed, state: Any, angles: Angles) -> Arrays:
        """routed, shared, hidden, and what the next block began; state and angles are for that block."""
        if held.bank is not self._bank:  # allocated anew since the last token
            self._bank, self._run_token = held.bank, mx.compile(self._run)
        more = () if self._following is None else self._following.inputs(state, angles, 1)
        outputs: Arrays = self._run_token(before.hidden, before.x, held.slots, weights, *more)
        return outputs

    def _run(self, hidden: mx.array, x: mx.array, slots: mx.array, weights: mx.array, *more: mx.array) -> Arrays:
        assert self._bank is not None
        routed = self._bank.run_one(x, slots, weights)
        shared, hidden = self._finish(hidden, x, routed)
        begun = () if self._following is None else self._following.begin(hidden, *more)
        return routed, shared, hidden, *begun
