"""The `numba` backend's kernels for mixers: those of `kernels`, in float32, with heads shared out over threads.

A sum here may be cut up as the compiler likes, but it is one loop for any number of tokens and any number of threads,
so what it likes is the same each time.
"""

import math
from typing import no_type_check

import numba
import numpy as np
from numba import prange

FREE = {"reassoc", "contract", "nsz", "arcp"}  # NaN and infinity stay what they are: they are looked for later


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def causal_conv(x, taps, state, y):
    """[DEC-020] As `kernels.causal_conv`."""
    history, channels = state.shape
    for t in range(x.shape[0]):
        for c in range(channels):
            total = taps[c, history] * x[t, c]
            for j in range(history):
                total += taps[c, j] * state[j, c]
            y[t, c] = total
        for j in range(history - 1):
            for c in range(channels):
                state[j, c] = state[j + 1, c]
        for c in range(channels):
            state[history - 1, c] = x[t, c]


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def delta_head(h, q, k, v, beta, decay, state, y):
    """[DEC-021] All tokens of one value head."""
    key_head = h // (state.shape[0] // k.shape[1])
    size = k.shape[2]
    for t in range(q.shape[0]):
        for i in range(state.shape[1]):
            seen = np.float32(0)
            for j in range(size):
                state[h, i, j] *= decay[t, h, j]
                seen += state[h, i, j] * k[t, key_head, j]
            delta = (v[t, h, i] - seen) * beta[t, h]
            out = np.float32(0)
            for j in range(size):
                state[h, i, j] += delta * k[t, key_head, j]
                out += state[h, i, j] * q[t, key_head, j]
            y[t, h, i] = out


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def delta_rule(q, k, v, beta, decay, state, y):
    """[DEC-021] As `kernels.delta_rule`."""
    for h in prange(state.shape[0]):
        delta_head(h, q, k, v, beta, decay, state, y)


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def attend(task, q, keys, values, first, scale, y):
    """[DEC-010] One token's one head: scores, softmax, and the weighted sum of values."""
    heads, size = q.shape[1], q.shape[2]
    t, h = task // heads, task % heads
    shared, seen = h // (heads // keys.shape[1]), first + t + 1
    scores = np.empty(seen, np.float32)
    top = np.float32(-np.inf)
    for p in range(seen):
        score = np.float32(0)
        for i in range(size):
            score += q[t, h, i] * keys[p, shared, i]
        scores[p] = score * scale
        top = max(top, scores[p])
    total = np.float32(0)
    y[t, h, :] = 0
    for p in range(seen):
        probability = np.float32(math.exp(scores[p] - top))
        total += probability
        for i in range(y.shape[2]):
            y[t, h, i] += probability * values[p, shared, i]
    for i in range(y.shape[2]):
        y[t, h, i] /= total


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def causal_attention(q, keys, values, first, scale, y):
    """[DEC-010] As `kernels.causal_attention`."""
    for task in prange(q.shape[0] * q.shape[1]):
        attend(task, q, keys, values, first, scale, y)
