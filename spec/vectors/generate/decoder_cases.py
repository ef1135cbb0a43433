"""Chapter 9, piece by piece: norms, rotations, convolution, decays, delta rule, attention; plain float64 with bounds."""

# ruff: noqa: E501 (a case is a row of a table)

import math

import numpy as np
from decoder_pieces import drawn, judged
from mixer_cases import cases as mixer_cases
from oracles import TINY, UNIT, sigmoid
from values import Json, tensor


def cases() -> list[Json]:
    return [*norms(), *rotations(), *convolutions(), *unit_vectors(), *decays(), *mixer_cases()]


def norm_row(x: list[float], weight: list[float], epsilon: float) -> tuple[list[float], list[float]]:
    root = math.sqrt(math.fsum(v * v for v in x) / len(x) + epsilon)
    values = [v / root * w for v, w in zip(x, weight, strict=True)]
    return values, [(len(x) + 8) * UNIT * abs(v) + TINY for v in values]


def norms() -> list[Json]:
    rows = [
        ("three-four", np.float32([[3.0, 4.0]]), np.ones(2, np.float32), 0.0, "sum-for-mean", None),
        (
            "weights",
            np.float32([[1.0, 1.0, 1.0, 1.0]]),
            np.float32([1.0, 2.0, -0.5, 0.0]),
            0.0,
            "one-plus-weight",
            None,
        ),
        ("zeros", np.zeros((1, 8), np.float32), np.ones(8, np.float32), 1e-6, "division-by-zero", None),
        ("epsilon", np.full((1, 4), 1e-3, np.float32), np.ones(4, np.float32), 1e-6, "epsilon-outside-root", None),
        ("tiny", np.full((1, 4), 1e-30, np.float32), np.ones(4, np.float32), 1e-6, "squares-underflow", None),
        ("huge", np.full((2, 4), 1e25, np.float32), np.ones(4, np.float32), 1e-6, "squares-overflow", None),
        ("tokens", drawn(801, 3, 16), drawn(802, 16), 1e-6, "norm-over-tokens", 801),
        ("long", drawn(803, 1, 100), drawn(804, 100), 1e-5, "float16-accumulation", 803),
    ]
    listed = []
    for name, x, weight, epsilon, flags, seed in rows:
        results = [norm_row(row, weight.tolist(), epsilon) for row in x.tolist()]
        inputs = {"x": tensor(x, "float32"), "weight": tensor(weight, "float32"), "epsilon": epsilon}
        y = [v for v, _ in results], [b for _, b in results]
        listed.append(
            judged(
                f"norm-{name}",
                "DEC-001",
                "rms_norm",
                flags,
                "x / sqrt(mean(x^2) + epsilon) * weight.",
                seed,
                inputs,
                y=y,
            )
        )
    return listed


