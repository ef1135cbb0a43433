"""The MLX backend, broken in one way each, and what has to notice: the conformance suite, or a test of this folder.

`python -m tests.mlx.mutants [NAME...]` prints one JSON line a mutant; exit code 1 if one lives.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from conformance.runner import run
from edge0_mlx import (
    blocks,
    decoder,
    experts,
    functions,
    heads,
    kernels,
    lora,
    memory,
    moe,
    prerouter,
    router,
    slots,
    stretches,
)
from edge0_mlx.backend import create
from edge0_mlx.executors import exact, staged
from edge0_mlx.mixers import attention, gated_delta, kda, mla
from tests.mlx import training_mutants
from tests.mutants.replacing import wrapped

Patch = pytest.MonkeyPatch
SLOTS = "tests/mlx/test_slots.py"
EVALUATIONS = "tests/mlx/test_evaluations.py"


def ties_to_the_higher_id(patch: Patch) -> None:
    def chosen(_: Any, values: mx.array, k: int) -> mx.array:
        last = values.shape[-1] - 1
        return last - mx.argsort(-values[..., ::-1], axis=-1)[..., :k]

    wrapped(patch, router, "top_k", chosen)


def chosen_as_argpartition_leaves_them(patch: Patch) -> None:
    wrapped(patch, router, "top_k", lambda _, values, k: mx.argpartition(values, kth=-k, axis=-1)[..., -k:])


def chosen_on_probabilities(patch: Patch) -> None:
    wrapped(patch, router, "top_k", lambda original, values, k: original(mx.softmax(values, axis=-1), k))


def nan_may_be_chosen(patch: Patch) -> None:
    patch.setattr(router, "check_logits", lambda logits, k: None)


def dropped_groups_at_zero(patch: Patch) -> None:
    def dropped(original: Any, choice: mx.array, spec: Any) -> mx.array:
        kept = original(choice, spec)
        return mx.where(mx.isinf(kept), 0.0, kept)

    wrapped(patch, router, "drop_groups", dropped)


def bias_in_the_weights(patch: Patch) -> None:
    wrapped(patch, router, "sigmoid_scores", lambda original, logits: original(logits) + 0.25)


def exp_as_mlx_has_it(patch: Patch) -> None:
    patch.setattr(router, "exp", mx.exp)


def products_in_bfloat16(patch: Patch) -> None:
    def rounded(original: Any, x: mx.array, *rest: Any, **named: Any) -> mx.array:
        return original(x.astype(mx.bfloat16).astype(x.dtype), *rest, **named)

    wrapped(patch, mx, "gather_qmm", rounded)


def update_merged_in_half_precision(patch: Patch) -> None:
    wrapped(patch, lora, "add_update", lambda original, x, base, update: original(x.astype(mx.float16), base, update))


def silu_on_the_wrong_branch(patch: Patch) -> None:
    patch.setattr(experts, "swiglu", lambda gate, up: functions.swiglu(up, gate))


def outputs_at_the_wrong_rank(patch: Patch) -> None:
    wrapped(patch, exact, "combine", lambda original, outputs, weights: original(outputs[:, ::-1], weights))


def weights_forgotten(patch: Patch) -> None:
    wrapped(patch, exact, "combine", lambda original, outputs, weights: original(outputs, mx.ones_like(weights)))


def coefficients_not_widened_after_a_read(patch: Patch) -> None:
    patch.setattr(slots.Slot, "widen", lambda slot: None)


def tanh_for_erf(patch: Patch) -> None:
    patch.setattr(prerouter, "gelu", lambda x: 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x**3))))


def previous_one_hot_swapped(patch: Patch) -> None:
    wrapped(patch, heads, "build_features", lambda original, x, now, before, count: original(x, before, now, count))


def a_prompt_consumes_old_predictions(patch: Patch) -> None:
    original = decoder.MlxDecoder._forward

    def forward(self: Any, tokens: Any, executors: Any) -> Any:
        self.state.predicted = self.state.predicted or getattr(self, "old", {})
        hidden = original(self, tokens, executors)
        self.old = dict(self.state.predicted)
        return hidden

    patch.setattr(decoder.MlxDecoder, "_forward", forward)


def the_worst_predicted_are_consumed(patch: Patch) -> None:
    wrapped(patch, heads, "routing_from_prediction", lambda original, logits, spec: original(-logits, spec))


def a_snapshot_shares_its_state(patch: Patch) -> None:
    patch.setattr(decoder.State, "copy", lambda state: state)


def reset_keeps_the_state(patch: Patch) -> None:
    patch.setattr(decoder.MlxDecoder, "reset", lambda self: self._forget())


def going_on_after_an_error(patch: Patch) -> None:
    original = decoder.MlxDecoder._begin

    def check(self: Any, tokens: Any) -> None:
        self._interrupted = False
        original(self, tokens)

    patch.setattr(decoder.MlxDecoder, "_begin", check)


def attention_sees_the_future(patch: Patch) -> None:
    def attend(_: Any, q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale)

    wrapped(patch, kernels, "causal_attention", attend)


def positions_restart_with_each_call(patch: Patch) -> None:
    wrapped(patch, attention.Attention, "angles", lambda original, self, first, tokens: original(self, 0, tokens))


def epsilon_on_the_mean(patch: Patch) -> None:
    wrapped(patch, gated_delta, "l2_normalize", lambda original, x, scale, e: original(x, scale, e * x.shape[-1] * 1e4))


def conv_taps_reversed(patch: Patch) -> None:
    wrapped(patch, kernels, "causal_conv", lambda original, x, taps, state: original(x, taps[::-1], state))


def shared_gate_skipped(patch: Patch) -> None:
    patch.setattr(moe.Moe, "shared_output", lambda self, x: self.shared(x))


def residual_left_out(patch: Patch) -> None:
    patch.setattr(
        blocks.Norms,
        "after",
        lambda n, hidden, mixed: (mixed, blocks.rms_norm(mixed, n.mlp, n.epsilon)),
    )


def decay_below_its_bound(patch: Patch) -> None:
    wrapped(
        patch, kda, "channel_decay", lambda original, f, a_log, dt_bias, bound: original(f, a_log, dt_bias, bound * 2)
    )


def latent_pairs_apart(patch: Patch) -> None:
    def rotated(_: Any, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        return attention.rotate_halves(x, cos, sin)

    wrapped(patch, mla, "rotate_pairs", rotated)


def a_slot_written_under_a_graph(patch: Patch) -> None:
    patch.setattr(slots.Evaluations, "settle", lambda self, owner: None)


def what_is_only_begun_fails_in_mlx_s_own_words(patch: Patch) -> None:
    patch.setattr(slots.Evaluations, "submit", lambda self, array: mx.async_eval(array))


def a_failure_of_what_is_forgotten_told(patch: Patch) -> None:
    patch.setattr(slots.Evaluations, "forget", lambda self: mx.synchronize())


def a_slot_written_by_two(patch: Patch) -> None:
    def read(original: Any, self: Any, placement: Any, urgency: Any) -> None:
        self._reads.pop(placement.slot, None)
        original(self, placement, urgency)

    original = staged.StagedExecutor._read
    patch.setattr(staged.StagedExecutor, "_read", lambda self, *arguments: read(original, self, *arguments))


def every_stretch_evaluated_by_itself(patch: Patch) -> None:
    def build(original: Any, self: Any, *arguments: Any) -> Any:
        built = original(self, *arguments)
        mx.eval(built)
        return built

    original = stretches.Stretches.__call__
    patch.setattr(stretches.Stretches, "__call__", lambda self, *arguments: build(original, self, *arguments))


def a_token_traced_anew(patch: Patch) -> None:
    original = stretches.Stretches.__call__

    def anew(self: Any, *arguments: Any) -> Any:
        self.forget()
        return original(self, *arguments)

    patch.setattr(stretches.Stretches, "__call__", anew)


def a_budget_outlives_its_plan(patch: Patch) -> None:
    wrapped(patch, mx, "set_memory_limit", lambda original, limit: original(min(limit, 2**30)))


def predictions_keep_their_own_routing(patch: Patch) -> None:
    def predicted(original: Any, self: Any, *arrays: Any) -> None:
        asked, self.routing_source = self.routing_source, decoder.keep
        original(self, *arrays)
        self.routing_source = asked

    original = decoder.MlxDecoder._evaluate
    patch.setattr(decoder.MlxDecoder, "_evaluate", lambda self, *arrays: predicted(original, self, *arrays))


def bytes_read_ahead_taken_as_checked(patch: Patch) -> None:
    patch.setattr(slots.SlotChecksApart, "check", lambda slot, expert, content: None)


def handed_over_in_the_middle_of_a_large_call(patch: Patch) -> None:
    def keep_slots(original: Any, self: Any, kept: bool) -> None:
        original(self, kept)
        self._slots_kept = True

    wrapped(patch, decoder.MlxDecoder, "_keep_slots", keep_slots)


def banks_that_wait_for_garbage_collection(patch: Patch) -> None:
    def initialize(original: Any, bank: Any, *arguments: Any) -> None:
        original(bank, *arguments)
        bank.itself = bank

    wrapped(patch, slots.Bank, "__init__", initialize)


def freed_buffers_left_to_the_allocator(patch: Patch) -> None:
    patch.setattr(memory, "TRIM", None)


MUTANTS: dict[Callable[[Patch], None], str] = {
    ties_to_the_higher_id: "RTR-003",
    chosen_as_argpartition_leaves_them: "RTR-003",
    chosen_on_probabilities: "RTR-010",
    nan_may_be_chosen: "RTR-002",
    dropped_groups_at_zero: "RTR-023",
    bias_in_the_weights: "RTR-024",
    exp_as_mlx_has_it: "RTR-024",
    products_in_bfloat16: "EXE-003",
    update_merged_in_half_precision: "LOR-001",
    silu_on_the_wrong_branch: "EXE-003",
    outputs_at_the_wrong_rank: "EXE-002",
    weights_forgotten: "EXE-004",
    coefficients_not_widened_after_a_read: "STO-010",
    tanh_for_erf: "PRE-004",
    previous_one_hot_swapped: "PRE-002",
    a_prompt_consumes_old_predictions: "PRE-008",
    the_worst_predicted_are_consumed: "PRE-006",
    a_snapshot_shares_its_state: "DEC-044",
    reset_keeps_the_state: "DEC-046",
    going_on_after_an_error: "DEC-041",
    attention_sees_the_future: "DEC-010",
    positions_restart_with_each_call: "DEC-011",
    epsilon_on_the_mean: "DEC-022",
    conv_taps_reversed: "DEC-020",
    shared_gate_skipped: "DEC-031",
    residual_left_out: "DEC-042",
    decay_below_its_bound: "DEC-051",
    latent_pairs_apart: "DEC-053",
    bytes_read_ahead_taken_as_checked: SLOTS,
    handed_over_in_the_middle_of_a_large_call: SLOTS,
    banks_that_wait_for_garbage_collection: SLOTS,
    freed_buffers_left_to_the_allocator: SLOTS,
    a_slot_written_under_a_graph: SLOTS,
    what_is_only_begun_fails_in_mlx_s_own_words: SLOTS,
    a_failure_of_what_is_forgotten_told: SLOTS,
    a_slot_written_by_two: "EXE-012",
    every_stretch_evaluated_by_itself: EVALUATIONS,
    a_token_traced_anew: EVALUATIONS,
    a_budget_outlives_its_plan: "tests/mlx/test_measures.py",
    predictions_keep_their_own_routing: "tests/mlx/test_measures.py",
    **training_mutants.MUTANTS,
}


def killed(mutant: Callable[[Patch], None]) -> bool:
    judge = MUTANTS[mutant]
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        if judge.endswith(".py"):
            arguments = [judge, "-x", "-c", os.devnull, "--rootdir", ".", "--assert=plain"]
            arguments += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:benchmark"]
            return pytest.main(arguments) == pytest.ExitCode.TESTS_FAILED
        return bool(run(create(), only=[judge], profile="no-shrink", stop_at_first=True).recorder.failures)


def main(names: list[str]) -> int:
    mx.set_default_device(mx.cpu)  # bounds of float32, and operations whose flaws are known
    living = 0
    for mutant in [mutant for mutant in MUTANTS if not names or mutant.__name__ in names]:
        dead = killed(mutant)
        living += not dead
        print(json.dumps({"name": mutant.__name__, "killed": dead}), flush=True)
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
