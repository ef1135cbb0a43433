"""Chapter 10: one sampled token a case, worked out by hand; and the draw stream from Philox's own definition."""

# ruff: noqa: E501 (a case is a row of a table)

import math
import random
from typing import Any

from values import Json, case, error, tensor


def cases() -> list[Json]:
    return [*greedy(), *penalties(), *kept(), *drawn(), *whole(), *refused(), *streams()]


def sampled(
    name: str,
    ids: str,
    flags: str,
    comment: str,
    logits: list[float],
    settings: Json,
    token: int | None,
    draw: float = 0.0,
    prompt: tuple[int, ...] = (),
    generated: tuple[int, ...] = (),
    **result: Any,
) -> Json:
    inputs = {
        "logits": tensor(logits, "float32"),
        "settings": settings,
        "prompt": tensor(prompt, "int64", (len(prompt),)),
        "generated": tensor(generated, "int64", (len(generated),)),
        "draw": draw,
    }
    result = result or {"expected": {"token": token}}
    return case(f"sampling/{name}", ids, "sample", flags, comment, "hand", inputs, **result)


def greedy() -> list[Json]:
    return [
        sampled("greedy", "ENG-012", "argmin", "The largest logit.", [0.0, 3.0, 1.0], {}, 1),
        sampled("greedy-tie", "ENG-012", "ties-to-higher-id", "Equal logits: the lower id.", [0.0, 3.0, 3.0], {}, 1),
        sampled("greedy-ignores-draw", "ENG-012", "draw-used", "Temperature 0 whatever the draw.", [2.0, 1.9],
                {"temperature": 0.0}, 0, 0.999),
        sampled("greedy-penalised", "ENG-012 ENG-013", "penalties-skipped-when-greedy", "Penalties come before the choice.",
                [4.0, 3.0], {"repetition_penalty": 2.0}, 1, prompt=(0,)),
    ]  # fmt: skip


def penalties() -> list[Json]:
    rows = [
        ("repetition-positive", "divided-never", "4 / 2 < 3.", [4.0, 3.0, 0.0], {"repetition_penalty": 2.0}, 1, (), (0,)),
        ("repetition-negative", "negative-divided", "-1 * 2 < -1.5: a negative logit is multiplied.", [-1.0, -1.5],
         {"repetition_penalty": 2.0}, 1, (0,), ()),
        ("repetition-prompt", "prompt-ignored", "Tokens of the prompt count.", [4.0, 3.0], {"repetition_penalty": 2.0}, 1, (0,), ()),
        ("repetition-once", "per-occurrence", "However often it was seen: 4 / 1.25 > 3.", [4.0, 3.0],
         {"repetition_penalty": 1.25}, 0, (0, 0), (0,)),
        ("presence", "presence-per-occurrence", "Once: 4 - 0.75 > 3.", [4.0, 3.0], {"presence_penalty": 0.75}, 0, (), (0, 0, 0)),
        ("presence-prompt", "prompt-counted", "The prompt does not count.", [4.0, 3.0], {"presence_penalty": 2.0}, 0, (0,), ()),
        ("frequency", "frequency-once", "Each occurrence: 4 - 3 * 0.5 < 3.", [4.0, 3.0], {"frequency_penalty": 0.5}, 1, (), (0, 0, 0)),
        ("frequency-prompt", "prompt-counted", "The prompt does not count.", [4.0, 3.0], {"frequency_penalty": 0.5}, 0, (0, 0, 0), ()),
        ("negative-presence", "sign-of-penalty", "A negative penalty rewards.", [2.5, 3.0], {"presence_penalty": -1.0}, 0, (), (0,)),
        ("all-three", "order-of-penalties", "6 / 2 - 0.5 - 2 * 0.25 = 2 < 2.25; subtracting first gives 2.5.",
         [6.0, 2.25], {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}, 1, (), (0, 0)),
    ]  # fmt: skip
    return [
        sampled(name, "ENG-013", flags, comment, logits, settings, token, prompt=prompt, generated=generated)
        for name, flags, comment, logits, settings, token, prompt, generated in rows
    ]


