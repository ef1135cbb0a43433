"""The gated delta rule for whole sequences: inside a chunk as products, from chunk to chunk as the recurrence.

The recurrence S_t = g_t S_(t-1) + u_t k_t^T with u_t = beta_t (v_t - g_t S_(t-1) k_t), opened over a chunk that starts
from S_0, with G_t = g_1 ... g_t:

    (I + A) U = beta (V - G K S_0^T),   A_ti = beta_t G_t / G_i (k_t . k_i) for i < t
    Y = G Q S_0^T + (G_t / G_i (q_t . k_i), i <= t) U
    S = G_C S_0 + U^T (G_C / G_i K)

Source: the chunked form of Gated Delta Networks (arXiv 2412.06464).
"""

from typing import Any

import mlx.core as mx
import numpy as np
from jaxtyping import Float32

from edge0_mlx.train.elementwise import exp

CHUNK = 32


@mx.custom_function
def unit_lower_inverse(a: Float32[mx.array, "*batch size size"]) -> Float32[mx.array, "*batch size size"]:
    """(I + a)^-1 for a strictly lower triangular: blocks of 1, 2, 4 ... rows, each level two products.

    inverse of [[P, 0], [R, Q]] is [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]: as stable as substitution, unlike a power series.
    """
    size = a.shape[-1]
    inverse = mx.eye(size) - a * off_diagonal(size, 1)
    block = 2
    while block < size:
        inverse = inverse - inverse @ (a * off_diagonal(size, block)) @ inverse
        block *= 2
    return inverse


@unit_lower_inverse.vjp
def unit_lower_inverse_vjp(primal: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    """d(M^-1) = -M^-1 dM M^-1, so the gradient of M is -M^-T g M^-T."""
    turned = inverse.swapaxes(-1, -2)
    return -(turned @ cotangent @ turned)


def off_diagonal(size: int, block: int) -> mx.array:
    """1 where a row lies in the odd and its column in the even block of a pair of blocks."""
    number = np.arange(size) // block
    pair = number // 2
    inside = (pair[:, None] == pair[None, :]) & (number[:, None] == number[None, :] + 1)
    return mx.array(inside.astype(np.float32))


def chunked_delta_rule(
    q: Float32[mx.array, "batch tokens key_heads key_size"],
    k: Float32[mx.array, "batch tokens key_heads key_size"],
    v: Float32[mx.array, "batch tokens key_heads share value_size"],
    beta: Float32[mx.array, "batch tokens key_heads share"],
    log_decay: Float32[mx.array, "batch tokens key_heads share"],
    state: Float32[mx.array, "batch key_heads share key_size value_size"],
) -> tuple[Float32[mx.array, "batch tokens key_heads share value_size"], mx.array]:
    """[DEC-021] The outputs of `kernels.delta_rule`, and the state after the last token, transposed as it came."""
    tokens = q.shape[1]
    size = min(CHUNK, tokens)
    q, k = (into_chunks(part, size)[:, :, None] for part in (q, k))
    v, beta, log_decay = (into_chunks(part, size) for part in (v, beta, log_decay))
    v, beta = mx.moveaxis(v, -2, 2), mx.moveaxis(beta, -1, 2)
    passed = mx.cumsum(mx.moveaxis(log_decay, -1, 2), axis=-1)  # log G, [batch, key_heads, share, chunks, size]
    seen = mx.array(np.tri(size, dtype=bool))
    ratio = exp(mx.where(seen, passed[..., :, None] - passed[..., None, :], -1e30))
    earlier = mx.array(np.tri(size, k=-1, dtype=np.float32))
    inverse: Any = unit_lower_inverse((k @ k.swapaxes(-1, -2)) * ratio * earlier * beta[..., None])
    weighted = inverse * beta[..., None, :]
    decayed = exp(passed)[..., None]
    own, borrowed = weighted @ v, weighted @ (decayed * k)
    kept = exp(passed[..., -1:] - passed)[..., None] * k
    ends = exp(passed[..., -1:, None])
    parts = (mx.split(part, part.shape[3], axis=3) for part in (own, borrowed, kept, ends))  # a slice's gradient is big
    updates, states, state = [], [], state[:, :, :, None]
    for own_part, borrowed_part, kept_part, end in zip(*parts, strict=True):
        states.append(state)
        updates.append(own_part - borrowed_part @ state)
        state = end * state + kept_part.swapaxes(-1, -2) @ updates[-1]
    y = (decayed * q) @ mx.concatenate(states, axis=3)
    y = y + (ratio * (q @ k.swapaxes(-1, -2))) @ mx.concatenate(updates, axis=3)
    y = mx.moveaxis(y, 2, -2)  # [batch, key_heads, chunks, size, share, value_size]
    y = mx.moveaxis(y, 1, 3).reshape(y.shape[0], -1, *y.shape[1:2], *y.shape[4:])
    return y[:, :tokens], state[:, :, :, 0]


def into_chunks(x: mx.array, size: int) -> mx.array:
    """[batch, tokens, heads, ...] -> [batch, heads, chunks, size, ...], zeros at the end: they change no state."""
    batch, tokens, heads, *rest = x.shape
    missing = -tokens % size
    if missing:
        x = mx.concatenate([x, mx.zeros((batch, missing, heads, *rest))], axis=1)
    return mx.moveaxis(x.reshape(batch, -1, size, heads, *rest), 3, 1)
