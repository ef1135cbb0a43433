"""The Ling family: its fixtures, its bits, and what its mixers are held to beyond them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge0_ref.adapters import Adapters, open_adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import MlaConfig
from edge0_ref.contract import EXECUTOR_KINDS
from edge0_ref.engine.plan import mixer_state_bytes
from edge0_ref.inventory import open_checkpoint
from edge0_ref.mixers.kda import channel_decay
from edge0_ref.mixers.mla import LatentReader, rotate_pairs
from tests.ref.builders import tensor, write_safetensors
from tests.ref.conftest import Open
from tests.ref.ling import DATA, TOKENS, head_tensors, metadata

FIXTURES = ("ling_mlx4", "ling_mlx4_bf16", "ling_edge0")
WORST = 1.5e-4  # what float32 implementations differ by, at the most, on these weights


@pytest.mark.spec("DEC-056", "DEC-065")
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_agree_with_independent_implementations(name: str, opened: Open) -> None:
    expected = load_file(DATA / name / "expected.safetensors")
    got = opened(DATA / name).all_logits(expected["token_ids"].tolist())
    for wanted in ("logits_full", "logits_incremental_64_then_1"):
        if wanted in expected:
            assert np.abs(got - expected[wanted]).max() <= WORST
            np.testing.assert_array_equal(got.argmax(-1), expected[wanted].argmax(-1))


@pytest.mark.spec("DEC-040", "DEC-043")
@pytest.mark.parametrize("name", FIXTURES)
def test_neither_steps_nor_executors_nor_chunks_change_a_bit(name: str, opened: Open) -> None:
    checkpoint = open_checkpoint(DATA / name)
    whole = opened(checkpoint).all_logits(TOKENS)
    for kind, slots, chunk, prompt in zip(EXECUTOR_KINDS, (1, 3, 8, 1), (1, 5, 256, 2), (1, 7, 6, 3), strict=True):
        decoder = opened(checkpoint, executor=kind, prefill_executor=kind, slots=slots, prefill_chunk=chunk)
        cut = [*decoder.all_logits(TOKENS[:prompt]), *(decoder.step(token) for token in TOKENS[prompt:])]
        np.testing.assert_array_equal(np.stack(cut), whole)


def adapters_for(checkpoint: Checkpoint, folder: Path) -> Adapters:
    """Heads wherever they may be, LoRA on every resident linear layer, kv_b among them; half the names are short."""
    owners, rng = (1, 2, 3, 4, 5, 6), np.random.default_rng(5)
    tensors = head_tensors("layers.{}", owners)
    config = checkpoint.config
    for number, (module, (rows, cols)) in enumerate(config.tensors.linears.items()):
        if module != config.embedding:
            name = module.removeprefix("model.") if number % 2 else module
            tensors[f"{name}.lora_A"] = tensor(rng.normal(0, cols**-0.5, (2, cols)), "F16")
            tensors[f"{name}.lora_B"] = tensor(rng.normal(0, 0.2, (rows, 2)), "F16")
    folder.mkdir()
    write_safetensors(folder / "a.safetensors", tensors, metadata=metadata(owners, K=3))
    return open_adapters(folder, config)


@pytest.mark.spec("DEC-040", "DEC-044", "DEC-062", "LOR-006")
@pytest.mark.parametrize("name", ["ling_mlx4_bf16", "ling_edge0"])
def test_predictions_and_lora_keep_bits_and_survive_a_snapshot(name: str, opened: Open, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(DATA / name)
    adapters = adapters_for(checkpoint, tmp_path / "adapters")
    runs = []
    for kind in EXECUTOR_KINDS:
        decoder = opened(checkpoint, adapters, top_k=3, executor=kind, prefill_executor=kind, slots=6)
        decoder.prefill(TOKENS[:5])
        kept = decoder.snapshot()
        first = np.stack([decoder.step(token) for token in TOKENS[5:]])
        decoder.restore(kept)
        np.testing.assert_array_equal(np.stack([decoder.step(token) for token in TOKENS[5:]]), first)
        assert decoder.counters.drops == 0
        runs.append(first)
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])
    assert not np.array_equal(runs[0], opened(checkpoint, top_k=3).all_logits(TOKENS)[5:])


def random_reader(rng: np.random.Generator, heads: int, key: int, latent: int, value: int) -> LatentReader:
    w_uk, w_uv = rng.standard_normal((heads, key, latent)), rng.standard_normal((heads, value, latent))
    return LatentReader((w_uk / latent**0.5).astype(np.float32), (w_uv / latent**0.5).astype(np.float32), key**-0.5)


@pytest.mark.spec("DEC-054")
@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (1, 37), (9, 0), (5, 20)])
@pytest.mark.parametrize("seed", [0, 1])
def test_carrying_queries_in_and_writing_keys_out_agree(tokens: int, first: int, seed: int) -> None:
    """Scores of size up to S, each rounded twice at 2**-24, move a probability by 4 S 2**-24: S = 40 stays in 1e-5."""
    rng = np.random.default_rng(seed)
    reader = random_reader(rng, heads=3, key=16, latent=64, value=24)
    q, q_rotary = (rng.standard_normal((tokens, 3, size)).astype(np.float32) for size in (16, 8))
    rows = rng.standard_normal((first + tokens, 72)).astype(np.float32)
    absorbed, expanded = (form(q, q_rotary, rows, first) for form in (reader.absorbed, reader.expanded))
    assert np.abs(absorbed - expanded).max() <= 1e-5 * np.abs(expanded).max()


@pytest.mark.spec("DEC-053")
def test_rotated_pairs_know_their_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 8)).astype(np.float32)
    frequencies = 100.0 ** (-np.arange(0, 8, 2) / 8)

    def product(at: int, other: int) -> float:
        turned = (rotate_pairs(x, position * frequencies[None]) for x, position in ((q, at), (k, other)))
        first, second = (x.astype(np.float64) for x in turned)
        return float((first * second).sum())

    bound = 8 * 2.0**-23 * float(np.linalg.norm(q) * np.linalg.norm(k))
    assert all(abs(product(d + n, n) - product(d, 0)) <= bound for d in (0, 1, 9) for n in (1, 5, 1000))
    assert abs(product(1, 0) - product(0, 0)) > bound


@pytest.mark.spec("DEC-051")
def test_decay_stays_between_its_bound_and_one_whatever_the_gate_says() -> None:
    f = np.array([-3e38, -100, -1, 0, 1, 100, 3e38], np.float32).reshape(1, 1, 7)
    decay = channel_decay(f, np.array([2.0], np.float32), np.zeros((1, 7), np.float32), -5.0).ravel()
    assert (np.diff(decay) <= 0).all()
    assert decay[0] == 1
    assert decay[-1] == np.float32(np.exp(-5.0))
    assert decay[3] == np.float32(np.exp(-2.5))


@pytest.mark.spec("DEC-057", "ENG-034")
@pytest.mark.parametrize("positions", [1, 64, 65])
def test_the_planned_state_is_the_state(positions: int, opened: Open) -> None:
    checkpoint = open_checkpoint(DATA / "ling_edge0")
    decoder = opened(checkpoint, context=positions)
    decoder.prefill([1] * positions)
    for layer, state in zip(checkpoint.config.layers, decoder.state.mixers, strict=True):
        held = sum(array.nbytes for array in vars(state).values() if isinstance(array, np.ndarray))
        assert held == mixer_state_bytes(layer.mixer, positions)
        if isinstance(layer.mixer, MlaConfig):
            assert state.rows.shape[1] == 64 + 16