def kept() -> list[Json]:
    """Logits are logarithms of small whole numbers, so that shares are known; draws stay clear of every edge."""
    # ruff: noqa: E501 (a case is a row of a table)
    shares = [math.log(5), math.log(3), math.log(2)]
    last = 0.999
    rows = [
        ("top-k", "ENG-014", "top-k-ignored", "The best 2 of 4.", [1.0, 0.0, 2.0, -1.0], {"top_k": 2}, 0, last),
        ("top-k-tie", "ENG-014", "ties-to-higher-id ties-all-kept", "Of equals the lower id is kept.", [1.0, 0.0, 0.0], {"top_k": 2}, 1, last),
        ("top-k-off", "ENG-014", "zero-keeps-none", "0 is off.", [0.0, 0.0, 0.0], {"top_k": 0}, 2, last),
        ("top-k-above", "ENG-014", "top-k-above-vocabulary", "More than there are.", [0.0, 0.0], {"top_k": 9}, 1, last),
        ("top-p-crosses", "ENG-016", "crossing-token-dropped", "5/10 is short of 0.6: the token that crosses stays.", shares, {"top_p": 0.6}, 1, last),
        ("top-p-enough", "ENG-016", "one-too-many", "5/10 is enough for 0.45.", shares, {"top_p": 0.45}, 0, last),
        ("top-p-small", "ENG-016", "nothing-kept", "The best token is always kept.", shares, {"top_p": 1e-9}, 0, last),
        ("top-p-one", "ENG-016", "tail-dropped", "1 is off.", shares, {"top_p": 1.0}, 2, last),
        ("top-p-after-top-k", "ENG-012 ENG-016", "top-p-before-top-k", "Of the two left by top-k the first has 5/8, enough for 0.6.",
         shares, {"top_k": 2, "top_p": 0.6}, 0, last),
        ("top-p-after-temperature", "ENG-012 ENG-016", "temperature-last", "At temperature 0.5 the first has 25/38, enough for 0.6.",
         shares, {"temperature": 0.5, "top_p": 0.6}, 0, last),
        ("min-p", "ENG-017", "min-p-absolute", "3/10 passes 0.5 * 5/10, 2/10 does not.", shares, {"min_p": 0.5}, 1, last),
        ("min-p-one", "ENG-017", "equals-dropped", "1 keeps the largest and its equals.", [2.0, 2.0, 1.0], {"min_p": 1.0}, 1, last),
        ("min-p-off", "ENG-017", "tail-dropped", "0 is off.", shares, {"min_p": 0.0}, 2, last),
    ]  # fmt: skip
    return [
        sampled(name, ids, flags, comment, logits, {"temperature": 1.0, **settings}, token, draw)
        for name, ids, flags, comment, logits, settings, token, draw in rows
    ]


def drawn() -> list[Json]:
    shares = [math.log(2), math.log(5), math.log(3)]  # ranked: 1, 2, 0
    rows = [
        ("first", "ENG-018", "ranking-ignored", "Below 5/10: the most likely, id 1.", shares, 1.0, 1, 0.49),
        ("second", "ENG-018", "ranking-ignored", "Between 5/10 and 8/10: id 2.", shares, 1.0, 2, 0.51),
        ("third", "ENG-018", "ranking-ignored", "Above 8/10: id 0.", shares, 1.0, 0, 0.81),
        ("zero", "ENG-018", "strict-at-zero", "A draw of 0 takes the first.", shares, 1.0, 1, 0.0),
        ("edge", "ENG-018", "half-open", "At exactly half of two equals: the second, for the sum must exceed it.", [0.0, 0.0], 1.0, 1, 0.5),
        ("cold", "ENG-015", "temperature-multiplies", "1 / 0.01 = 100 apart: always the first.", [0.0, 1.0], 0.01, 1, 0.9999),
        ("hot", "ENG-015", "temperature-ignored", "1 / 100 apart: nearly even, the second above 0.51.", [0.0, 1.0], 100.0, 0, 0.51),
        ("smallest-temperature", "ENG-015", "division-overflows", "Dividing 300 by 1e-300 overflows; the difference first is 0.",
         [300.0, 300.0, -300.0], 1e-300, 1, 0.75),
        ("large-logits", "ENG-015", "no-max-subtraction", "exp(1000) overflows.", [1000.0, 1000.0], 1.0, 1, 0.75),
        ("weight-zero", "ENG-018", "zero-weight-drawn", "A weight that rounds to 0 is never drawn.", [0.0, -1000.0], 1.0, 0, 0.9999999999999999),
    ]  # fmt: skip
    return [
        sampled(f"draw-{name}", ids, flags, comment, logits, {"temperature": temperature}, token, draw)
        for name, ids, flags, comment, logits, temperature, token, draw in rows
    ]


