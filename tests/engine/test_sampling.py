"""From logits to a token: every step against plain Python, and the random numbers against the published generator."""

import math
import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.engine.sampling import (
    DrawStream,
    SamplingSettings,
    draw_index,
    keep_min_p,
    keep_top_p,
    penalize,
    rank,
    relative_weights,
    sample,
)
from edge0_ref.errors import NonFiniteError, UsageError

VOCAB = 12
SEEDS = st.integers(0, 2**64 - 1)
# few distinct values, so that ties are the rule; halves are exact in float32
LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB)
HISTORY = st.lists(st.integers(0, VOCAB - 1), max_size=10)
WEIGHTS = st.lists(st.floats(0, 1, width=32), max_size=20).map(lambda rest: np.array([1.0, *sorted(rest)[::-1]]))
SETTINGS = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.4]),
)


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def expected_token(
    logits: list[float], settings: SamplingSettings, prompt: list[int], generated: list[int], draw: float
) -> int:
    """The whole order in plain Python."""
    scores = []
    for token, score in enumerate(logits):
        if token in prompt or token in generated:
            score = score / settings.repetition_penalty if score > 0 else score * settings.repetition_penalty
        count = generated.count(token)
        if count:
            score -= settings.presence_penalty + settings.frequency_penalty * count
        scores.append(score)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if settings.temperature == 0:
        return order[0]
    order = order[: settings.top_k or None]
    weights = [float32(math.exp((scores[token] - scores[order[0]]) / settings.temperature)) for token in order]
    kept, mass = 0, 0.0
    while mass < settings.top_p * sum(weights) and kept < len(weights):
        mass += weights[kept]
        kept += 1
    if settings.top_p == 1:
        kept = len(weights)
    weights = [weight for weight in weights[:kept] if weight >= settings.min_p]
    place, mass = 0, weights[0]
    while not mass > draw * sum(weights):
        place += 1
        mass += weights[place]
    return order[place]


@pytest.mark.spec("ENG-010")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_setting_outside_its_range_is_refused_by_name(name, value) -> None:
    with pytest.raises(UsageError, match=name):
        replace(SamplingSettings(), **{name: value})


@pytest.mark.spec("ENG-010")
def test_a_top_k_that_no_float_can_hold_keeps_every_token() -> None:
    scores = np.array([1.0, 3.0, 2.0])
    assert rank(scores, SamplingSettings(top_k=10**400).top_k).tolist() == [1, 2, 0]


@pytest.mark.spec("ENG-011")
@given(SEEDS)
def test_draws_are_those_of_philox(seed) -> None:
    draws = DrawStream(seed)
    assert [draws.next() for _ in range(9)] == [double for block in range(1, 4) for double in philox(block, seed)][:9]


