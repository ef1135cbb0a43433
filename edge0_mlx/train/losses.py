"""What training minimises: divergences between the teacher's distribution and the student's, in nats a position.

Gradients are MLX's; the NumPy twin in `edge0_ref/losses.py` writes them out.
"""

import mlx.core as mx
from jaxtyping import Float32

from edge0_mlx.train.elementwise import exp, log_softmax

Logits = Float32[mx.array, "*batch classes"]
Losses = Float32[mx.array, "*batch"]


def forward_kl(teacher: Logits, student: Logits) -> Losses:
    """[TRN-001] sum over classes of p (log p - log q), p the teacher's: of routers as of tokens."""
    log_p = log_softmax(teacher)
    return (exp(log_p) * (log_p - log_softmax(student))).sum(axis=-1)


def tail_reverse_kl(teacher: Logits, student: Logits, k: int) -> Losses:
    """[TRN-002] Reverse KL over the teacher's k likeliest classes, all others taken together as one, the tail.

    sum over the top k of q (log q - log p), plus Q (log Q - log P) with Q, P the mass of all others.
    """
    largest = mx.stop_gradient(mx.argpartition(-teacher, kth=k - 1, axis=-1)[..., :k])
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    inside = mx.put_along_axis(mx.zeros_like(teacher), largest, mx.array(1.0), axis=-1) > 0
    tail_p, tail_q = (mx.logsumexp(mx.where(inside, -mx.inf, part), axis=-1) for part in (log_p, log_q))
    top_p, top_q = (mx.take_along_axis(part, largest, axis=-1) for part in (log_p, log_q))
    return (exp(top_q) * (top_q - top_p)).sum(axis=-1) + exp(tail_q) * (tail_q - tail_p)