def chosen(logits: list[float], settings: Json, prompt: list[int], text: list[int], draw: float) -> tuple[int, float]:
    """A token by all steps in order, and how far the draw was from choosing another one."""
    scores = list(logits)
    for token in {*prompt, *text}:
        penalty = settings["repetition_penalty"]
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(text):
        scores[token] -= settings["presence_penalty"] + text.count(token) * settings["frequency_penalty"]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[: settings["top_k"] or None]
    weights = [math.exp((scores[token] - scores[order[0]]) / settings["temperature"]) for token in order]
    front, mass = 0, 0.0
    while mass < settings["top_p"] * math.fsum(weights):
        mass += weights[front]
        front += 1
    near = min(abs(mass - settings["top_p"] * math.fsum(weights)), *(abs(w - settings["min_p"]) for w in weights))
    weights = [weight for weight in weights[:front] if weight >= settings["min_p"]]
    target, place, mass = draw * math.fsum(weights), 0, weights[0]
    while mass <= target:
        place += 1
        mass += weights[place]
    return order[place], min(near, abs(mass - target), abs(mass - weights[place] - target) if place else 1.0)


def whole() -> list[Json]:
    """Every step at once, on drawn logits; draws that rounding could turn round are passed over."""
    listed, seed = [], 1000
    while len(listed) < 24:
        seed += 1
        rng = random.Random(seed)
        logits = [rng.randint(-24, 24) / 8 for _ in range(12)]
        settings = {
            "temperature": rng.choice([0.5, 1.0, 1.5]), "top_k": rng.choice([0, 3, 8, 20]), "top_p": rng.choice([0.3, 0.8, 0.95]),
            "min_p": rng.choice([0.0, 0.05, 0.3]), "repetition_penalty": rng.choice([1.0, 1.25, 0.8]),
            "presence_penalty": rng.choice([0.0, 0.5, -0.25]), "frequency_penalty": rng.choice([0.0, 0.25]),
        }  # fmt: skip
        prompt, text = ([rng.randrange(12) for _ in range(rng.randrange(5))] for _ in range(2))
        draw = rng.random()
        token, margin = chosen(logits, settings, prompt, text, draw)
        if margin < 1e-4:
            continue
        made = sampled(
            f"whole-{seed}",
            "ENG-012 ENG-013 ENG-014 ENG-016 ENG-017 ENG-018",
            "order-of-steps",
            "All steps, in their order.",
            logits,
            settings,
            token,
            draw,
            tuple(prompt),
            tuple(text),
        )
        listed.append(made | {"source": f"float64 oracle, seed {seed}"})
    return listed


def refused() -> list[Json]:
    settings = [
        ("temperature", -0.5), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0.0), ("presence_penalty", 1000.0), ("frequency_penalty", -1000.0), ("seed", -1),
    ]  # fmt: skip
    listed = [
        sampled(f"refuses-{name.replace('_', '-')}-{number}", "ENG-010", "unchecked-settings", f"{name} = {value}.",
                [0.0, 1.0], {name: value}, None, error=error("UsageError", name))
        for number, (name, value) in enumerate(settings)
    ]  # fmt: skip
    for name, value in (("nan", math.nan), ("infinity", math.inf), ("minus-infinity", -math.inf)):
        listed.append(
            sampled(
                f"refuses-{name}",
                "ENG-012 NUM-009",
                "silent-garbage",
                "No token can be chosen.",
                [0.0, value],
                {},
                None,
                error=error("NonFiniteError"),
            )
        )
    return listed


WORD = 2**64


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 (Salmon et al., SC 2011): ten rounds of two multiplications, the key stepping by two constants."""
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (high // WORD) ^ counter[1] ^ key[0],
            high % WORD,
            (low // WORD) ^ counter[3] ^ key[1],
            low % WORD,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) % WORD, (key[1] + 0xBB67AE8584CAA73B) % WORD]
    return counter


def doubles(seed: int, count: int) -> list[float]:
    """Blocks of counters 1, 2, ...; the upper 53 bits of each word, over 2**53."""
    words = [word for block in range(1, count // 4 + 2) for word in philox([block, 0, 0, 0], [seed, 0])]
    return [(word >> 11) / 2.0**53 for word in words[:count]]


def streams() -> list[Json]:
    return [
        case(f"sampling/draws-{seed}", "ENG-011", "draws", "other-generator counter-from-zero 24-bit-doubles",
             "Philox4x64-10, key = seed, counters from 1, 53 bits each.", "float64 oracle",
             {"seed": seed, "count": 6}, expected={"draws": tensor(doubles(seed, 6), "float64")})
        for seed in (0, 7, 2**63 + 1)
    ]  # fmt: skip
