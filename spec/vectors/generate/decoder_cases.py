"""Chapter 9, piece by piece: norms, rotations, convolution, decays, delta rule, attention; plain float64 with bounds."""

# ruff: noqa: E501 (a case is a row of a table)

import math
from typing import Any

import numpy as np
from oracles import TINY, UNIT, absolute, linear, sigmoid
from values import Json, case, tensor


def cases() -> list[Json]:
    return [*norms(), *rotations(), *convolutions(), *unit_vectors(), *decays(), *deltas(), *attentions(), *latents()]


def judged(
    name: str, ids: str, operation: str, flags: str, comment: str, seed: int | None, inputs: Json, **results: Any
) -> Json:
    """results: output -> (values, bounds)."""
    source = "hand" if seed is None else f"float64 oracle, seed {seed}"
    expected = {output: tensor(values, "float64") for output, (values, _) in results.items()}
    bound = {output: tensor(bounds, "float64") for output, (_, bounds) in results.items()}
    return case(f"decoder/{name}", ids, operation, flags, comment, source, inputs, expected=expected, bound=bound)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


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
        ("large", np.float32([[100.0]]), np.float32([0.0]), np.float32([0.0]), "softplus-overflow", None),
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


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, decay: np.ndarray, state: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The rule and what float32 may lose of it, carried from token to token beside it."""
    heads, _, size = state.shape
    share, step = heads // k.shape[1], 2 * size + 8
    S, E = state.astype(np.float64), np.zeros(state.shape)
    y, bounds = np.zeros(v.shape), np.zeros(v.shape)
    for t in range(len(q)):
        for h in range(heads):
            key, query, d = (a.astype(np.float64) for a in (k[t, h // share], q[t, h // share], decay[t, h]))
            E[h] = E[h] * d + 4 * UNIT * np.abs(S[h]) * d
            S[h] = S[h] * d
            found, size_of = S[h] @ key, np.abs(S[h]) @ np.abs(key)
            delta = (v[t, h].astype(np.float64) - found) * float(beta[t, h])
            lost = E[h] @ np.abs(key) + step * UNIT * size_of
            lost = (lost + 8 * UNIT * (np.abs(v[t, h]) + np.abs(found))) * float(beta[t, h])
            S[h] = S[h] + np.outer(delta, key)
            E[h] = E[h] + np.outer(lost, np.abs(key)) + 4 * UNIT * (np.abs(S[h]) + np.abs(np.outer(delta, key)))
            y[t, h] = S[h] @ query
            bounds[t, h] = E[h] @ np.abs(query) + step * UNIT * (np.abs(S[h]) @ np.abs(query)) + TINY
    return {"y": (y, bounds), "state": (S, E + TINY)}


def deltas() -> list[Json]:
    rows = [
        ("one-token", 861, 1, 1, 1, 2, 2, False, "DEC-021", "beta-dropped", "From an empty memory: y = beta v (k . q)."),
        ("decays-first", 862, 1, 1, 1, 2, 2, True, "DEC-021", "decay-after-update", "The memory decays before it is read."),
        ("tokens", 863, 4, 1, 1, 4, 4, False, "DEC-021", "state-not-carried", "Four tokens."),
        ("shared-keys", 864, 3, 2, 4, 4, 2, True, "DEC-021", "value-heads-take-turns", "Value heads 0 and 1 share key head 0."),
        ("channels", 865, 3, 2, 2, 4, 4, True, "DEC-050 DEC-021", "one-decay-a-head", "Each key channel at its own rate."),
        ("overwrites", 866, 6, 1, 2, 4, 3, True, "DEC-021", "delta-without-memory", "What is stored for a key is corrected."),
    ]  # fmt: skip
    listed = []
    for name, seed, tokens, key_heads, heads, key, value, filled, ids, flags, comment in rows:
        q, k = (drawn(seed + s, tokens, key_heads, key, scale=key**-0.5) for s in (1000, 2000))
        v = drawn(seed, tokens, heads, value)
        beta = (1 / (1 + np.exp(-drawn(seed + 3000, tokens, heads)))).astype(np.float32)
        decay = (1 / (1 + np.exp(-drawn(seed + 4000, tokens, heads, key)))).astype(np.float32)
        if "channels" not in name:
            decay = np.repeat(decay[:, :, :1], key, axis=2)
        state = drawn(seed + 5000, heads, value, key) if filled else np.zeros((heads, value, key), np.float32)
        arrays = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay, "state": state}
        inputs = {part: tensor(array, "float32") for part, array in arrays.items()}
        listed.append(judged(f"delta-{name}", ids, "delta_rule", flags, comment, seed, inputs, **delta_rule(**arrays)))
    return listed


def attend(
    scores: list[float], slack: list[float], rows: np.ndarray, row_slack: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of scores known up to slack, over rows known up to row_slack."""
    top = max(scores)
    powers = [math.exp(s - top) for s in scores]
    total = math.fsum(powers)
    p = np.array(powers) / total
    relative = math.expm1(2 * max(slack)) + (2 * len(scores) + 16 + 2 * (top - min(scores))) * UNIT
    return p @ rows, 2 * relative * (p @ np.abs(rows)) + p @ row_slack + TINY


def attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    tokens, heads, size = q.shape
    y, bounds = (np.zeros((tokens, heads, values.shape[2])) for _ in range(2))
    for t in range(tokens):
        seen = first + t + 1
        for h in range(heads):
            shared = h // (heads // keys.shape[1])
            terms = keys[:seen, shared].astype(np.float64) * q[t, h].astype(np.float64)
            slack = (scale * (2 * size + 8) * UNIT * np.abs(terms).sum(axis=1)).tolist()
            rows = values[:seen, shared].astype(np.float64)
            y[t, h], bounds[t, h] = attend((scale * terms.sum(axis=1)).tolist(), slack, rows, np.zeros(rows.shape))
    return y, bounds


