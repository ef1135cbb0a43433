"""What the page is told is what the decoder did, and while nobody listens nothing is kept of it."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app import open_model
from edge0_ref.app.serve.broadcast import Broadcast
from edge0_ref.app.serve.live_feed import AHEAD, COMING, EMPTY, IDLE, REUSED, WAITED, LiveFeed, SlotPicture
from edge0_ref.app.serve.worker import GoneError
from edge0_ref.engine.prefixes import PrefixBudget
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=3)
STEPS = st.lists(st.tuples(st.sets(st.integers(0, 9), max_size=6), st.integers(0, 2)), max_size=9)


@pytest.mark.spec("ENG-085")
@given(steps=STEPS)
def test_an_expert_keeps_its_column_while_it_is_resident(steps) -> None:
    picture, place = SlotPicture(), dict[int, int]()
    for resident, _ in steps:
        letters, experts = picture.show([], frozenset(resident), 0)
        assert set(experts) == resident
        assert len(letters) - letters.count(EMPTY) == len(resident)
        now = {expert: column for column, expert in enumerate(picture.columns) if expert is not None}
        assert all(now[expert] == column for expert, column in place.items() if expert in now)
        assert len(letters) <= max((len(held) for held, _ in steps), default=0)
        place = now


@pytest.mark.spec("ENG-085")
def test_letters_say_where_an_expert_came_from() -> None:
    picture = SlotPicture()
    assert picture.show([4, 5], frozenset({4, 5, 6}), 1) == (AHEAD + WAITED + COMING, [4, 5, 6])
    assert picture.show([5, 6], frozenset({4, 5, 6}), 0) == (IDLE + REUSED + AHEAD, [4, 5, 6])
    assert picture.show([7, 6], frozenset({7, 6}), 1) == (WAITED + EMPTY + REUSED, [7, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"), RECIPE)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_adapters(tmp_path_factory.mktemp("heads"), RECIPE, [0, 1], {})


def watched(folder: Path, heads: Path | None, listen: bool, reuse: PrefixBudget | None = None):
    """(events, the result of the whole text) of one text after others, of which one was left in its prompt."""

    async def run():
        live, events = Broadcast(), []
        feed = LiveFeed(live)

        def observe(point: str, layer: int, value: object) -> None:
            feed.observe(point, layer, value)
            if left and (point, layer) == ("resident", RECIPE.layers - 1):
                raise GoneError

        left = False
        with open_model(folder, adapters=heads, use_adapters=heads is not None, observe=observe, reuse=reuse) as model:
            feed.attach(lambda: model.counters)
            list(model.generate([5, 6, 7], 5))
            with live.subscribe() as listener:
                if not listen:
                    live._listeners.clear()
                left = True
                feed.begin()
                with pytest.raises(GoneError):
                    list(model.generate([9, 8, 7, 6], 5))
                left = False
                list(model.generate([5, 6, 7], 5))
                await asyncio.sleep(0)
                while not listener._events.empty():
                    listener._events.get_nowait()
                feed.begin()
                text = model.generate([5, 6, 7], 9)
                for _ in text:
                    feed.watch(text.result)
                    await asyncio.sleep(0)  # what was sent arrives
                    while not listener._events.empty():
                        events.append(listener._events.get_nowait())
        return events, text.result, feed

    return asyncio.run(run())


@pytest.mark.spec("ENG-085")
@pytest.mark.parametrize("predicted", [False, True], ids=["no heads", "heads"])
def test_letters_and_figures_add_up_to_the_counters(folder, heads, predicted) -> None:
    events, result, _ = watched(folder, heads if predicted else None, listen=True)
    prompt, tokens = [e for e in events if "prompt" in e], [e for e in events if "token" in e]
    assert [(event["prompt"], event["layer"]) for event in prompt] == [(3, layer) for layer in range(RECIPE.layers)]
    assert [event["token"] for event in tokens] == [*range(1, len(result.token_ids) + 1)]
    assert sum(event["bytes"] for event in tokens) == result.bytes_read
    for event in tokens[1:]:
        assert [layer for layer, *_ in event["layers"]] == [*range(RECIPE.layers)]
        letters = Counter("".join(letters for _, letters, *_ in event["layers"]))
        counted = (event["reused"], event["read_ahead"], event["on_demand"])
        assert (letters[REUSED], letters[AHEAD], letters[WAITED]) == counted
    assert (sum(event["read_ahead"] for event in tokens) > 0) == predicted


@pytest.mark.spec("ENG-085")
def test_a_prompt_that_is_kept_needs_no_expert_and_draws_none(folder, heads) -> None:
    events, result, _ = watched(folder, heads, listen=True, reuse=PrefixBudget(2**24))
    first = events[0]
    assert result.cached_tokens == 3
    assert (first["token"], first["layers"]) == (1, [])
    assert (first["reused"], first["read_ahead"], first["on_demand"]) == (0, 0, 0)


@pytest.mark.spec("ENG-085")
def test_nothing_is_kept_or_sent_while_nobody_listens(folder, heads) -> None:
    events, _, feed = watched(folder, heads, listen=False)
    assert events == []
    assert (feed._layers, feed._pictures) == ([], {})
