"""[PRE-021] The parallel student is the engine: the same experts at every position, the same logits."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_mlx.train.model import ParallelModel
from edge0_mlx.train.trainer import ScoredModel
from edge0_ref.adapters import Adapters, open_adapters
from edge0_ref.app.backends import find_backend
from edge0_ref.app.locate import embedded_model
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Plan, Routing
from edge0_ref.inventory import open_checkpoint
from edge0_ref.tokens import open_tokenizer
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, attention=2, experts=8, top_k=2)
OWNERS = (1, 2)
TOKENS = 40
LOGITS = 1e-4  # two orders of float32 sums; largest seen 2e-5

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.spec("PRE-021")]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build(tmp_path_factory.mktemp("student"), RECIPE))


@pytest.fixture(scope="module")
def adapters(student: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Heads of two owners, and a LoRA beside every projection."""
    targets = {module: shape for module, shape in student.config.tensors.linears.items() if "_proj" in module}
    return open_adapters(build_adapters(tmp_path_factory.mktemp("adapters"), RECIPE, OWNERS, targets), student.config)


@pytest.fixture(scope="module")
def tokens() -> Array:
    return np.random.default_rng(5).integers(0, RECIPE.vocab, (2, TOKENS))


def stepped(
    checkpoint: Checkpoint, adapters: Adapters, text: Array, prompt: int
) -> tuple[Array, dict[tuple[int, int], list[int]]]:
    """What the engine gives: logits [tokens, vocab] of a prompt and single steps, and (layer, position) -> experts."""
    experts: dict[tuple[int, int], list[int]] = {}

    def observe(point: str, layer: int, value: Any) -> None:
        if point == "routing":
            assert isinstance(value, Routing)
            for row, chosen in enumerate(value.experts.tolist()):
                experts[layer, decoder.position + row] = chosen

    plan = Plan(top_k=checkpoint.config.top_k, slots=2 * checkpoint.config.top_k, context=len(text))
    decoder: Any = find_backend("reference").decoder(checkpoint, plan, adapters, observe)
    try:
        rows = [*decoder.all_logits(text[:prompt].tolist())]
        rows += [decoder.step(int(token)) for token in text[prompt:]]
    finally:
        decoder.close()
    return np.stack(rows), experts


def parallel(checkpoint: Checkpoint, adapters: Adapters, texts: Array, prompt: int) -> tuple[Array, dict[int, Array]]:
    """Logits [batch, tokens, vocab], and layer -> experts [batch, tokens, k]."""
    scored, experts = ScoredModel(ParallelModel(checkpoint), adapters), dict[int, Array]()

    def watch(point: str, layer: int, value: mx.array) -> None:
        if point == "experts":
            experts[layer] = np.array(value)

    logits, _ = scored.model(mx.array(texts), heads=scored.heads, loras=scored.loras, decode_from=prompt, watch=watch)
    return np.array(logits), experts


@pytest.mark.parametrize("prompt", [1, 17])
def test_the_parallel_student_is_the_engine(
    student: Checkpoint, adapters: Adapters, tokens: Array, prompt: int
) -> None:
    logits, experts = parallel(student, adapters, tokens, prompt)
    for row, text in enumerate(tokens):
        wanted, chosen = stepped(student, adapters, text, prompt)
        got = {(layer, t): experts[layer][row, t].tolist() for layer in experts for t in range(TOKENS)}
        assert got == chosen
        assert np.abs(logits[row] - wanted).max() <= LOGITS * np.abs(wanted).max()


def test_predictions_are_consumed_at_all(student: Checkpoint, adapters: Adapters, tokens: Array) -> None:
    decoded, prompted = (parallel(student, adapters, tokens, prompt)[1] for prompt in (1, TOKENS))
    differing = [layer for layer in decoded if (decoded[layer] != prompted[layer]).any()]
    assert differing[0] == min(OWNERS) + 1
    assert (decoded[min(OWNERS) + 1][:, :1] == prompted[min(OWNERS) + 1][:, :1]).all()


@pytest.mark.parametrize("cuts", [(1,), (16, 17), (33,)])
def test_a_sequence_may_be_cut_anywhere(
    student: Checkpoint, adapters: Adapters, tokens: Array, cuts: tuple[int, ...]
) -> None:
    """State, predictions and executed experts go from call to call."""
    scored = ScoredModel(ParallelModel(student), adapters)
    told = {"heads": scored.heads, "loras": scored.loras, "decode_from": 5}
    whole, _ = scored.model(mx.array(tokens), **told)
    carry, parts = None, []
    for piece in np.split(tokens, cuts, axis=1):
        logits, carry = scored.model(mx.array(piece), carry, **told)
        parts.append(np.array(logits))
    assert np.abs(np.concatenate(parts, axis=1) - np.array(whole)).max() <= LOGITS * np.abs(np.array(whole)).max()


def test_the_embedded_model_with_its_adapters() -> None:
    """A real text, 32 tokens of it."""
    folder = embedded_model()
    checkpoint = open_checkpoint(folder)
    adapters = open_adapters(folder / "adapters", checkpoint.config)
    held_out = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text("utf-8")
    text = np.array(open_tokenizer(folder).encode(held_out[:600])[:32])
    logits, experts = parallel(checkpoint, adapters, text[None], 1)
    wanted, chosen = stepped(checkpoint, adapters, text, 1)
    assert {(layer, t): experts[layer][0, t].tolist() for layer in experts for t in range(32)} == chosen
    assert np.abs(logits[0] - wanted).max() <= LOGITS
