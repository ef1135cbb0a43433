"""The `numba` backend's kernels for mixers: those of `kernels`, in float32, with heads shared out over threads.

A sum here may be cut up as the compiler likes, but it is one loop for any number of tokens and any number of threads,
so what it likes is the same each time.
"""

import math
from typing import no_type_check

import numba
import numpy as np
from numba import prange

from edge0_ref.fast_shares import share, take_task

WHOLE = np.float32(1.5 * 2**23)  # float32 near it are whole numbers
FREE = {"reassoc", "contract", "nsz", "arcp"}  # NaN and infinity stay what they are: they are looked for later


# Numba compiles a function that names no freedoms with those of whoever calls it first: where sums may be reordered,
# what rounds n is gone.
@numba.njit(cache=True, nogil=True, forceinline=True, fastmath={"contract"})
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
def powers_of(scores):
    """Each score becomes exp(score - the largest); their sum. NaN stays NaN, which `exponential` may lose."""
    largest, total = np.float32(-np.inf), np.float32(0)
    for p in range(scores.shape[0]):
        largest = max(largest, scores[p])
    for p in range(scores.shape[0]):
        below = scores[p] - largest
        undefined = np.float32(0) if below == -np.inf else below - below
        scores[p] = exponential(below) + undefined
    for p in range(scores.shape[0]):
        total += scores[p]
    return total


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def score(q, keys, t, head, heads, shared, scale, scores):
    """scores[h, p] = scale * (q[t, head + h] . keys[p, shared]), four positions at a time for each load of q."""
    whole = scores.shape[1] // 4 * 4
    for p in range(0, whole, 4):
        for h in range(heads):
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(q.shape[2]):
                x = q[t, head + h, i]
                a += x * keys[p, shared, i]
                b += x * keys[p + 1, shared, i]
                c += x * keys[p + 2, shared, i]
                d += x * keys[p + 3, shared, i]
            scores[h, p], scores[h, p + 1] = a * scale, b * scale
            scores[h, p + 2], scores[h, p + 3] = c * scale, d * scale
    for p in range(whole, scores.shape[1]):
        for h in range(heads):
            a = np.float32(0)
            for i in range(q.shape[2]):
                a += q[t, head + h, i] * keys[p, shared, i]
            scores[h, p] = a * scale


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def mix(powers, values, t, head, heads, shared, y):
    """y[t, head + h] += sum over p of powers[h, p] * values[p, shared], four positions at a time for each load of y."""
    whole = powers.shape[1] // 4 * 4
    for p in range(0, whole, 4):
        for h in range(heads):
            a, b, c, d = powers[h, p], powers[h, p + 1], powers[h, p + 2], powers[h, p + 3]
            for i in range(y.shape[2]):
                two = a * values[p, shared, i] + b * values[p + 1, shared, i]
                y[t, head + h, i] += two + (c * values[p + 2, shared, i] + d * values[p + 3, shared, i])
    for p in range(whole, powers.shape[1]):
        for h in range(heads):
            for i in range(y.shape[2]):
                y[t, head + h, i] += powers[h, p] * values[p, shared, i]


@numba.njit(cache=True, nogil=True, fastmath=FREE)
@no_type_check
def attend(task, heads, q, keys, values, first, scale, y):
    """[DEC-010] `heads` of one token's heads, which share keys and values: they are loaded once for all of these."""
    tasks_of_a_token = q.shape[1] // heads
    t, head = task // tasks_of_a_token, task % tasks_of_a_token * heads
    shared, seen = head // (q.shape[1] // keys.shape[1]), first + t + 1
    powers, totals = np.empty((heads, seen), np.float32), np.empty(heads, np.float32)
    score(q, keys, t, head, heads, shared, scale, powers)
    for h in range(heads):
        totals[h] = powers_of(powers[h])
        for i in range(y.shape[2]):
            y[t, head + h, i] = 0
    mix(powers, values, t, head, heads, shared, y)
    for h in range(heads):
        for i in range(y.shape[2]):
            y[t, head + h, i] /= totals[h]


@numba.njit(cache=True, nogil=True, parallel=True)
@no_type_check
def causal_attention(q, keys, values, first, scale, heads, threads, y):
    """[DEC-010] As `kernels.causal_attention`.

    heads: of a task, a divisor of those that share keys and values; threads: as many as Numba was told to use. What a
    token's head comes to depends on its position alone, not on who shares the task.
    """
    tasks = q.shape[0] * (q.shape[1] // heads)
    untaken = share(tasks, threads)
    for thread in prange(threads):
        task = take_task(untaken, thread, tasks)
        while task >= 0:
            attend(task, heads, q, keys, values, first, scale, y)
            task = take_task(untaken, thread, tasks)
