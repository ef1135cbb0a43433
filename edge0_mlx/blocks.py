"""The pieces of a layer, as graphs: each takes what the piece before it passed on, and passes on the same.

    (hidden, x) -> mixer with its norms -> (hidden, x) -> experts, or a dense part -> (hidden, x)

hidden is the residual sum; x the same after the norm, which is what routers, experts and heads see. A piece is a pure
function of arrays, so any number of them in a row may become one compiled function: `stretches`.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from edge0_mlx.mixers.attention import Attention, KeyValueCache
from edge0_mlx.mixers.gated_delta import DeltaState, GatedDelta
from edge0_mlx.mixers.kda import Kda
from edge0_mlx.mixers.mla import LatentCache, Mla
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.moe import GatedMlp, Moe
from edge0_mlx.slots import Bank

Angles = dict[Any, tuple[mx.array, mx.array]]  # rotary settings -> cos and sin of a call's positions
Arrays = tuple[mx.array, ...]
Passed = tuple[mx.array, mx.array]  # hidden, x
AttentionState = KeyValueCache | LatentCache


class Norms(NamedTuple):
    """A layer's two norm weights and their epsilon."""

    mixer: mx.array
    mlp: mx.array
    epsilon: float

    def before(self, hidden: mx.array) -> mx.array:
        return rms_norm(hidden, self.mixer, self.epsilon)

    def after(self, hidden: mx.array, mixed: mx.array) -> Passed:
        """The residual sum with a mixer's output, and the norm of that."""
        total = hidden + mixed
        return total, rms_norm(total, self.mlp, self.epsilon)


class DeltaBlock:
    """[DEC-042] norm, a mixer whose state has a fixed size, residual, norm: mixer output, x, *state."""

    def __init__(self, mixer: GatedDelta | Kda, norms: Norms) -> None:
        self.mixer, self._norms = mixer, norms

    def __call__(self, passed: Passed, *state: mx.array) -> tuple[Passed, Arrays]:
        mixed, after = self.mixer(self._norms.before(passed[0]), DeltaState.of(*state))
        passed = self._norms.after(passed[0], mixed)
        return passed, (mixed, passed[1], *after.arrays)


class AttentionBlock:
    """[DEC-042] norm, attention of either kind, residual, norm: two pieces.

    Between them lies `mixer.attend`, whose shapes grow with the text.
    """

    def __init__(self, mixer: Attention | Mla, norms: Norms) -> None:
        self.mixer = mixer
        self.opening, self.closing = AttentionOpening(mixer, norms), AttentionClosing(mixer, norms)

    def angles(self, state: AttentionState, tokens: int, known: Angles) -> tuple[mx.array, mx.array]:
        """cos and sin of a call's positions, made by the first layer that turns like this: most turn alike."""
        config = self.mixer.config
        if config not in known:
            known[config] = self.mixer.angles(state.length, tokens)
        return known[config]


class AttentionOpening:
    """What `mixer.attend` begins with."""

    def __init__(self, mixer: Attention | Mla, norms: Norms) -> None:
        self._mixer, self._norms = mixer, norms

    def __call__(self, passed: Passed, cos: mx.array, sin: mx.array) -> tuple[Passed, Arrays]:
        return passed, self._mixer.project(self._norms.before(passed[0]), cos, sin)


class AttentionClosing:
    """Mixer output, x."""

    def __init__(self, mixer: Attention | Mla, norms: Norms) -> None:
        self._mixer, self._norms = mixer, norms

    def __call__(self, passed: Passed, attended: mx.array, gate: mx.array) -> tuple[Passed, Arrays]:
        mixed = self._mixer.output(attended, gate)
        passed = self._norms.after(passed[0], mixed)
        return passed, (mixed, passed[1])


Block = DeltaBlock | AttentionBlock


class MoeFinish:
    """[DEC-030] The shared expert, and the sums that end a layer of experts: routed, shared, hidden."""

    def __init__(self, moe: Moe) -> None:
        self.moe = moe
        self._over: ExpertsFinish | None = None

    def __call__(self, passed: Passed, routed: mx.array) -> tuple[Passed, Arrays]:
        hidden, x = passed
        shared = self.moe.shared_output(x)
        total = hidden + (routed + shared)
        return (total, x), (routed, shared, total)

    def over(self, bank: Bank) -> "ExpertsFinish":
        """The same from one step earlier, with one token's experts in slots of `bank`; the same piece every time."""
        if self._over is None or self._over.bank is not bank:
            self._over = ExpertsFinish(self, bank)
        return self._over

    def forget(self) -> None:
        """Let go of the bank."""
        self._over = None


class ExpertsFinish:
    """One token's routed experts, then what `MoeFinish` does."""

    def __init__(self, finish: MoeFinish, bank: Bank) -> None:
        self._finish, self.bank = finish, bank

    def __call__(self, passed: Passed, slots: mx.array, weights: mx.array) -> tuple[Passed, Arrays]:
        return self._finish(passed, self.bank.run_one(passed[1], slots, weights))


class DenseFinish:
    """[DEC-055] The feed-forward part of a layer without experts, and the sum that ends it: dense output, hidden."""

    def __init__(self, mlp: GatedMlp) -> None:
        self._mlp = mlp

    def __call__(self, passed: Passed) -> tuple[Passed, Arrays]:
        hidden, x = passed
        dense = self._mlp(x)
        total = hidden + dense
        return (total, x), (dense, total)


Piece = DeltaBlock | AttentionOpening | AttentionClosing | MoeFinish | ExpertsFinish | DenseFinish
