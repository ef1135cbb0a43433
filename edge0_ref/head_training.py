"""One prerouter head, learning: forward, loss, backward, and one step of Adam, to be stepped through.

This is what stage 1 of training does for every layer at once, in float64 and with each gradient written out.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from edge0_ref import kernels
from edge0_ref.data import Array, PrerouterHead
from edge0_ref.losses import forward_kl

Features = Float64[np.ndarray, "tokens features"]
Logits = Float64[np.ndarray, "tokens experts"]
FIRST_MEMORY, SECOND_MEMORY, EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True, eq=False)
class Seen:
    """What the way back needs of the way there: z = fc1 f and gelu(z), [tokens, width]."""

    inner: Array
    bent: Array


def warm_start(router: Array, num_experts: int, width: int, seed: int) -> PrerouterHead:
    """[TRN-003] The consumer's own router on what its owner sees; fc2 is zero, so nothing else at first.

    router [experts, hidden]; features are [hidden | experts now | experts before] of an owner of `num_experts`.
    """
    experts, hidden = router.shape
    features = hidden + 2 * num_experts
    linear = np.concatenate([router, np.zeros((experts, 2 * num_experts))], axis=1)
    fc1 = np.random.default_rng(seed).normal(size=(width, features)) * features**-0.5
    return PrerouterHead(fc1, np.zeros((experts, width)), linear)


def forward(head: PrerouterHead, features: Features) -> tuple[Logits, Seen]:
    """[PRE-001] logits = linear f + fc2 gelu(fc1 f)."""
    inner = features @ head.fc1.T
    bent = inner * normal_mass(inner)
    return features @ head.linear.T + bent @ head.fc2.T, Seen(inner, bent)


def backward(head: PrerouterHead, features: Features, seen: Seen, slope: Logits) -> PrerouterHead:
    """Gradients of fc1, fc2 and linear, where `slope` is that of the logits: outer products, summed over tokens.

    d gelu / dz = mass(z) + z density(z), the normal distribution's.
    """
    density = np.exp(-0.5 * seen.inner**2) / np.sqrt(2.0 * np.pi)
    inner_slope = (slope @ head.fc2) * (normal_mass(seen.inner) + seen.inner * density)
    return PrerouterHead(fc1=inner_slope.T @ features, fc2=slope.T @ seen.bent, linear=slope.T @ features)


def normal_mass(z: Float64[np.ndarray, "tokens width"]) -> Float64[np.ndarray, "tokens width"]:
    """The normal distribution up to z, (1 + erf(z / sqrt 2)) / 2."""
    flat = np.ascontiguousarray(z).ravel() / np.sqrt(2.0)
    error = np.empty_like(flat)
    kernels.erf(flat, error)
    mass: Float64[np.ndarray, "tokens width"] = ((1.0 + error) / 2.0).reshape(z.shape)
    return mass


@dataclass(frozen=True, eq=False)
class Memory:
    """Adam's: running means of the gradients and of their squares, and how many steps they hold."""

    slopes: PrerouterHead
    squares: PrerouterHead
    steps: int = 0


def no_memory(head: PrerouterHead) -> Memory:
    zeros = replace(head, **{name: np.zeros_like(part) for name, part in vars(head).items()})
    return Memory(zeros, zeros)


def train_step(
    head: PrerouterHead, memory: Memory, features: Features, wanted: Logits, learning_rate: float
) -> tuple[PrerouterHead, Memory, float]:
    """One step towards `wanted`, the teacher's router logits of the next layer at the next token; its mean loss.

    The step is rate * mean / (sqrt(mean of squares) + epsilon), both means corrected for starting at zero.
    """
    logits, seen = forward(head, features)
    losses, slopes = forward_kl(wanted, logits)
    gradients = backward(head, features, seen, slopes / len(losses))
    steps, moved, means, squares = memory.steps + 1, {}, {}, {}
    for name, gradient in vars(gradients).items():
        means[name] = FIRST_MEMORY * getattr(memory.slopes, name) + (1 - FIRST_MEMORY) * gradient
        squares[name] = SECOND_MEMORY * getattr(memory.squares, name) + (1 - SECOND_MEMORY) * gradient**2
        mean, square = means[name] / (1 - FIRST_MEMORY**steps), squares[name] / (1 - SECOND_MEMORY**steps)
        moved[name] = getattr(head, name) - learning_rate * mean / (np.sqrt(square) + EPSILON)
    memory = Memory(PrerouterHead(**means), PrerouterHead(**squares), steps)
    return PrerouterHead(**moved), memory, float(losses.mean())
