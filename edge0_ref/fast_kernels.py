"""The `numba` backend's kernels for mixers: those of `kernels`, in float32, with heads shared out over threads.

A sum here may be cut up as the compiler likes, but it is one loop for any number of tokens and any number of threads,
so what it likes is the same each time.
"""

import math
from typing import no_type_check

import numba
import numpy as np
from numba import prange

WHOLE = np.float32(1.5 * 2**23)  # float32 near it are whole numbers
FREE = {"reassoc", "contract", "nsz", "arcp"}  # NaN and infinity stay what they are: they are looked for later


@numba.njit(cache=True, nogil=True, forceinline=True)
@no_type_check
def exponential(x):
    """exp(x) of one float32, off by 2^-23 of it at most; below -87 that end's value, where it is too large infinity.

    The form vectorises.

    x = n log 2 + r with |r| <= log(2) / 2; n is rounded by adding a number so large that no fraction is left. log 2
    comes in two parts (Cody and Waite), the first so short that n times it is exact. Taylor's series to r^7 is off by
    less than 6e-9 of exp(r). 2^n is put together from its bits, in two halves: 2^128 alone has none.
    """
    x = min(max(x, np.float32(-87)), np.float32(90))
    n = (x * np.float32(1.4426950408889634) + WHOLE) - WHOLE
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1 / 5040)
    for inverse in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = series * r + np.float32(inverse)
    half = np.int32(np.int32(n) >> np.int32(1))
    rest = np.int32(np.int32(n) - half)
    series *= np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    return series * np.int32((rest + np.int32(127)) << np.int32(23)).view(np.float32)


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
@no_type_check
def swiglu(gate, up, y):
    """[EXE-003] gate / (1 + exp(-gate)) * up of flat arrays."""
    for i in range(gate.shape[0]):
        y[i] = gate[i] / (np.float32(1) + exponential(-gate[i])) * up[i]


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
@no_type_check
def silu(x, y):
    """x / (1 + exp(-x)) of flat arrays."""
    for i in range(x.shape[0]):
        y[i] = x[i] / (np.float32(1) + exponential(-x[i]))


@numba.njit(cache=True, nogil=True, error_model="numpy")
@no_type_check
def softmax_top_k(logits, experts, weights):
    """[RTR-003] [RTR-011] As `router.top_k` and `router.softmax`; False for a logit that has no order."""
    left, powers = np.empty(logits.shape[1], np.float32), np.empty(experts.shape[1], np.float64)
    for t in range(logits.shape[0]):
        for e in range(logits.shape[1]):
            if not math.isfinite(logits[t, e]):
                return False
            left[e] = logits[t, e]
        total = 0.0
        for j in range(experts.shape[1]):
            best = 0
            for e in range(logits.shape[1]):
                if left[e] > left[best]:  # of equal ones the first is kept
                    best = e
            experts[t, j], left[best] = best, -np.inf
            powers[j] = math.exp(np.float64(logits[t, best]) - np.float64(logits[t, experts[t, 0]]))
            total += powers[j]
        for j in range(experts.shape[1]):
            weights[t, j] = powers[j] / total
    return True


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def causal_conv(x, taps, state, y):
    """[DEC-020] As `kernels.causal_conv`."""
    history, channels = state.shape
    for t in range(x.shape[0]):
        for c in range(channels):
            y[t, c] = taps[history, c] * x[t, c]
        for j in range(history):
            for c in range(channels):
                y[t, c] += taps[j, c] * state[j, c]
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
