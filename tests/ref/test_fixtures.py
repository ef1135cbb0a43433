"""Logits of checkpoints whose expected values come from independent implementations."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import Plan
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.inventory import open_checkpoint

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
MODELS = {
    "kjv-moe": ROOT / "edge0_ref" / "assets" / "kjv-moe",
    "qwen_mlx4": DATA / "qwen_mlx4",
    "qwen_mlx4_bf16": DATA / "qwen_mlx4_bf16",
}
WORST = 2.5e-4  # what independent implementations in float32 differ by, at the most, on these weights


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decoder(name: str) -> Iterator[ReferenceDecoder]:
    checkpoint = open_checkpoint(MODELS[name])
    decoder = ReferenceBackend().decoder(checkpoint, Plan(top_k=checkpoint.config.top_k, prefill_chunk=100))
    yield decoder
    decoder.close()


def agrees(got: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(got - wanted).max() <= WORST
    np.testing.assert_array_equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.spec("DEC-042", "DEC-047")
def test_logits_agree_with_independent_implementations(name: str, decoder: ReferenceDecoder) -> None:
    expected = load_file(DATA / name / "expected.safetensors")
    tokens = expected["token_ids"].tolist()
    full = decoder.all_logits(tokens)
    agrees(full, expected["logits_full"])


@pytest.mark.spec("DEC-040", "DEC-043", "DEC-047")
def test_a_prompt_and_single_steps_give_the_bits_of_one_whole_prompt(name: str, decoder: ReferenceDecoder) -> None:
    expected = load_file(DATA / name / "expected.safetensors")
    incremental = expected["logits_incremental_64_then_1"]
    tokens = expected["token_ids"].tolist()[: len(incremental)]
    whole = decoder.all_logits(tokens)
    decoder.reset()
    first = decoder.all_logits(tokens[:64])
    steps = [decoder.step(token) for token in tokens[64:]]
    got = np.concatenate([first, np.stack(steps)])
    agrees(got, incremental)
    np.testing.assert_array_equal(got, whole)