def philox(counter: int, key: int) -> list[float]:
    """One block of Philox4x64-10 (Salmon et al. 2011): four doubles; the counter's first block is 1."""
    mask = 2**64 - 1
    block, keys = [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * block[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * block[2], 2**64)
        block = [high1 ^ block[1] ^ keys[0], low1, high0 ^ block[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return [(word >> 11) * 2.0**-53 for word in block]


@pytest.mark.spec("ENG-011")
@given(SEEDS, LOGITS)
def test_a_token_takes_one_draw_and_a_greedy_one_takes_none(seed, logits) -> None:
    draws, untouched = DrawStream(seed), DrawStream(seed)
    array = np.array(logits, np.float32)
    sample(array, SamplingSettings(temperature=0.0), [], [], draws)
    sample(array, SamplingSettings(temperature=1.0), [], [], draws)
    untouched.next()
    assert draws.next() == untouched.next()


@pytest.mark.spec("ENG-012", "ENG-013", "ENG-014", "ENG-015", "ENG-016", "ENG-017", "ENG-018")
@given(LOGITS, SETTINGS, HISTORY, HISTORY, SEEDS)
def test_a_token_is_chosen_as_plain_python_chooses_it(logits, settings, prompt, generated, seed) -> None:
    token = sample(np.array(logits, np.float32), settings, prompt, generated, DrawStream(seed))
    assert token == expected_token(logits, settings, prompt, generated, DrawStream(seed).next())


@pytest.mark.spec("ENG-012")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_choose_no_token(bad, temperature) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = bad
    with pytest.raises(NonFiniteError):
        sample(logits, SamplingSettings(temperature=temperature), [], [], DrawStream(0))


@pytest.mark.spec("ENG-013")
@given(LOGITS, SETTINGS, HISTORY, HISTORY)
def test_penalties_touch_only_tokens_that_occurred(logits, settings, prompt, generated) -> None:
    scores = np.array(logits)
    penalized = penalize(scores, settings, prompt, generated)
    absent = [token for token in range(VOCAB) if token not in {*prompt, *generated}]
    assert (penalized[absent] == scores[absent]).all()
    assert (scores == logits).all()  # the argument is left alone


@pytest.mark.spec("ENG-014")
@given(LOGITS, st.integers(1, VOCAB + 2))
def test_top_k_is_the_front_of_the_whole_ranking(logits, top_k) -> None:
    scores = np.array(logits)
    whole = rank(scores, 0)
    assert sorted(whole) == list(range(VOCAB))
    assert all((-scores[a], a) < (-scores[b], b) for a, b in pairwise(whole))
    assert (rank(scores, top_k) == whole[:top_k]).all()


@pytest.mark.spec("ENG-015")
@given(LOGITS, st.sampled_from([1e-300, 1e-3, 1.0, 50.0]))
def test_weights_are_float32_start_at_one_and_never_rise(logits, temperature) -> None:
    weights = relative_weights(np.array(sorted(logits, reverse=True)), temperature)
    assert weights[0] == 1
    assert (np.diff(weights) <= 0).all()
    assert (weights == weights.astype(np.float32)).all()


@pytest.mark.spec("ENG-016")
@given(WEIGHTS, st.floats(1e-9, 1, exclude_max=True))
def test_top_p_keeps_the_crossing_token_and_nothing_after_it(weights, top_p) -> None:
    kept = keep_top_p(weights, top_p)
    line = top_p * np.cumsum(weights)[-1]
    assert (kept == weights[: len(kept)]).all()
    assert np.cumsum(kept)[-1] >= line
    assert len(kept) == 1 or np.cumsum(kept)[-2] < line


@pytest.mark.spec("ENG-017")
@given(WEIGHTS, st.floats(0, 1))
def test_min_p_keeps_exactly_the_tokens_likely_enough(weights, min_p) -> None:
    assert keep_min_p(weights, min_p).tolist() == [weight for weight in weights.tolist() if weight >= min_p]


@pytest.mark.spec("ENG-018")
@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_a_draw_falls_into_the_interval_of_its_token(weights, draw) -> None:
    place = draw_index(weights, draw)
    mass = np.cumsum(weights)
    assert (mass[place - 1] if place else 0) <= draw * mass[-1] < mass[place]
    assert weights[place] > 0


@pytest.mark.spec("ENG-018")
def test_the_largest_draw_falls_on_a_token() -> None:
    draw = 1 - 2.0**-53
    for size in range(1, 200):
        weights = np.linspace(1, 0.1, size).astype(np.float32).astype(np.float64)
        assert draw_index(weights, draw) < size


@pytest.mark.spec("ENG-019")
@given(LOGITS, SETTINGS, HISTORY, SEEDS)
def test_a_choice_depends_on_values_alone(logits, settings, history, seed) -> None:
    array = np.array(logits, np.float32)
    strided = np.repeat(array, 2)[::2]
    strided.flags.writeable = False
    seeds = [(seed + more) % 2**64 for more in range(8)]
    first = [sample(array, settings, history, history[::-1], DrawStream(one)) for one in seeds]
    again = [sample(strided, settings, history[::-1], history, DrawStream(one)) for one in reversed(seeds)]
    assert first == again[::-1]
    assert (array == np.array(logits, np.float32)).all()
