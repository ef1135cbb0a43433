"""Mutants of chapter 4: what an expert computes and how experts are added up; and of how its bytes lie."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge0_ref import experts
from edge0_ref.contract import Expert, ExpertLayout
from edge0_ref.dequant import dequantize
from edge0_ref.executors import exact, staged, whole_layer
from edge0_ref.functions import silu, swiglu
from edge0_ref.lora import linear

EXECUTORS = (exact, staged, whole_layer)


def run_every_expert_as(patch: pytest.MonkeyPatch, run: Any) -> None:
    patch.setattr(exact, "run_expert", run)


def combine_as(patch: pytest.MonkeyPatch, combine: Any) -> None:
    for module in EXECUTORS:
        patch.setattr(module, "combine", combine)


def up_for_gate(patch: pytest.MonkeyPatch) -> None:
    run_every_expert_as(patch, lambda x, e: experts.run_expert(x, Expert(e.up, e.up, e.down)))


def silu_on_the_wrong_branch(patch: pytest.MonkeyPatch) -> None:
    run_every_expert_as(patch, lambda x, e: experts.run_expert(x, Expert(e.up, e.gate, e.down)))


def silu_left_out(patch: pytest.MonkeyPatch) -> None:
    run_every_expert_as(patch, lambda x, e: linear(linear(x, e.gate) * linear(x, e.up), e.down))


def silu_on_the_product(patch: pytest.MonkeyPatch) -> None:
    run_every_expert_as(patch, lambda x, e: linear(silu(linear(x, e.gate) * linear(x, e.up)), e.down))


def inner_activations_in_float16(patch: pytest.MonkeyPatch) -> None:
    def run(x: np.ndarray, e: Expert) -> np.ndarray:
        inner = swiglu(linear(x, e.gate), linear(x, e.up))
        return linear(inner.astype(np.float16).astype(np.float32), e.down)

    run_every_expert_as(patch, run)


def weights_forgotten(patch: pytest.MonkeyPatch) -> None:
    combine_as(patch, lambda outputs, weights: outputs.mean(axis=1).astype(np.float32))


def one_experts_weights_in_float16(patch: pytest.MonkeyPatch) -> None:
    def combine(outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        weights = weights.copy()
        weights[:, -1] = weights[:, -1].astype(np.float16)
        return experts.combine(outputs, weights)

    combine_as(patch, combine)


def one_expert_sums_in_float16(patch: pytest.MonkeyPatch) -> None:
    """The expert that some token ranks second, and only where one does: its last sums are float16."""
    original = exact.run_into

    def run_into(outputs: np.ndarray, x: np.ndarray, uses: Any, expert: Expert) -> None:
        original(outputs, x, uses, expert)
        if 1 in uses[1]:
            rows = x[uses[0]]
            inner = swiglu(linear(rows, expert.gate), linear(rows, expert.up))
            terms = inner[:, None, :] * dequantize(expert.down)[None]
            with np.errstate(over="ignore", invalid="ignore"):
                sums = np.cumsum(terms.astype(np.float16), axis=-1, dtype=np.float16)[..., -1]
            outputs[uses[0], uses[1]] = sums.astype(np.float32)

    patch.setattr(exact, "run_into", run_into)


def an_expert_named_twice_counted_once(patch: pytest.MonkeyPatch) -> None:
    original = exact.run_into

    def run_into(outputs: np.ndarray, x: np.ndarray, uses: Any, expert: Expert) -> None:
        outputs[uses[0], uses[1]] = 0
        first = dict(zip(reversed(uses[0]), reversed(uses[1]), strict=True))
        original(outputs, x, (list(first), list(first.values())), expert)

    patch.setattr(exact, "run_into", run_into)


def outputs_at_the_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    original = exact.run_into

    def run_into(outputs: np.ndarray, x: np.ndarray, uses: Any, expert: Expert) -> None:
        original(outputs, x, (uses[0], [uses[1][0]] * len(uses[1])), expert)

    patch.setattr(exact, "run_into", run_into)


def a_token_feels_the_call(patch: pytest.MonkeyPatch) -> None:
    def combine(outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        together = outputs.mean(axis=0, keepdims=True).astype(np.float64)
        return (experts.combine((outputs - together).astype(np.float32), weights) + experts.combine(
            np.repeat(together, len(outputs), axis=0).astype(np.float32), weights
        )).astype(np.float32)  # fmt: skip

    combine_as(patch, combine)


def gathers_stop_at_32768_rows(patch: pytest.MonkeyPatch) -> None:
    def combine(outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        outputs.reshape(-1, outputs.shape[2])[2**15 :] = 0
        return experts.combine(outputs, weights)

    combine_as(patch, combine)


def scales_and_biases_of_up_swapped_in_the_slot(patch: pytest.MonkeyPatch) -> None:
    original = ExpertLayout.view

    def view(layout: ExpertLayout, slot: np.ndarray) -> Expert:
        expert = original(layout, slot)
        return replace(expert, up=replace(expert.up, scales=expert.up.biases, biases=expert.up.scales))

    patch.setattr(ExpertLayout, "view", view)


def one_executor_adds_in_float32(patch: pytest.MonkeyPatch) -> None:
    def combine(outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.asarray((outputs * weights[:, :, None]).sum(axis=1, dtype=np.float32))

    patch.setattr(staged, "combine", combine)


MUTANTS = {
    up_for_gate: "EXE-003",
    silu_on_the_wrong_branch: "EXE-003",
    silu_left_out: "EXE-003",
    silu_on_the_product: "EXE-003",
    inner_activations_in_float16: "EXE-003",
    one_expert_sums_in_float16: "EXE-003",
    weights_forgotten: "EXE-004",
    one_experts_weights_in_float16: "EXE-004",
    an_expert_named_twice_counted_once: "EXE-005",
    outputs_at_the_wrong_rank: "EXE-002",
    gathers_stop_at_32768_rows: "EXE-002",
    a_token_feels_the_call: "EXE-006",
    scales_and_biases_of_up_swapped_in_the_slot: "STO-010",
    one_executor_adds_in_float32: "EXE-017",
}
