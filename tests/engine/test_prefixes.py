"""Prefixes kept from text to text: never another text, never more room than there is, never another model's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app import open_model
from edge0_ref.app.reuse import FOLDER, choose_reuse, owner_of
from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import Decoder
from edge0_ref.engine.prefix_files import Owner, list_files
from edge0_ref.engine.prefixes import WORTH_KEEPING, PrefixBudget
from edge0_ref.engine.session import Asked
from edge0_ref.errors import UsageError
from tests.ref.builders import Recipe, build, build_adapters
from tests.ref.ling import DATA

RECIPE = Recipe(layers=3)
ROOM = PrefixBudget(2**24)
STATE = 22_000  # bytes: about one state of the recipe's model, below 64 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"), RECIPE)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_adapters(tmp_path_factory.mktemp("heads"), RECIPE, [0, 1], {})


def opened(folder: Path, heads: Path | None = None, **options):
    return open_model(folder, adapters=heads, use_adapters=heads is not None, context=400, **options)


def told(model, prompt: list[int], turn: int | None = None, tokens: int = 3):
    """All that a text says, each token with how likely it was, to the last bit; and how much of its prompt was kept."""
    text = model.generate(prompt, tokens, asked=Asked(top=2), turn=turn)
    return list(text), text.result.cached_tokens


class Cold:
    """The same texts without anything kept."""

    def __init__(self, model) -> None:
        self.model = model

    def __call__(self, *arguments, **options):
        return told(self.model, *arguments, **options)[0]


@pytest.fixture(scope="module", params=[False, True], ids=["no heads", "heads"])
def adapters(request, heads) -> Path | None:
    return heads if request.param else None


@pytest.fixture(scope="module")
def cold(folder, adapters) -> Iterator[Cold]:
    with opened(folder, adapters) as model:
        yield Cold(model)


PARTS = st.lists(st.lists(st.integers(1, 95), min_size=1, max_size=7), min_size=1, max_size=3)


@pytest.mark.spec("ENG-080", "ENG-082")
@given(
    parts=PARTS,
    plan=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=6),
    data=st.data(),
)
@pytest.mark.usefixtures("unchecked")
def test_kept_prefixes_change_no_bit_of_any_text(folder, adapters, cold, tmp_path_factory, parts, plan, data) -> None:
    """Conversations that go on with their own answers, part from each other, come back, and fall out of memory."""
    budget = PrefixBudget(
        data.draw(st.sampled_from([0, STATE, 3 * STATE, 2**24])),
        data.draw(st.sampled_from([0, STATE, 2**20])),
        tmp_path_factory.mktemp("kept"),
    )
    texts: list[list[int]] = [[5]]
    with opened(folder, adapters, reuse=budget) as model:
        for which, cut, again in plan:
            base = texts[which % len(texts)]
            prompt = [*base[: max(1, len(base) - cut)], *(parts[which % len(parts)] if not again else [])]
            turn = data.draw(st.integers(1, len(prompt))) if again else None
            pieces, _ = told(model, prompt, turn)
            assert pieces == cold(prompt)
            texts.append([*prompt, *(piece.token_id for piece in pieces if piece.token_id is not None)])
            assert model.prefixes.memory_bytes <= budget.memory
            assert sum(file.nbytes for file in list_files(budget.folder)) <= budget.disk


@pytest.mark.spec("ENG-080")
def test_the_longest_prefix_that_is_kept_is_not_computed_again(folder, adapters, cold) -> None:
    with opened(folder, adapters, reuse=ROOM) as model:
        first, second = [5, 6, 7, 8], [5, 6, 7, 8, 9, 10]
        assert told(model, first) == (cold(first), 0)
        assert told(model, second) == (cold(second), 4)
        assert told(model, [*second, 11]) == (cold([*second, 11]), 6)
        assert told(model, second) == (cold(second), 6)
        assert told(model, [5, 6]) == (cold([5, 6]), 0)


@pytest.mark.spec("ENG-080")
def test_a_turn_that_ends_before_the_prompt_is_where_the_next_one_goes_on(folder, adapters, cold) -> None:
    with opened(folder, adapters, reuse=ROOM) as model:
        told(model, [5, 6, 7, 90, 91], turn=3)
        assert told(model, [5, 6, 7, 90, 92], turn=3) == (cold([5, 6, 7, 90, 92]), 3)


@pytest.mark.spec("ENG-080")
def test_an_answer_is_computed_again_only_where_it_consumed_predictions(folder, heads, adapters) -> None:
    with opened(folder, adapters, reuse=ROOM) as model:
        pieces, _ = told(model, [5, 6, 7])
        answer = [piece.token_id for piece in pieces]
        _, cached = told(model, [5, 6, 7, *answer, 8])
        assert cached == (3 if adapters else 5)  # the last token of an answer was never computed


@pytest.mark.spec("ENG-080")
def test_a_text_that_ends_after_another_has_begun_keeps_nothing_of_it(folder, adapters, cold) -> None:
    with opened(folder, adapters, reuse=ROOM) as model:
        first = model.generate([5, 6, 7], 2)
        answer = [next(first).token_id, next(first).token_id]
        second = model.generate([8, 9], 3)
        next(second)
        assert list(first) == []
        list(second)
        for prompt in ([5, 6, 7, *answer], [8, 9, 5], [5, 6, 7, answer[0], 8]):
            assert told(model, prompt)[0] == cold(prompt)


@pytest.mark.spec("ENG-080")
def test_where_two_long_prompts_part_the_third_goes_on(folder, adapters, cold) -> None:
    system = [1 + i % 90 for i in range(WORTH_KEEPING)]
    with opened(folder, adapters, reuse=ROOM) as model:
        assert [told(model, [*system, *rest], tokens=1)[1] for rest in ([7, 8], [9], [11])] == [0, 0, len(system)]


@pytest.mark.spec("ENG-080", "ENG-081")
@pytest.mark.parametrize("name", ["built", "ling_mlx4_bf16", "ling_edge0"])
def test_a_state_that_was_arrays_is_the_same_state(folder, heads, name) -> None:
    """Predictions that wait to be consumed are part of it; another decoder takes it."""
    of = {"built": (folder, heads)}.get(name, (DATA / name, None))
    with opened(*of) as model, opened(*of) as other:
        told(model, [*range(1, 61)], tokens=3)
        told(other, [8], tokens=1)
        here, there = model._session.decoder, other._session.decoder
        arrays = here.arrays_of(here.snapshot())
        there.restore(there.state_of(arrays))
        assert there.position == here.position
        assert bool(there.state.predicted) == (name == "built")
        for token in range(5, 11):  # beyond 64, where caches grow
            np.testing.assert_array_equal(there.step(token), here.step(token))


@pytest.mark.spec("ENG-081")
def test_what_is_kept_on_the_disk_outlives_the_model(folder, adapters, cold, tmp_path) -> None:
    budget = PrefixBudget(2**20, 2**20, tmp_path / "kept")
    with opened(folder, adapters, reuse=budget) as model:
        told(model, [5, 6, 7])
    assert {path.stat().st_mode & 0o777 for path in budget.folder.iterdir()} == {0o600}
    assert budget.folder.stat().st_mode & 0o777 == 0o700
    with opened(folder, adapters, reuse=budget) as model:
        assert told(model, [5, 6, 7, 8]) == (cold([5, 6, 7, 8]), 3)


def owner(model) -> Owner:
    return owner_of(model.checkpoint, model.adapters, model.backend, 2)


@pytest.mark.spec("ENG-081")
def test_another_model_or_adapter_has_another_fingerprint(folder, heads, tmp_path) -> None:
    second = build(tmp_path / "second", replace(RECIPE, seed=1))
    scaled = build_adapters(tmp_path / "scaled", RECIPE, [0], {})
    models = [opened(folder), opened(folder, heads), opened(folder, scaled), opened(second)]
    assert len({owner(model).key for model in models}) == len(models)
    assert owner(opened(folder)) == owner(models[0])


@pytest.mark.spec("ENG-081")
def test_a_text_over_a_damaged_file_is_computed(folder, adapters, cold, tmp_path) -> None:
    budget, notes = PrefixBudget(2**20, 2**20, tmp_path / "kept"), []
    with opened(folder, adapters, reuse=budget) as model:
        told(model, [5, 6, 7], tokens=1)
    for file in budget.folder.iterdir():
        whole = file.read_bytes()
        half = len(whole) // 2
        file.write_bytes(whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :])
    with opened(folder, adapters, reuse=budget, notify=notes.append) as model:
        assert told(model, [5, 6, 7, 8]) == (cold([5, 6, 7, 8]), 0)
    assert any("not those that were written" in note for note in notes)


@pytest.mark.spec("ENG-082")
def test_the_budget_of_memory_is_a_row_of_the_plan_and_covers_what_is_kept(folder, adapters) -> None:
    with opened(folder, adapters, reuse=ROOM) as model, opened(folder, adapters) as without:
        for tokens in (3, 70, 200):
            told(model, [1 + i % 90 for i in range(tokens)], tokens=1)
        told(without, [5], tokens=1)
        assert dict(model.plan.rows)["kept prefixes"] == ROOM.memory
        assert model.plan.plan == without.plan.plan
        for kept in model.prefixes._kept.values():
            mixers = sum(
                part.nbytes for mixer in kept.state.mixers for part in vars(mixer).values() if hasattr(part, "nbytes")
            )
            assert mixers + kept.logits.nbytes <= kept.nbytes


@pytest.mark.spec("ENG-082")
def test_a_state_beyond_the_budget_is_not_kept_and_that_is_said_once(folder, adapters, cold) -> None:
    notes = []
    with opened(folder, adapters, reuse=PrefixBudget(100), notify=notes.append) as model:
        assert [told(model, [5, 6, 7]) for _ in range(2)] == [(cold([5, 6, 7]), 0)] * 2
    assert len(notes) == 1
    assert "more than the 100 B" in notes[0]


@pytest.mark.spec("ENG-082")
def test_the_least_recently_used_leaves_memory_first_and_then_the_disk(folder, adapters, tmp_path) -> None:
    budget = PrefixBudget(2 * STATE, 10 * STATE, tmp_path)
    with opened(folder, adapters, reuse=budget) as model:
        for first in (5, 6, 5, 7):
            told(model, [first, first], tokens=1)
        in_memory = [kept.ids[0] for kept in model.prefixes._kept.values() if kept.state is not None]
        assert in_memory[-1] == 7
        assert told(model, [6, 6, 6], tokens=1)[1] == 2  # from the disk
        assert model.prefixes.memory_bytes <= budget.memory


@pytest.mark.spec("ENG-082")
def test_what_is_used_again_and_again_outlives_on_the_disk_what_is_used_once(folder, adapters, tmp_path) -> None:
    """Also if it was read from the disk once, at the beginning, and used in memory from then on."""
    budget = PrefixBudget(3 * STATE, 3 * STATE, tmp_path)
    with opened(folder, adapters, reuse=budget) as model:
        told(model, [5, 6], tokens=1)
    with opened(folder, adapters, reuse=budget) as model:
        for once in range(10, 20):
            told(model, [once, once], tokens=1)
            assert told(model, [5, 6], tokens=1)[1] == 2
    with opened(folder, adapters, reuse=budget) as model:
        assert told(model, [5, 6], tokens=1)[1] == 2


@pytest.mark.spec("ENG-082")
def test_what_has_left_the_disk_too_takes_no_memory(folder, adapters, tmp_path) -> None:
    budget = PrefixBudget(2 * STATE, 3 * STATE, tmp_path)
    with opened(folder, adapters, reuse=budget) as model:
        for first in range(20):
            told(model, [first, first], tokens=1)
        on_the_disk = {kept.path for kept in model.prefixes._kept.values() if kept.state is None}
        assert on_the_disk <= {*tmp_path.iterdir()}


@pytest.mark.spec("ENG-082")
def test_a_folder_that_cannot_be_written_ends_writing_and_no_text(folder, adapters, cold, tmp_path) -> None:
    (tmp_path / "kept").write_text("in the way")
    notes = []
    with opened(
        folder, adapters, reuse=PrefixBudget(2 * STATE, 2**20, tmp_path / "kept"), notify=notes.append
    ) as model:
        for first in (5, 6, 7, 8):
            assert told(model, [first, 9], tokens=1)[0] == cold([first, 9], tokens=1)
    assert len(notes) == 1
    assert "no longer written" in notes[0]


class Narrow:
    """A decoder with what the contract asks for and no more."""

    def __init__(self, decoder: Decoder) -> None:
        for name in ("prefill", "step", "reset", "snapshot", "restore", "close", "counters", "all_logits"):
            setattr(self, name, getattr(decoder, name))
        self._decoder = decoder

    @property
    def position(self) -> int:
        return self._decoder.position


class NarrowBackend(ReferenceBackend):
    def decoder(self, *given: object) -> Decoder:
        return Narrow(super().decoder(*given))


@pytest.mark.spec("ENG-080")
def test_states_that_cannot_be_written_are_kept_in_memory_and_that_is_said(folder, adapters, cold, tmp_path) -> None:
    notes, budget = [], PrefixBudget(2**20, 2**20, tmp_path)
    with opened(folder, adapters, reuse=budget, notify=notes.append, backend=f"{__name__}:NarrowBackend") as model:
        told(model, [5, 6])
        assert told(model, [5, 6, 7]) == (cold([5, 6, 7]), 2)
    assert [*tmp_path.iterdir()] == []
    assert any("memory only" in note for note in notes)


@pytest.mark.spec("ENG-082")
def test_room_is_an_eighth_of_a_memory_budget_unless_another_is_asked_for(tmp_path) -> None:
    assert choose_reuse(None, None, "2GiB", tmp_path) == PrefixBudget(2**29, 2**31, tmp_path / FOLDER)
    assert choose_reuse("800MiB", None, "0", None) == PrefixBudget(100 * 2**20)
    assert choose_reuse("800MiB", "1MiB", "0", None) == PrefixBudget(2**20)
    assert choose_reuse("800MiB", "0", "2GiB", tmp_path) is None


@pytest.mark.parametrize("wrong", [{"memory": -1}, {"memory": 1, "disk": -1}])
def test_a_negative_budget_is_refused(wrong) -> None:
    with pytest.raises(UsageError):
        PrefixBudget(**wrong)
