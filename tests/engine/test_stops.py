"""Stop strings, whatever pieces the text comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.engine.stops import StopStrings

# two letters: overlaps, repeats and stops inside stops are the rule
TEXTS = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def expected_text(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read on letter by letter until the text ends in a stop string; the longest of those that do."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@pytest.mark.spec("ENG-020")
@given(TEXTS, STOPS)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(pieces, stops) -> None:
    filter = StopStrings(stops)
    passed = "".join([filter.push(piece) for piece in pieces])
    hit = filter.hit
    assert (passed + filter.finish(), hit) == expected_text("".join(pieces), stops)


@pytest.mark.spec("ENG-020")
@given(TEXTS, STOPS)
def test_text_is_held_back_exactly_while_it_may_begin_a_stop_string(pieces, stops) -> None:
    filter, text, passed = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        passed += filter.push(piece)
        if filter.hit:
            break
        held = text[len(passed) :]
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        assert text.startswith(passed)
        assert held == max((text[i:] for i in range(len(text)) if text[i:] in beginnings), key=len, default="")


@pytest.mark.spec("ENG-020")
@given(TEXTS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_passed_on_after_a_stop_string(pieces, stops) -> None:
    filter = StopStrings(stops)
    filter.push(stops[0])
    assert filter.hit
    assert [filter.push(piece) for piece in pieces] == [""] * len(pieces)
    assert filter.finish() == ""