def attentions() -> list[Json]:
    rows = [
        ("first-token", 871, 1, 1, 1, 4, 0, 1.0, "attends-to-nothing", "The only position has all the weight."),
        ("causal", 872, 3, 1, 1, 4, 0, 1.0, "looks-ahead", "Token t sees positions 0 to t."),
        ("goes-on", 873, 2, 1, 1, 4, 5, 1.0, "cache-ignored off-by-one-position", "Five positions before."),
        ("grouped", 874, 2, 4, 2, 8, 1, 0.25, "heads-take-turns", "Query heads 0 and 1 share key head 0."),
        ("scale", 875, 2, 2, 1, 8, 3, 8**-0.5, "scale-dropped", "Scores are scaled by size ** -0.5."),
        ("sharp", 876, 1, 1, 1, 4, 6, 40.0, "no-max-subtraction", "Large scores: one position takes all."),
        ("many", 877, 1, 2, 1, 4, 40, 0.5, "softmax-over-heads", "41 positions."),
    ]  # fmt: skip
    listed = []
    for name, seed, tokens, heads, shared, size, first, scale, flags, comment in rows:
        q, keys, values = (
            drawn(seed, tokens, heads, size),
            drawn(seed + 1000, first + tokens, shared, size),
            drawn(seed + 2000, first + tokens, shared, size),
        )
        inputs = {
            "q": tensor(q, "float32"),
            "keys": tensor(keys, "float32"),
            "values": tensor(values, "float32"),
            "first": first,
            "scale": scale,
        }
        listed.append(
            judged(
                f"attention-{name}",
                "DEC-010",
                "attention",
                flags,
                comment,
                seed,
                inputs,
                y=attention(q, keys, values, first, scale),
            )
        )
    return listed


def latents() -> list[Json]:
    """Keys and values of every position written out: the textbook form."""
    rows = [
        ("one-head", 881, 1, 1, 4, 2, 6, 3, 0, "keys-values-swapped"),
        ("heads", 882, 2, 3, 4, 2, 6, 4, 2, "heads-swapped"),
        ("rotary-part", 883, 2, 2, 2, 4, 4, 2, 3, "rotary-part-dropped"),
        ("goes-on", 884, 1, 2, 4, 2, 8, 4, 9, "cache-ignored"),
    ]
    listed = []
    for name, seed, tokens, heads, key, rotary, latent, value, first, flags in rows:
        q, q_rotary = drawn(seed, tokens, heads, key), drawn(seed + 1000, tokens, heads, rotary)
        rows_of = drawn(seed + 2000, first + tokens, latent + rotary)
        w_uk, w_uv = (
            drawn(seed + 3000, heads, key, latent, scale=0.5),
            drawn(seed + 4000, heads, value, latent, scale=0.5),
        )
        scale = (key + rotary) ** -0.5
        y, bounds = (np.zeros((tokens, heads, value)) for _ in range(2))
        for h in range(heads):
            pairs = [
                (
                    linear(w_uk[h].tolist(), absolute(w_uk[h].tolist()), row[:latent]),
                    linear(w_uv[h].tolist(), absolute(w_uv[h].tolist()), row[:latent]),
                )
                for row in rows_of.tolist()
            ]
            keys, key_slack = (np.array([p[0][i] for p in pairs]) for i in range(2))
            values, value_slack = (np.array([p[1][i] for p in pairs]) for i in range(2))
            for t in range(tokens):
                seen, query, turned_query = first + t + 1, q[t, h].astype(np.float64), q_rotary[t, h].astype(np.float64)
                shared = rows_of[:seen, latent:].astype(np.float64)
                size_of = np.abs(keys[:seen]) @ np.abs(query) + np.abs(shared) @ np.abs(turned_query)
                # carried into the latent, the query meets latents whose products are larger than the keys'
                carried = np.abs(rows_of[:seen, :latent]) @ (np.abs(w_uk[h]).T @ np.abs(query))
                slack = key_slack[:seen] @ np.abs(query) + (2 * (latent + key + rotary) + 8) * UNIT * (
                    size_of + carried
                )
                scores = keys[:seen] @ query + shared @ turned_query
                slack_of = value_slack[:seen] + (2 * latent + 8) * UNIT * (
                    np.abs(rows_of[:seen, :latent]) @ np.abs(w_uv[h]).T
                )
                y[t, h], bounds[t, h] = attend(
                    (scale * scores).tolist(), (scale * slack).tolist(), values[:seen], slack_of
                )
                bounds[t, h] += (
                    4
                    * math.expm1(2 * scale * float(slack.max()))
                    * (np.abs(rows_of[:seen, :latent]).max(axis=0) @ np.abs(w_uv[h]).T)
                )
        arrays = {"q": q, "q_rotary": q_rotary, "rows": rows_of, "w_uk": w_uk, "w_uv": w_uv}
        inputs = {part: tensor(array, "float32") for part, array in arrays.items()} | {"first": first, "scale": scale}
        listed.append(
            judged(
                f"latent-{name}",
                "DEC-052 DEC-054",
                "latent",
                flags,
                "Scores (q . W_UK c + q_rotary . k_rotary) * scale; W_UV (P c).",
                seed,
                inputs,
                y=(y, bounds),
            )
        )
    return listed
