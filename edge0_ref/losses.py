"""What training minimises, with gradients written out: two divergences from a teacher's distribution to a student's.

Both in nats, float64, one row a position; `edge0_mlx/train/losses.py` is the same for a framework that differentiates.
"""

import numpy as np
from jaxtyping import Float64

from edge0_ref.errors import ShapeError

Logits = Float64[np.ndarray, "positions classes"]
Losses = Float64[np.ndarray, " positions"]


def log_softmax(logits: Logits) -> Logits:
    """Logarithms of probabilities: what is left when the logarithm of the sum is taken off.

    >>> log_softmax(np.array([[0.0, 0.0]])).round(4)
    array([[-0.6931, -0.6931]])
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    normal: Logits = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normal


def forward_kl(teacher: Logits, student: Logits) -> tuple[Losses, Logits]:
    """[TRN-001] sum of p (log p - log q), and its gradient in the student's logits, q - p.

    p is the teacher's: where the teacher puts mass the student has to, too. For routers' distributions as for tokens'.
    """
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    p = np.exp(log_p)
    return (p * (log_p - log_q)).sum(axis=1), np.exp(log_q) - p


def tail_reverse_kl(teacher: Logits, student: Logits, k: int) -> tuple[Losses, Logits]:
    """[TRN-002] Reverse KL over the teacher's k likeliest classes and one more, the tail: all others together.

    sum over the k of q (log q - log p), plus Q (log Q - log P), where Q and P are the tail's mass. Without the tail the
    student would be free to put mass where the teacher has none: a part that does not sum to 1 can even be negative.
    With r the class's own log ratio, or the tail's for each class in it, the gradient is q (r - loss).
    """
    classes = teacher.shape[1]
    if not 1 <= k < classes:
        raise ShapeError(f"top k of {k}, wanted 1 to {classes - 1} of {classes} classes")
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    in_tail = np.ones(teacher.shape, bool)
    np.put_along_axis(in_tail, np.argsort(-teacher, axis=1, kind="stable")[:, :k], False, axis=1)
    tail = log_mass(log_q, in_tail) - log_mass(log_p, in_tail)
    ratio = np.where(in_tail, tail[:, None], log_q - log_p)
    q = np.exp(log_q)
    losses: Losses = (q * ratio).sum(axis=1)
    return losses, q * (ratio - losses[:, None])


def log_mass(log_chances: Logits, inside: np.ndarray) -> Losses:
    """Logarithm of the mass of some classes of each row, which may be tiny.

    >>> log_mass(np.log(np.array([[0.5, 0.25, 0.25]])), np.array([[False, True, True]])).round(4)
    array([-0.6931])
    """
    kept = np.where(inside, log_chances, -np.inf)
    largest = kept.max(axis=1)
    mass: Losses = largest + np.log(np.exp(kept - largest[:, None]).sum(axis=1))
    return mass
