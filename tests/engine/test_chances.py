"""Log probabilities of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app import open_model
from edge0_ref.engine.chances import chances
from edge0_ref.engine.session import Asked

LOGITS = st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=9).map(lambda values: np.array(values, np.float32))


@pytest.mark.spec("ENG-094")
@given(logits=LOGITS, data=st.data())
def test_chances_are_log_softmax(logits, data) -> None:
    token = data.draw(st.integers(0, logits.size - 1))
    told = chances(logits, token, logits.size)
    assert told.token_id == token
    assert dict(told.top)[token] == told.log_probability
    # float64 rounds values up to 160 at each of: maximum off, exp, sum, log, difference; 160 * 5 * 2**-52 < 1e-12
    assert np.isclose(sum(np.exp(value) for _, value in told.top), 1, rtol=1e-12, atol=0)
    exact = [value - logits.astype(np.float64)[token] for value in logits.astype(np.float64)]
    assert np.isclose(told.log_probability, -np.log(np.exp(exact).sum()), rtol=1e-12, atol=1e-12)


@pytest.mark.spec("ENG-094")
@given(logits=LOGITS, top=st.integers(0, 9))
def test_the_likeliest_come_first_and_of_equals_the_lower_id(logits, top) -> None:
    order = sorted(range(logits.size), key=lambda token: (-float(logits[token]), token))
    assert [token for token, _ in chances(logits, 0, top).top] == order[:top]


@pytest.mark.spec("ENG-094")
def test_a_text_carries_chances_and_is_the_same_text(unchecked) -> None:
    with open_model(backend="numba") as model:
        plain = model.generate("In the beginning", 6)
        assert [piece.chances for piece in plain] == [None] * 6
        asked = model.generate("In the beginning", 6, asked=Asked(top=2, of_prompt=True))
        told = [piece.chances for piece in asked if piece.token_id is not None]
        assert asked.result.text == plain.result.text
        ids = [*model.token_ids("In the beginning"), *asked.result.token_ids]
        scored = model.generate(ids, 1, asked=Asked(top=2, of_prompt=True))
        list(scored)
    assert [one.token_id for one in told] == list(asked.result.token_ids)
    assert all(one.top[0] == (one.token_id, one.log_probability) for one in told)
    assert [one.token_id for one in scored.prompt_chances] == ids[1:]
