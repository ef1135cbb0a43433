"""The decoder's promises: no bit depends on how a prompt was cut, where experts were, or what happened before."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge0_ref.adapters import Adapters, open_adapters
from edge0_ref.backend import ReferenceBackend
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import EXECUTOR_KINDS, Plan, Routing
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.errors import UsageError
from edge0_ref.executors import StagedExecutor
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import Recipe, build, build_adapters
from tests.ref.sound import modes_of

RECIPE = Recipe(layers=3, attention=3, experts=6, vocab=48)
TINY = Recipe(layers=2, hidden=32, inner=32, heads=1, head_dim=32, value_heads=1, vocab=32, experts=4)
FEW = settings(max_examples=max(3, settings.default.max_examples // 2))
TOKENS = st.lists(st.integers(0, 47), min_size=1, max_size=8)
Make = Callable[..., ReferenceDecoder]
pytestmark = pytest.mark.usefixtures("unchecked")


def open_both(folder: Path, recipe: Recipe) -> tuple[Checkpoint, Adapters]:
    """A model, and adapters with a head in every layer that has a consumer and LoRA on every resident linear."""
    checkpoint = open_checkpoint(build(folder / "model", recipe))
    config = checkpoint.config
    targets = {name: shape for name, shape in config.tensors.linears.items() if name != config.embedding}
    adapters = build_adapters(folder / "adapters", recipe, range(recipe.layers - 1), targets)
    return checkpoint, open_adapters(adapters, config)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Adapters]:
    return open_both(tmp_path_factory.mktemp("decoder"), RECIPE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Adapters]:
    return open_both(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture
def make(both: tuple[Checkpoint, Adapters]) -> Iterator[Make]:
    """Decoders over the model and its adapters, closed at the end of the test."""
    made = []

    def make_one(plan: Plan = Plan(top_k=2), adapters: bool = True, observe: Any = None) -> ReferenceDecoder:  # noqa: B008
        made.append(ReferenceBackend().decoder(both[0], plan, both[1] if adapters else None, observe))
        return made[-1]

    yield make_one
    for decoder in made:
        decoder.close()


def generate(decoder: ReferenceDecoder, prompt: list[int], steps: int = 3) -> bytes:
    """All logits of a prompt and of greedy steps after it."""
    decoder.reset()
    rows = [*decoder.all_logits(prompt)]
    for _ in range(steps):
        rows.append(decoder.step(int(rows[-1].argmax())))
    return np.stack(rows).tobytes()


@pytest.mark.spec("DEC-040", "EXE-017", "STO-021")
@FEW
@given(data=st.data(), prompt=TOKENS)
def test_logits_depend_on_no_executor_slot_thread_read_mode_or_chunk(
    make: Make, tmp_path: Path, data: st.DataObject, prompt: list[int]
) -> None:
    modes = modes_of(tmp_path)
    wanted = generate(make(Plan(top_k=2, executor="exact", prefill_executor="exact", reader_threads=0)), prompt)
    for kind in EXECUTOR_KINDS:
        plan = Plan(
            top_k=2,
            executor=kind,
            prefill_executor=data.draw(st.sampled_from(EXECUTOR_KINDS)),
            slots=data.draw(st.integers(1, 7)),
            read_mode=data.draw(st.sampled_from(modes)),
            reader_threads=data.draw(st.integers(0, 3)),
            prefill_chunk=data.draw(st.integers(1, 13)),
        )
        decoder = make(plan)
        assert generate(decoder, prompt) == wanted, plan
        assert decoder.counters.drops == 0
        decoder.close()


@pytest.mark.spec("DEC-040", "PRE-005", "PRE-008", "PRE-020", "PRE-021")
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 2049])
def test_a_prompt_may_be_cut_anywhere(tiny: tuple[Checkpoint, Adapters], length: int) -> None:
    """In chunks of one call or in several calls: the next logits and the steps after them, predictions and all."""
    rng = np.random.default_rng(length)
    prompt, anywhere = rng.integers(0, TINY.vocab, length).tolist(), rng.integers(0, length, 3).tolist()
    results = set()
    for chunk, cuts in ((4096, []), (64, []), (700, [1]), (511, [length - 1]), (4096, anywhere)):
        decoder = ReferenceBackend().decoder(tiny[0], Plan(top_k=2, slots=4, prefill_chunk=chunk), tiny[1])
        for first, last in pairwise(sorted({0, *cuts, length})):
            logits = decoder.prefill(prompt[first:last])
        steps = [logits, decoder.step(int(logits.argmax())), decoder.step(3), decoder.step(3)]
        results.add(np.stack(steps).tobytes())
        assert decoder.position == length + 3
        decoder.close()
    assert len(results) == 1


@pytest.mark.spec("PRE-021", "PRE-024", "PRE-025", "PRE-027", "EXE-014")
@FEW
@given(prompt=TOKENS, steps=st.lists(st.integers(0, 47), min_size=1, max_size=8))
def test_on_every_step_the_staged_set_is_the_routed_set(
    make: Make, monkeypatch: pytest.MonkeyPatch, prompt: list[int], steps: list[int]
) -> None:
    events: list[tuple[str, Any]] = []
    prepare, call = StagedExecutor.prepare, StagedExecutor.__call__

    def note_prepare(self: StagedExecutor, experts: Any) -> None:
        events.append(("staged", (id(self), frozenset(experts))))
        prepare(self, experts)

    def note_call(self: StagedExecutor, x: np.ndarray, routing: Routing) -> np.ndarray:
        before = self.counters.on_demand
        held, y = self.resident, call(self, x, routing)
        events.append(("ran", (id(self), frozenset(routing.distinct()), held, self.counters.on_demand - before)))
        return y

    monkeypatch.setattr(StagedExecutor, "prepare", note_prepare)
    monkeypatch.setattr(StagedExecutor, "__call__", note_call)
    asked = []
    decoder = make(Plan(top_k=2, slots=4), observe=lambda point, layer, value: asked.append((point, layer)))
    decoder.prefill(prompt)
    staged = {key: experts for kind, (key, experts, *_) in events if kind == "staged"}
    assert len(staged) == RECIPE.layers - 1
    for token in steps:
        events.clear()
        asked.clear()
        decoder.step(token)
        assert [layer for point, layer in asked if point == "router_logits"] == [0]
        ran = {value[0]: value[1:] for kind, value in events if kind == "ran"}
        for key, experts in staged.items():
            routed, held, on_demand = ran[key]
            assert routed == experts
            assert routed <= held
            assert on_demand == 0
        kinds = [kind for kind, _ in events]
        assert kinds == ["ran", "staged"] * (RECIPE.layers - 1) + ["ran"]
        staged = {key: experts for kind, (key, experts, *_) in events if kind == "staged"}
    assert decoder.counters.drops == 0


@pytest.mark.spec("PRE-005", "PRE-007", "PRE-022")
def test_predictions_are_of_the_executed_experts_of_two_tokens(make: Make, both: tuple[Checkpoint, Adapters]) -> None:
    """What each head predicted is what its consumer ran one token later; prompt tokens are never so routed."""
    routed: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    predicted: dict[int, list[list[int]]] = {1: [], 2: []}

    def observe(point: str, layer: int, value: Any) -> None:
        if point == "routing":
            routed[layer] += value.experts.tolist()
        if point == "prediction_logits":
            predicted[layer] += np.argsort(-value, axis=-1, kind="stable")[:, :2].tolist()

    decoder = make(observe=observe)
    decoder.prefill([5, 6, 7])
    for token in (8, 9, 10):
        decoder.step(token)
    for layer in (1, 2):
        assert routed[layer][3:] == predicted[layer][2:5]
    decoder.prefill([1, 2])
    after = make(adapters=True, observe=None)
    assert after.position == 0
    assert len(predicted[1]) == len(routed[1]) == 8


@pytest.mark.spec("PRE-023", "LOR-007")
def test_without_adapters_every_layer_asks_its_own_router(make: Make) -> None:
    asked = []
    decoder = make(adapters=False, observe=lambda point, layer, value: asked.append((point, layer)))
    decoder.prefill([1, 2, 3])
    decoder.step(4)
    assert [layer for point, layer in asked if point == "router_logits"] == [0, 1, 2] * 2
    assert "prediction_logits" not in {point for point, _ in asked}


@pytest.mark.spec("DEC-044", "PRE-026")
@FEW
@given(prompt=TOKENS, ahead=TOKENS, after=TOKENS)
def test_a_snapshot_brings_everything_back_and_never_changes(
    make: Make, prompt: list[int], ahead: list[int], after: list[int]
) -> None:
    decoder = make(Plan(top_k=2, slots=4))
    decoder.prefill(prompt)
    saved = decoder.snapshot()
    wanted = [decoder.step(token).tobytes() for token in after]
    for _ in range(2):
        decoder.reset()
        decoder.prefill(ahead)
        decoder.restore(saved)
        assert decoder.position == len(prompt)
        assert [decoder.step(token).tobytes() for token in after] == wanted
    other = make(Plan(top_k=2, slots=2, executor="hot"))
    other.restore(saved)
    assert [other.step(token).tobytes() for token in after] == wanted


@pytest.mark.spec("DEC-046", "DEC-048")
@FEW
@given(first=TOKENS, second=TOKENS)
def test_reset_forgets_everything_and_observing_changes_nothing(
    make: Make, first: list[int], second: list[int]
) -> None:
    used, points = make(observe=lambda *event: points.append(event[0])), []
    generate(used, first)
    assert generate(used, second) == generate(make(), second)
    assert "layer_output" in points


@pytest.mark.spec("DEC-045")
def test_what_cannot_be_decoded_is_refused_before_anything_changes(make: Make) -> None:
    decoder = make(Plan(top_k=2, context=6))
    wanted = decoder.prefill([1, 2, 3])
    saved = decoder.snapshot()
    for tokens, message in (
        ([], "no tokens"),
        ([4, 48], "token id 48 is outside the vocabulary of 48"),
        ([-1], "token id -1 is outside"),
        ([1, 2, 3, 4], "context full: 3 tokens and 4 more, room for 6"),
    ):
        for call in (decoder.prefill, decoder.all_logits):
            with pytest.raises(UsageError, match=message):
                call(tokens)
    with pytest.raises(UsageError, match="token id 99"):
        decoder.step(99)
    assert decoder.position == 3
    want = decoder.step(4)
    decoder.restore(saved)
    np.testing.assert_array_equal(decoder.step(4), want)
    decoder.reset()
    np.testing.assert_array_equal(decoder.prefill([1, 2, 3]), wanted)
