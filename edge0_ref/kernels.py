"""The loops: plain, compiled by Numba when it is on, and the same to the bit when it is off (`NUMBA_DISABLE_JIT=1`).

[NUM-001] One rule covers them all: operands are float32, products and sums are float64, the result is rounded once to
float32. A product of two float32 is exact in float64, so a result is almost always the float32 nearest to the true
one, whatever the order of the sum; [NUM-002] the order is stated all the same: `fold_sum`.

No fast-math: the compiler may not reorder. The loops still vectorise, because each inner loop writes its own elements.
"""

import math
from collections.abc import Iterable
from typing import Any, no_type_check

import numba
import numpy as np

ROWS_AT_ONCE = 32  # of `linear_quantized`: their weights stay in a core's nearest cache, a call costs little for each


@numba.njit(cache=True, nogil=True)
@no_type_check
def fold_sum(terms, count):
    """[NUM-002] Sum of `terms[:count]` (overwritten): the upper half is added to the lower half until one is left.

    A middle element of an odd count stays where it is. The error is at most `ceil(log2(count)) * 2**-53 * sum|terms|`.

    >>> fold_sum(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 5)
    15.0
    """
    while count > 1:
        half = (count + 1) // 2
        for i in range(count - half):
            terms[i] = terms[i] + terms[half + i]
        count = half
    return terms[0]


@numba.njit(cache=True, nogil=True)
@no_type_check
def linear_float32(x, weight, y):
    """[NUM-001] `y[t, r] = sum over c of weight[r, c] * x[t, c]`; x [tokens, cols], weight [rows, cols], float32."""
    cols = weight.shape[1]
    terms = np.empty(cols, np.float64)
    for r in range(weight.shape[0]):
        for t in range(x.shape[0]):
            for c in range(cols):
                terms[c] = np.float64(weight[r, c]) * np.float64(x[t, c])
            y[t, r] = fold_sum(terms, cols)


@numba.njit(cache=True, nogil=True)
@no_type_check
def coefficient(stored, r, g):
    """[NUM-004] One scale or bias as float32; 16-bit ones are bfloat16 patterns, the upper half of a float32."""
    if stored.itemsize == 2:
        return np.uint32(np.uint32(stored[r, g]) << np.uint32(16)).view(np.float32)
    return np.float32(stored[r, g])


@numba.njit(cache=True, nogil=True)
@no_type_check
def dequantize_rows(codes, scales, biases, bits, weights):
    """[DEQ-002] Codes [rows, bytes] and what `coefficient` reads [rows, groups] -> weights [rows, cols], float32.

    A row is unpacked to one code a byte first. A 4-bit byte 0xHL, spread to the 16-bit word 0x0H0L, lies in memory as
    its two codes, the low nibble before the high one: a plain loop where storing to every second place is a slow one.
    """
    rows, groups = scales.shape
    group = weights.shape[1] // groups
    unpacked = np.empty(weights.shape[1], np.uint8)
    pairs = unpacked.view(np.uint16)
    for r in range(rows):
        if bits == 4:
            for i in range(codes.shape[1]):
                byte = np.uint16(codes[r, i])
                pairs[i] = (byte | byte << 4) & 0x0F0F
        else:
            for i in range(codes.shape[1]):
                unpacked[i] = codes[r, i]
        for g in range(groups):
            scale = coefficient(scales, r, g)
            bias = coefficient(biases, r, g)
            first = g * group
            for i in range(group):
                weights[r, first + i] = np.float32(np.float32(unpacked[first + i]) * scale) + bias


@numba.njit(cache=True, nogil=True)
@no_type_check
def linear_quantized(x, codes, scales, biases, bits, y):
    """[DEQ-010] `linear_float32` over rows that are dequantised a few at a time and never stored."""
    rows = codes.shape[0]
    weights = np.empty((min(rows, ROWS_AT_ONCE), x.shape[1]), np.float32)
    for first in range(0, rows, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, rows)
        dequantize_rows(codes[first:last], scales[first:last], biases[first:last], bits, weights)
        linear_float32(x, weights[: last - first], y[:, first:last])