def turned(row: list[float], position: int, size: int, theta: float, halves: bool) -> tuple[list[float], list[float]]:
    values, bounds = list(row), [0.0] * len(row)
    for i in range(size // 2):
        first, second = (i, i + size // 2) if halves else (2 * i, 2 * i + 1)
        angle = position * theta ** (-2 * i / size)
        a, b = row[first], row[second]
        values[first] = a * math.cos(angle) - b * math.sin(angle)
        values[second] = b * math.cos(angle) + a * math.sin(angle)
        bounds[first] = bounds[second] = 8 * UNIT * (abs(a) + abs(b)) + TINY
    return values, bounds


def rotations() -> list[Json]:
    rows = [
        ("position-0", 811, "halves", [0], 8, 8, 1e4, "position-from-1", "Nothing turns at position 0."),
        ("one-pair", 812, "halves", [1], 4, 2, 1e4, "pairs-side-by-side", "Dims 2 and 3 pass through."),
        ("part", 813, "halves", [3, 4], 32, 8, 1e7, "rotates-everything", "A quarter of the dims."),
        ("far", 814, "halves", [100_000], 8, 8, 1e4, "float32-angles", "A float32 angle is off by 5e-3 here."),
        ("farther", 815, "halves", [1_000_003], 16, 16, 6e6, "float32-angles", "And by more here."),
        ("heads", 816, "halves", [7], 8, 4, 1e4, "heads-as-positions", "All heads turn alike."),
        ("neighbors-position-0", 817, "neighbors", [0], 8, 8, 1e4, "position-from-1", "Nothing turns at position 0."),
        ("neighbors", 818, "neighbors", [1, 2, 3], 8, 8, 1e4, "pairs-by-halves", "Pairs (2i, 2i + 1)."),
        ("neighbors-far", 819, "neighbors", [123_456], 64, 64, 6e6, "float32-angles", "Published size, far out."),
        ("neighbors-one-pair", 820, "neighbors", [2], 2, 2, 1e4, "sign-of-sine", "One pair."),
    ]  # fmt: skip
    listed = []
    for name, seed, pairs, positions, dims, size, theta, flags, comment in rows:
        heads = 3 if name == "heads" else 1
        x = drawn(seed, len(positions), heads, dims)
        results = [
            [turned(row, p, size, theta, pairs == "halves") for row in token]
            for token, p in zip(x.tolist(), positions, strict=True)
        ]
        inputs = {
            "pairs": pairs,
            "x": tensor(x, "float32"),
            "positions": tensor(positions, "int64"),
            "size": size,
            "theta": theta,
        }
        y = [[v for v, _ in token] for token in results], [[b for _, b in token] for token in results]
        ids = "DEC-011" if pairs == "halves" else "DEC-053"
        listed.append(judged(f"rotary-{name}", ids, "rotary", flags, comment, seed, inputs, y=y))
    return listed


def convolutions() -> list[Json]:
    rows = [
        ("newest-tap", np.float32([[1.0]]), np.float32([[0.0, 0.0, 0.0, 2.0]]), np.zeros((3, 1), np.float32), "taps-reversed", None),
        ("oldest-tap", np.float32([[1.0]]), np.float32([[2.0, 0.0, 0.0, 0.0]]), np.float32([[5.0], [0.0], [0.0]]), "taps-reversed state-reversed", None),
        ("fresh", drawn(821, 5, 3), drawn(822, 3, 4), np.zeros((3, 3), np.float32), "looks-ahead channels-mixed", 821),
        ("goes-on", drawn(823, 2, 3), drawn(824, 3, 4), drawn(825, 3, 3), "state-ignored", 823),
        ("one-token", drawn(826, 1, 4), drawn(827, 4, 4), drawn(828, 3, 4), "state-not-advanced", 826),
        ("two-taps", drawn(829, 3, 2), drawn(830, 2, 2), drawn(831, 1, 2), "kernel-of-4", 829),
    ]  # fmt: skip
    listed = []
    for name, x, taps, state, flags, seed in rows:
        rows_seen = [*state.tolist(), *x.tolist()]
        kernel, channels = taps.shape[1], taps.shape[0]
        y, bounds = [], []
        for t in range(len(x)):
            terms = [[float(taps[c, j]) * rows_seen[t + j][c] for j in range(kernel)] for c in range(channels)]
            y.append([math.fsum(term) for term in terms])
            bounds.append([(2 * kernel + 8) * UNIT * math.fsum(map(abs, term)) + TINY for term in terms])
        kept = rows_seen[len(x) :]
        inputs = {"x": tensor(x, "float32"), "taps": tensor(taps, "float32"), "state": tensor(state, "float32")}
        zero = [[0.0] * channels for _ in kept]
        listed.append(
            judged(
                f"conv-{name}",
                "DEC-020",
                "conv",
                flags,
                "The last tap meets the newest row.",
                seed,
                inputs,
                y=(y, bounds),
                state=(kept, zero),
            )
        )
    return listed


def unit_vectors() -> list[Json]:
    rows = [
        ("three-four", np.float32([[3.0, 4.0]]), 1.0, "norm-by-mean", None),
        ("query", drawn(841, 2, 16), 16**-0.5, "scale-dropped", 841),
        ("near-epsilon", np.full((1, 16), 2e-4, np.float32), 1.0, "epsilon-on-mean", None),
        ("below-epsilon", np.full((1, 128), 1e-6, np.float32), 1.0, "epsilon-on-mean epsilon-dropped", None),
        ("zeros", np.zeros((1, 8), np.float32), 1.0, "division-by-zero", None),
        ("heads", drawn(842, 2, 3, 8), 1.0, "norm-over-heads", 842),
    ]
    listed = []
    for name, x, scale, flags, seed in rows:
        flat = x.reshape(-1, x.shape[-1]).tolist()
        y = [[v * scale / math.sqrt(math.fsum(w * w for w in row) + 1e-6) for v in row] for row in flat]
        bounds = [[(len(row) + 8) * UNIT * abs(v) + TINY for v in row] for row in y]
        inputs = {"x": tensor(x, "float32"), "scale": scale}
        shaped = np.array(y).reshape(x.shape), np.array(bounds).reshape(x.shape)
        listed.append(
            judged(
                f"unit-{name}",
                "DEC-022",
                "l2_normalize",
                flags,
                "The epsilon is on the sum of squares.",
                seed,
                inputs,
                y=shaped,
            )
        )
    return listed


def softplus(z: float) -> float:
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def decays() -> list[Json]:
    listed = []
    rows = [
        ("zero", np.zeros((1, 1), np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32), "log-dropped", None),
        ("large", np.float32([[100.0]]), np.float32([-2.0]), np.float32([0.0]), "softplus-overflow", None),
        ("negative", np.float32([[-100.0]]), np.float32([1.0]), np.float32([0.0]), "softplus-underflow", None),
        ("bias", np.float32([[0.0, 0.0]]), np.float32([0.5, 0.5]), np.float32([2.0, -2.0]), "bias-dropped", None),
        ("heads", drawn(851, 3, 4), drawn(852, 4), drawn(853, 4), "heads-swapped sign-of-exponent", 851),
    ]
    for name, a, a_log, bias, flags, seed in rows:
        # the sum a + dt_bias is a float32 sum
        exponents = [
            [-math.exp(float(g)) * softplus(float(np.float32(v) + b)) for v, g, b in zip(row, a_log, bias, strict=True)]
            for row in a
        ]
        values = [[math.exp(e) for e in row] for row in exponents]
        bounds = [[(16 + 16 * abs(e)) * UNIT * math.exp(e) + TINY for e in row] for row in exponents]
        inputs = {"a": tensor(a, "float32"), "a_log": tensor(a_log, "float32"), "dt_bias": tensor(bias, "float32")}
        listed.append(
            judged(
                f"decay-{name}",
                "DEC-023",
                "decay",
                flags,
                "exp(-exp(A_log) softplus(a + dt_bias)).",
                seed,
                inputs,
                decay=(values, bounds),
            )
        )
    rows = [
        (
            "middle",
            np.zeros((1, 1, 2), np.float32),
            np.zeros(1, np.float32),
            np.zeros((1, 2), np.float32),
            -5.0,
            "unbounded",
            None,
        ),
        (
            "floor",
            np.full((1, 1, 2), 100.0, np.float32),
            np.ones(1, np.float32),
            np.zeros((1, 2), np.float32),
            -5.0,
            "unbounded",
            None,
        ),
        (
            "ceiling",
            np.full((1, 1, 2), -100.0, np.float32),
            np.ones(1, np.float32),
            np.zeros((1, 2), np.float32),
            -5.0,
            "sign-of-gate",
            None,
        ),
        ("channels", drawn(854, 2, 2, 4), drawn(855, 2), drawn(856, 2, 4), -5.0, "one-decay-a-head", 854),
        ("bound", drawn(857, 1, 2, 4), drawn(858, 2), drawn(859, 2, 4), -1.5, "bound-ignored", 857),
    ]
    for name, f, a_log, bias, lowest, flags, seed in rows:
        heads, size = f.shape[1:]
        exponents = [
            [
                [
                    lowest * sigmoid(math.exp(float(a_log[h])) * (float(token[h, i]) + float(bias[h, i])))
                    for i in range(size)
                ]
                for h in range(heads)
            ]
            for token in f
        ]
        values = np.exp(np.array(exponents))
        bounds = (16 + 64 * np.abs(np.array(exponents))) * UNIT * values + TINY
        inputs = {
            "f": tensor(f, "float32"),
            "a_log": tensor(a_log, "float32"),
            "dt_bias": tensor(bias, "float32"),
            "lower_bound": lowest,
        }
        listed.append(
            judged(
                f"channel-decay-{name}",
                "DEC-051",
                "channel_decay",
                flags,
                "exp(bound * sigmoid(exp(A_log) (f + dt_bias))).",
                seed,
                inputs,
                decay=(values, bounds),
            )
        )
    return listed
