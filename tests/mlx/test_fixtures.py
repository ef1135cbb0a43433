"""Logits of real and random checkpoints: against independent implementations, and against the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge0_ref.adapters import Adapters
from edge0_ref.backend import create as create_reference
from edge0_ref.contract import EXECUTOR_KINDS, Array, ExecutorKind, Lora, Plan, PrerouterHead
from edge0_ref.inventory import open_checkpoint
from tests.mlx.conftest import Opened, data

KJV = Path(__file__).parents[2] / "edge0_ref" / "assets" / "kjv-moe"
MODELS = {name: data(name) for name in ("qwen_mlx4", "qwen_mlx4_bf16", "ling_mlx4", "ling_mlx4_bf16", "ling_edge0")} | {
    "kjv-moe": KJV
}
WORST = 2.5e-4  # what independent implementations in float32 differ by, at the most, on these weights


def agrees(got: Array, wanted: Array) -> None:
    assert np.abs(got - wanted).max() <= WORST
    np.testing.assert_array_equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.spec("DEC-042", "DEC-047", "EXE-003")
@pytest.mark.parametrize("kind", EXECUTOR_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_independent_implementations(opened: Opened, name: str, kind: ExecutorKind) -> None:
    checkpoint, expected = open_checkpoint(MODELS[name]), load_file(data(name) / "expected.safetensors")
    top_k = checkpoint.config.top_k
    decoder = opened(checkpoint, Plan(top_k=top_k, executor=kind, prefill_executor=kind, slots=2 * top_k))
    agrees(opened.backend.to_numpy(decoder.all_logits(expected["token_ids"].tolist())), expected["logits_full"])


@pytest.mark.spec("DEC-043", "DEC-047")
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("name", ["qwen_mlx4_bf16", "ling_mlx4_bf16"])
def test_chunks_and_single_steps_agree_with_one_whole_prompt(opened: Opened, name: str, chunk: int) -> None:
    checkpoint, expected = open_checkpoint(MODELS[name]), load_file(data(name) / "expected.safetensors")
    decoder = opened(checkpoint, Plan(top_k=checkpoint.config.top_k, prefill_chunk=chunk))
    tokens = expected["token_ids"].tolist()
    logits = [decoder.prefill(tokens[:64]), *(decoder.step(token) for token in tokens[64:])]
    agrees(np.stack([opened.backend.to_numpy(row) for row in logits]), expected["logits_full"][63:])


def random_adapters(checkpoint: Any, owners: range) -> Adapters:
    """Heads that predict something definite, and a LoRA beside every projection."""
    random, config = np.random.default_rng(3), checkpoint.config
    moe = next(iter(config.moe_layers.values()))
    features = config.hidden_size + 2 * moe.num_experts

    def matrix(rows: int, cols: int, scale: float = 1.0) -> Array:
        return (random.standard_normal((rows, cols)) * scale * cols**-0.5).astype(np.float32)

    heads = {
        owner: PrerouterHead(matrix(64, features), matrix(moe.num_experts, 64), matrix(moe.num_experts, features, 3))
        for owner in owners
    }
    linears = {name: shape for name, shape in config.tensors.linears.items() if "proj" in name}
    loras = {name: Lora(matrix(8, cols), matrix(rows, 8, 0.2), 2.0) for name, (rows, cols) in linears.items()}
    return Adapters(heads, loras, config.top_k)


def greedy(backend: Any, decoder: Any, count: int) -> list[int]:
    chosen, logits = list[int](), decoder.prefill([5, 6, 7])
    for _ in range(count):
        chosen.append(int(backend.to_numpy(logits).argmax()))
        logits = decoder.step(chosen[-1])
    decoder.close()
    return chosen


@pytest.mark.usefixtures("unchecked")
@pytest.mark.spec("DEC-047", "PRE-006", "PRE-021", "EXE-020", "EXE-014")
@pytest.mark.parametrize("owners", [range(0), range(2, 7)], ids=["alone", "with adapters"])
def test_300_greedy_tokens_and_all_reads_are_the_references(opened: Opened, owners: range) -> None:
    checkpoint = open_checkpoint(KJV)
    adapters = random_adapters(checkpoint, owners) if owners else Adapters()
    plan = Plan(top_k=checkpoint.config.top_k, slots=2 * checkpoint.config.top_k)
    reference, reference_backend = create_reference().decoder(checkpoint, plan, adapters), create_reference()
    wanted = greedy(reference_backend, reference, 300)
    decoder = opened(checkpoint, plan, adapters)
    assert greedy(opened.backend, decoder, 300) == wanted
    for name in ("reads", "bytes_read", "hits", "read_ahead", "on_demand", "drops"):
        assert getattr(decoder.counters, name) == getattr(reference.counters, name), name
    exact = Plan(top_k=plan.top_k, executor="exact", prefill_executor="exact")
    assert greedy(opened.backend, opened(checkpoint, exact, adapters), 60) == wanted[:60]