@numba.njit(cache=True, nogil=True)
@no_type_check
def weighted_sum(outputs, weights, y):
    """[EXE-004] `y[t] = sum over j of weights[t, j] * outputs[t, j]`, from the first j to the last."""
    totals = np.empty(y.shape[1], np.float64)
    for t in range(y.shape[0]):
        totals[:] = 0.0
        for j in range(weights.shape[1]):
            for i in range(y.shape[1]):
                totals[i] += np.float64(weights[t, j]) * np.float64(outputs[t, j, i])
        for i in range(y.shape[1]):
            y[t, i] = totals[i]


@numba.njit(cache=True, nogil=True)
@no_type_check
def rms_norm(x, weight, epsilon, y):
    """[DEC-001] `y = x / sqrt(mean(x^2) + epsilon) * weight` along the last axis of x [vectors, size]."""
    size = x.shape[1]
    squares = np.empty(size, np.float64)
    for t in range(x.shape[0]):
        for i in range(size):
            squares[i] = np.float64(x[t, i]) * np.float64(x[t, i])
        root = math.sqrt(fold_sum(squares, size) / size + epsilon)
        for i in range(size):
            y[t, i] = np.float64(x[t, i]) / root * np.float64(weight[i])


@numba.njit(cache=True, nogil=True)
@no_type_check
def l2_normalize(x, scale, epsilon, y):
    """[DEC-022] `y = x * scale / sqrt(sum(x^2) + epsilon)` along the last axis of x [vectors, size]."""
    size = x.shape[1]
    squares = np.empty(size, np.float64)
    for t in range(x.shape[0]):
        for i in range(size):
            squares[i] = np.float64(x[t, i]) * np.float64(x[t, i])
        root = math.sqrt(fold_sum(squares, size) + epsilon)
        for i in range(size):
            y[t, i] = np.float64(x[t, i]) * scale / root


@numba.njit(cache=True, nogil=True)
@no_type_check
def causal_conv(x, taps, state, y):
    """[DEC-020] Depthwise causal convolution; taps [kernel, channels], the last tap meets the newest row.

    state [kernel - 1, channels] holds the raw rows before x [tokens, channels] and is advanced past it. The sum over
    taps runs from the oldest row to the newest.
    """
    history = state.shape[0]
    for t in range(x.shape[0]):
        for c in range(x.shape[1]):
            total = np.float64(taps[history, c]) * np.float64(x[t, c])
            older = 0.0
            for j in range(history):
                older += np.float64(taps[j, c]) * np.float64(state[j, c])
            y[t, c] = older + total
        for j in range(history - 1):
            for c in range(x.shape[1]):
                state[j, c] = state[j + 1, c]
        for c in range(x.shape[1]):
            state[history - 1, c] = x[t, c]


@numba.njit(cache=True, nogil=True)
@no_type_check
def delta_rule(q, k, v, beta, decay, state, y):
    """[DEC-021] The gated delta rule, one token after the other, for every value head.

    q, k [tokens, key_heads, key_size]; v, y [tokens, heads, value_size]; beta [tokens, heads];
    decay [tokens, heads, key_size]; state [heads, value_size, key_size], float32, advanced in place:

        state = state * decay;  delta = (v - state k) * beta;  state = state + delta k^T;  y = state q

    Value head h uses key head `h // (heads / key_heads)`. The state is rounded to float32 once a token.
    """
    heads, value_size, key_size = state.shape
    share = heads // k.shape[1]
    terms = np.empty(key_size, np.float64)
    decayed = np.empty(key_size, np.float64)
    for t in range(q.shape[0]):
        for h in range(heads):
            key_head = h // share
            for i in range(value_size):
                for j in range(key_size):
                    decayed[j] = np.float64(state[h, i, j]) * np.float64(decay[t, h, j])
                for j in range(key_size):
                    terms[j] = decayed[j] * np.float64(k[t, key_head, j])
                delta = (np.float64(v[t, h, i]) - fold_sum(terms, key_size)) * np.float64(beta[t, h])
                for j in range(key_size):
                    state[h, i, j] = decayed[j] + delta * np.float64(k[t, key_head, j])
                for j in range(key_size):
                    terms[j] = np.float64(state[h, i, j]) * np.float64(q[t, key_head, j])
                y[t, h, i] = fold_sum(terms, key_size)


