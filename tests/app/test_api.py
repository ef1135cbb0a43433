"""The Python API that commands are made of."""

import threading
from dataclasses import asdict

import numpy as np
import pytest

from edge0_ref.app import backends, open_model
from edge0_ref.app.backends import find_backend, known_backends, notice_of
from edge0_ref.backend import ReferenceBackend
from edge0_ref.errors import BackendError, ReadError, UsageError
from edge0_ref.expert_store import FileExpertStore
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return build(tmp_path_factory.mktemp("model"), RECIPE)


def ids(model, prompt, tokens: int) -> tuple[int, ...]:
    text = model.generate(prompt, tokens)
    list(text)
    return text.result.token_ids


OTHERS = set[threading.Thread]()  # readers that were there before a test


@pytest.fixture(autouse=True)
def readers_before() -> None:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def readers() -> list[str]:
    threads = [thread for thread in threading.enumerate() if thread not in OTHERS]
    return [thread.name for thread in threads if thread.name.startswith("edge0-reader")]


@pytest.mark.spec("ENG-050")
def test_a_closed_model_has_no_threads_and_refuses_texts() -> None:
    with open_model() as model:  # it has heads, so there are reads ahead
        ids(model, [5, 6], 2)
        assert readers()
    assert readers() == []
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.generate([5], 1)
    assert model.counters.reads > 0


@pytest.mark.spec("ENG-050", "ENG-041")
def test_a_text_whose_decoder_is_closed_is_refused_and_keeps_what_it_was(folder) -> None:
    with open_model(folder) as model:
        begun, asked = model.generate([5, 6], 4), model.generate([5, 6], 4)
        next(begun)
        before = {name: value for name, value in asdict(begun.result).items() if name != "peak_bytes"}
        longer = model.generate([5, 6], 40)  # needs more room: another decoder
        for text in (begun, asked):
            with pytest.raises(UsageError, match="a text that needs more room: this one cannot go on"):
                next(text)
        next(longer)
        assert {name: value for name, value in asdict(begun.result).items() if name != "peak_bytes"} == before
    with pytest.raises(UsageError, match="the model is closed"):
        next(longer)


@pytest.mark.spec("ENG-034")
def test_logits_of_a_prompt_are_in_the_plan_that_computes_them(folder) -> None:
    with open_model(folder, context=16) as model:
        ids(model, [5, 6], 3)
        before = model.plan.total
        model.logits([5, 6, 7])
        rows = dict(model.plan.rows)
        assert rows["logits of 3 tokens"] == 2 * 4 * 3 * model.config.vocab_size
        plan = model.plan
        model.logits([5, 6])
        ids(model, [5, 6], 3)
        assert model.plan is plan
        assert before < plan.total


class AsStoredBackend(ReferenceBackend):
    """Says that it widens nothing before it is read."""

    reads_as_stored = True


@pytest.mark.spec("ENG-030")
def test_weights_and_adapters_are_planned_as_the_backend_keeps_them(tmp_path) -> None:
    """Coefficients and adapters have two bytes an element in files: kept in float32, four."""
    folder = build(tmp_path, RECIPE)
    build_adapters(folder / "adapters", RECIPE, [0], {})
    rows = {}
    for backend in ("reference", f"{__name__}:AsStoredBackend"):
        with open_model(folder, backend=backend) as model:
            model.logits([5])
            rows[backend] = dict(model.plan.rows)
    widened, stored = rows.values()
    coefficients = sum(
        info.nbytes
        for name, info in model.checkpoint.tensors.items()
        if name.endswith((".scales", ".biases")) and "switch_mlp" not in name
    )
    assert widened["resident weights"] - stored["resident weights"] == coefficients
    assert stored["adapters"] == model.adapters.nbytes
    assert widened["adapters"] == 3 * model.adapters.nbytes  # what was read, and what is made of it


@pytest.mark.spec("ENG-042", "ENG-050")
def test_a_longer_text_gets_a_larger_plan_and_counters_go_on(folder) -> None:
    with open_model(folder) as model:
        short = ids(model, [5, 6], 3)
        assert model.plan.plan.context == 5
        before = asdict(model.counters)
        assert ids(model, [5, 6], 9)[:3] == short
        assert model.plan.plan.context == 11
        assert all(after >= before[name] for name, after in asdict(model.counters).items())
        assert ids(model, [5, 6], 3) == short
        assert model.plan.plan.context == 11
    assert readers() == []


@pytest.mark.spec("ENG-044")
def test_a_context_that_was_asked_for_is_kept(folder) -> None:
    with open_model(folder, context=6) as model:
        text = model.generate([5, 6], 50)
        list(text)
        assert len(text.result.token_ids) <= 5
        with pytest.raises(UsageError, match="room for 6"):
            model.generate([5] * 7, 1)


