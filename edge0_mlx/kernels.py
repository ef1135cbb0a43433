"""The few operations that MLX has no single call for, and attention, which it has.

Every shape but the number of tokens is the model's; a token more is a node more in the delta rule's graph.
"""

import mlx.core as mx
from jaxtyping import Float, Float32

Rows = tuple[Float[mx.array, "1 channels"], ...]


def rms_norm(x: Float[mx.array, "*batch size"], weight: mx.array, epsilon: float) -> Float[mx.array, "*batch size"]:
    """[DEC-001] x / sqrt(mean(x^2) + epsilon) * weight; MLX computes it in float32."""
    return mx.fast.rms_norm(x, weight, epsilon)


def causal_conv(
    x: Float[mx.array, "tokens channels"], taps: Rows, state: Rows
) -> tuple[Float[mx.array, "tokens channels"], Rows]:
    """[DEC-020] Depthwise causal convolution, and the state after it; the last tap meets the newest row.

    taps and state are rows [1, channels] of their own, oldest first: a token then moves nothing, and its sum is one
    operation for `mx.compile`.
    """
    tokens, history = x.shape[0], len(state)
    if tokens == 1:
        rows = [*state, x]
    else:
        padded = mx.concatenate([*state, x])
        rows = [padded[j : j + tokens] for j in range(history + 1)]
        state = tuple(mx.contiguous(row) for row in mx.split(padded[tokens:], history))  # not a view of the prompt
    y = rows[0] * taps[0]
    for row, tap in zip(rows[1:], taps[1:], strict=True):
        y = y + row * tap
    return y, (*state[1:], x) if tokens == 1 else state


def delta_rule(
    q: Float32[mx.array, "tokens key_heads 1 1 key_size"],
    k: Float32[mx.array, "tokens key_heads 1 1 key_size"],
    v: Float32[mx.array, "tokens key_heads share value_size 1"],
    beta: Float32[mx.array, "tokens key_heads share 1 1"],
    decay: Float32[mx.array, "tokens key_heads share 1 key_size_or_1"],
    state: Float32[mx.array, "1 key_heads share value_size key_size"],
) -> tuple[Float32[mx.array, "tokens key_heads share value_size"], mx.array]:
    """[DEC-021] The gated delta rule, one token after the other: outputs, and the state after the last.

    delta = (v - state (decay * k)) * beta;  state = state * decay + delta k^T;  y = state q

    Value head h uses key head h // share, so its axis is split in two, and one token broadcasts against the state as
    it is. That the state decays first is said twice and not kept in between: it is by far the largest array here.
    """
    outputs = []
    for t in range(q.shape[0]):
        parts = (q, k, v, beta, decay)
        qt, kt, vt, bt, dt = parts if q.shape[0] == 1 else (part[t : t + 1] for part in parts)
        remembered = (state * (dt * kt)).sum(axis=-1, keepdims=True)
        state = state * dt + (vt - remembered) * bt * kt
        outputs.append((state * qt).sum(axis=-1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), state


def causal_attention(
    q: Float[mx.array, "1 heads tokens size"],
    keys: Float[mx.array, "1 kv_heads positions size"],
    values: Float[mx.array, "1 kv_heads positions size"],
    scale: float,
) -> Float[mx.array, "1 heads tokens size"]:
    """[DEC-010] Softmax attention in which the last token sees all positions, the one before it all but one ..."""
    mask = "causal" if q.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