@numba.njit(cache=True, nogil=True)
@no_type_check
def causal_attention(q, keys, values, first, scale, y):
    """[DEC-010] Softmax attention of q [tokens, heads, size] over keys, values [positions, kv_heads, size].

    Token t stands at position `first + t` and sees positions 0 .. first + t. Probabilities stay in float64; the
    weighted sum runs over positions in ascending order. Of values wider than y [tokens, heads, value_size] the first
    dims count: latents, whose rows go on with a key, are keys and values in one.
    """
    tokens, heads, size = q.shape
    value_size = y.shape[2]
    share = heads // keys.shape[1]
    terms = np.empty(size, np.float64)
    scores = np.empty(first + tokens, np.float64)
    mixed = np.empty(value_size, np.float64)
    for t in range(tokens):
        seen = first + t + 1
        for h in range(heads):
            top = -np.inf
            for p in range(seen):
                for i in range(size):
                    terms[i] = np.float64(q[t, h, i]) * np.float64(keys[p, h // share, i])
                scores[p] = fold_sum(terms, size) * scale
                top = max(top, scores[p])
            total = 0.0
            mixed[:] = 0.0
            for p in range(seen):
                probability = math.exp(scores[p] - top)
                total += probability
                for i in range(value_size):
                    mixed[i] += probability * np.float64(values[p, h // share, i])
            for i in range(value_size):
                y[t, h, i] = mixed[i] / total


@numba.njit(cache=True, nogil=True)
@no_type_check
def logistic(x):
    """[NUM-003] `1 / (1 + exp(-x))` of one number, in float64, without overflow on either side."""
    decayed = math.exp(-abs(np.float64(x)))
    return (1.0 if x >= 0 else decayed) / (1.0 + decayed)


@numba.njit(cache=True, nogil=True)
@no_type_check
def sigmoid(x, y):
    """[NUM-003] `1 / (1 + exp(-x))` of float32 x [size]."""
    for i in range(x.shape[0]):
        y[i] = logistic(x[i])


@numba.njit(cache=True, nogil=True)
@no_type_check
def gated(gate, up, y):
    """[EXE-003] `gate * sigmoid(gate) * up` of float32 arrays [size], products from left to right."""
    for i in range(gate.shape[0]):
        y[i] = np.float64(gate[i]) * logistic(gate[i]) * np.float64(up[i])


@numba.njit(cache=True, nogil=True)
@no_type_check
def erf(x, y):
    """[NUM-003] The error function of float64 x, elementwise."""
    for i in range(x.shape[0]):
        y[i] = math.erf(x[i])


KERNELS = (
    linear_float32,
    linear_quantized,
    dequantize_rows,
    weighted_sum,
    rms_norm,
    l2_normalize,
    causal_conv,
    delta_rule,
    causal_attention,
    sigmoid,
    gated,
    erf,
)


def compiled_before(wanted: Iterable[Any] = KERNELS) -> bool:
    """Whether an earlier run left these kernels compiled on this machine; always true when Numba is switched off.

    A cache of other sources or another Numba does not count. Asks Numba's own index, which has no public name.
    """
    files = [kernel._cache._cache_file for kernel in wanted if hasattr(kernel, "_cache")]
    return not files or any(file._load_index() for file in files)