@pytest.mark.spec("ENG-033")
def test_a_context_for_all_texts_is_planned_for_a_prompt_that_fills_it(folder) -> None:
    """And yet a short prompt reads its own experts only."""
    long = [5 + number % 90 for number in range(64)]
    with open_model(folder, context=128) as model:
        ids(model, [5], 1)
        assert model.counters.reads < RECIPE.layers * RECIPE.experts
        assert model.plan.plan.prefill_executor == "whole_layer"
        said = ids(model, long, 4)
    with open_model(folder) as model:
        assert ids(model, long, 4) == said


@pytest.mark.spec("ENG-042")
def test_logits_of_a_prompt_are_what_generating_begins_with(folder) -> None:
    with open_model(folder) as model:
        logits = model.logits([5, 6, 7])
        assert logits.shape == (3, RECIPE.vocab)
        first = next(model.generate([5, 6, 7], 1), None)
        assert (first.token_id if first else None) in (int(np.argmax(logits[-1])), None)


@pytest.mark.spec("ENG-042", "BCK-004")
def test_a_disk_that_fails_in_mid_text_is_a_named_error_and_no_end(folder, monkeypatch) -> None:
    with open_model(folder, slots=1, reader_threads=1) as healthy:
        expected = ids(healthy, [5, 6, 7], 8)
        fail_at = healthy.counters.reads - 1  # in the last token, when there is text already
    read_unchecked, reads, broken = FileExpertStore.read_unchecked, iter(range(10**6)), [True]

    def failing(store: FileExpertStore, expert: int, slot: np.ndarray) -> None:
        if next(reads) >= fail_at and broken:
            raise ReadError(f"layer {store.layer} expert {expert}: the disk failed")
        read_unchecked(store, expert, slot)

    monkeypatch.setattr(FileExpertStore, "read_unchecked", failing)
    with open_model(folder, slots=1, reader_threads=1) as model:
        with pytest.raises(ReadError, match="the disk failed"):
            ids(model, [5, 6, 7], 8)
        broken.clear()
        assert ids(model, [5, 6, 7], 8) == expected
    assert readers() == []


@pytest.mark.spec("PRE-011")
def test_notes_of_adapters_reach_the_user(folder, tmp_path) -> None:
    other = Recipe(layers=3, top_k=1)  # only the metadata's K differs
    build_adapters(tmp_path, other, [0], {})
    told = []
    with open_model(folder, adapters=tmp_path, notify=told.append) as model:
        ids(model, [5], 1)
        assert model.plan.plan.top_k == 1
    assert any("K = 1" in text for text in told)


@pytest.mark.parametrize(("backend", "short_of", "warned"), [("reference", 0, 1), ("reference", 1, 0), ("numba", 0, 0)])
def test_who_runs_a_large_model_on_the_reference_hears_of_other_backends(
    folder, monkeypatch, backend, short_of, warned
) -> None:
    """Large is a model of so many bytes; one byte short of it is not."""
    told = []
    with open_model(folder, backend=backend, notify=told.append) as model:
        weight = sum(info.nbytes for info in model.checkpoint.tensors.values())
        monkeypatch.setattr(backends, "LARGE_BYTES", weight + short_of)
        ids(model, [5], 1)
    assert sum("edge0 doctor" in text for text in told) == warned


@pytest.mark.spec("BCK-008")
def test_backends_are_found_by_entry_point_or_by_factory() -> None:
    assert "reference" in known_backends()
    assert isinstance(find_backend("reference"), ReferenceBackend)
    assert isinstance(find_backend("edge0_ref.backend:create"), ReferenceBackend)


class Bare:
    """A newcomer that claims one thing and says nothing."""

    name = "bare"
    claims = frozenset({"dequant"})


@pytest.mark.spec("BCK-008")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("abacus", "known: "),
        ("abacus:create", "abacus"),
        ("edge0_ref.backend:destroy", "destroy"),
        ("os:getcwd", "claims"),
        (f"{__name__}:Bare", "does not claim 'decoder'"),
    ],
)
def test_a_backend_that_cannot_be_had_is_named(name, says) -> None:
    with pytest.raises(BackendError, match=name.split(":")[0]) as error:
        find_backend(name)
    assert says in str(error.value)


@pytest.mark.spec("BCK-011")
def test_a_backend_may_have_nothing_to_say() -> None:
    class Quiet(ReferenceBackend):
        notice = None

    assert notice_of(Quiet()) is None


@pytest.mark.parametrize("wrong", [{"executor": "magic"}, {"read_mode": "osmosis"}, {"slots": 0}, {"context": 0}])
def test_a_wrong_setting_is_refused_when_the_model_is_opened(folder, wrong) -> None:
    with pytest.raises(UsageError):
        open_model(folder, **wrong)
