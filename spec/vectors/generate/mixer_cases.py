"""Chapter 9, pieces that remember: delta rule, attention, latent attention; plain float64 with bounds carried along."""

# ruff: noqa: E501 (a case is a row of a table)

import math

import numpy as np
from decoder_pieces import drawn, judged
from oracles import TINY, UNIT, absolute, linear
from values import Json, tensor


def cases() -> list[Json]:
    return [*deltas(), *attentions(), *latents()]


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
