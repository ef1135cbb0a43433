"""Mutants of chapter 9: mixers, layers, and what a sequence remembers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge0_ref import decoder, kernels, readers
from edge0_ref.contract import Plan
from edge0_ref.decoder import ReferenceDecoder, State
from edge0_ref.executors.bank import SpareBank
from edge0_ref.executors.staged import StagedExecutor
from edge0_ref.functions import softplus
from edge0_ref.mixers import attention, gated_delta
from edge0_ref.mixers.gated_delta import DeltaState
from edge0_ref.moe import Moe
from edge0_ref.readers import BLOCK
from tests.mutants.replacing import replace_everywhere


def the_next_token_embedded(patch: pytest.MonkeyPatch) -> None:
    original = decoder.embed
    patch.setattr(decoder, "embed", lambda table, tokens: original(table, (tokens + 1) % table.rows))


def norm_weights_of_raw_checkpoints(patch: pytest.MonkeyPatch) -> None:
    original = decoder.rms_norm
    patch.setattr(decoder, "rms_norm", lambda x, weight, epsilon: original(x, weight + np.float32(1), epsilon))


def heads_normalized_together(patch: pytest.MonkeyPatch) -> None:
    original = attention.rms_norm

    def norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
        flat = x.reshape(len(x), -1)
        return original(flat, np.tile(weight, x.shape[1]), epsilon).reshape(x.shape)

    patch.setattr(attention, "rms_norm", norm)


def rotary_pairs_side_by_side(patch: pytest.MonkeyPatch) -> None:
    original = attention.rotate_halves

    def rotate(x: np.ndarray, angles: np.ndarray, size: int) -> np.ndarray:
        order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2), np.arange(size, x.shape[-1])])
        return original(x[..., order], angles, size)[..., np.argsort(order)]

    patch.setattr(attention, "rotate_halves", rotate)


def positions_restart_with_each_call(patch: pytest.MonkeyPatch) -> None:
    original = attention.rotary_angles
    patch.setattr(attention, "rotary_angles", lambda p, size, theta: original(p - p[0], size, theta))


def query_heads_take_turns(patch: pytest.MonkeyPatch) -> None:
    original = kernels.causal_attention

    def in_turn(q: Any, keys: Any, values: Any, first: int, scale: float, y: Any) -> None:
        heads, shared = q.shape[1], keys.shape[1]
        order = np.argsort(np.arange(heads) % shared, kind="stable")
        turned = np.empty_like(y)
        original(np.ascontiguousarray(q[:, order]), keys, values, first, scale, turned)
        y[:, order] = turned

    patch.setattr(kernels, "causal_attention", in_turn)


def norms_with_another_epsilon(patch: pytest.MonkeyPatch) -> None:
    original = decoder.rms_norm
    patch.setattr(decoder, "rms_norm", lambda x, weight, epsilon: original(x, weight, 1e-3))


def the_gate_left_out_of_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "sigmoid", np.ones_like)


def attention_sees_one_token_less(patch: pytest.MonkeyPatch) -> None:
    original = kernels.causal_attention

    def blind(q: Any, keys: Any, values: Any, first: int, scale: float, y: Any) -> None:
        original(q, keys, values, max(first - 1, 0), scale, y)

    patch.setattr(kernels, "causal_attention", blind)


def conv_taps_reversed(patch: pytest.MonkeyPatch) -> None:
    original = kernels.causal_conv
    patch.setattr(kernels, "causal_conv", lambda x, taps, s, y: original(x, np.ascontiguousarray(taps[::-1]), s, y))


def conv_state_lost_between_calls(patch: pytest.MonkeyPatch) -> None:
    original = kernels.causal_conv

    def forgetful(x: Any, taps: Any, state: Any, y: Any) -> None:
        original(x, taps, state, y)
        state[:] = 0

    patch.setattr(kernels, "causal_conv", forgetful)


def epsilon_on_the_mean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gated_delta, "L2_EPSILON", gated_delta.L2_EPSILON * 16)  # 16 dims: sum + 16 e is 16 (mean + e)


def decay_without_softplus(patch: pytest.MonkeyPatch) -> None:
    def decay_of(a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
        return np.exp(-np.exp(a_log) * np.abs(a + dt_bias)).astype(np.float32)

    patch.setattr(gated_delta, "decay_of", decay_of)


def dt_bias_left_out(patch: pytest.MonkeyPatch) -> None:
    def decay_of(a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
        return np.exp(-np.exp(a_log.astype(np.float64)) * softplus(a)).astype(np.float32)

    patch.setattr(gated_delta, "decay_of", decay_of)


def value_heads_take_turns(patch: pytest.MonkeyPatch) -> None:
    original = kernels.delta_rule

    def in_turn(q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any, y: Any) -> None:
        heads = state.shape[0]
        turn = np.arange(heads) % q.shape[1]
        original(np.ascontiguousarray(q[:, turn]), np.ascontiguousarray(k[:, turn]), v, beta, decay, state, y)

    patch.setattr(kernels, "delta_rule", in_turn)


def memory_decays_after_the_update(patch: pytest.MonkeyPatch) -> None:
    original = kernels.delta_rule

    def late(q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any, y: Any) -> None:
        original(q, k, v, beta, np.ones_like(decay), state, y)
        state *= decay[-1][:, None, :]

    patch.setattr(kernels, "delta_rule", late)


def shared_gate_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Moe, "shared_output", lambda moe, x: moe.shared(x))


def shared_expert_twice(patch: pytest.MonkeyPatch) -> None:
    original = Moe.shared_output
    patch.setattr(Moe, "shared_output", lambda moe, x: original(moe, x) * np.float32(2))


def residual_taken_after_the_norm(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._run_layer

    def run_layer(self: ReferenceDecoder, layer: Any, hidden: Any, *rest: Any) -> Any:
        return original(self, layer, decoder.rms_norm(hidden, layer.mixer_norm, self.config.norm_epsilon), *rest)

    patch.setattr(ReferenceDecoder, "_run_layer", run_layer)


def final_norm_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceDecoder, "_logits", lambda self, hidden: self.head(hidden))


def going_on_after_an_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ReferenceDecoder, "_interrupted", property(lambda self: False, lambda self, value: None), raising=False
    )


def going_on_after_an_error_between_calls_of_a_prompt(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._forward

    def forward(self: ReferenceDecoder, *call: Any) -> Any:
        hidden = original(self, *call)
        self._interrupted = False
        return hidden

    patch.setattr(ReferenceDecoder, "_forward", forward)


def an_early_end_unnoticed_before_the_layers(patch: pytest.MonkeyPatch) -> None:
    begin, forward = ReferenceDecoder._begin, ReferenceDecoder._forward

    def begin_unmarked(self: ReferenceDecoder, tokens: Any) -> None:
        begin(self, tokens)
        self._interrupted = False

    def forward_marked(self: ReferenceDecoder, tokens: Any, executors: Any) -> Any:
        self._interrupted = True
        return forward(self, tokens, executors)

    patch.setattr(ReferenceDecoder, "_begin", begin_unmarked)
    patch.setattr(ReferenceDecoder, "_forward", forward_marked)


def a_snapshot_shares_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaState, "copy", lambda state: DeltaState(state.conv.copy(), state.memory))


def reset_keeps_the_memory(patch: pytest.MonkeyPatch) -> None:
    def reset(self: ReferenceDecoder) -> None:
        self.state, self._interrupted = State(self.state.mixers), False

    patch.setattr(ReferenceDecoder, "reset", reset)


def negative_tokens_accepted(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._begin
    patch.setattr(ReferenceDecoder, "_begin", lambda self, tokens: original(self, [abs(token) for token in tokens]))


def bits_that_depend_on_the_chunk(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._forward

    def forward(self: ReferenceDecoder, tokens: Any, executors: Any) -> Any:
        return original(self, tokens, executors) * np.float32(1 + 2.0**-23 * (len(tokens) > 1))

    patch.setattr(ReferenceDecoder, "_forward", forward)


def an_observer_that_is_felt(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._logits

    def logits(self: ReferenceDecoder, hidden: Any) -> Any:
        watched = self.observe is not decoder.ignore
        return original(self, hidden * np.float32(1 + 2.0**-23 * watched))

    patch.setattr(ReferenceDecoder, "_logits", logits)


def small_calls_like_large_ones(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder.__init__

    def init(self: ReferenceDecoder, checkpoint: Any, plan: Plan, *others: Any) -> None:
        original(self, checkpoint, replace(plan, prefill_from=1), *others)

    patch.setattr(ReferenceDecoder, "__init__", init)


def slots_kept_through_a_large_call(patch: pytest.MonkeyPatch) -> None:
    """As if the plan had room for both."""
    original = ReferenceDecoder._chunks

    def chunks(self: ReferenceDecoder, tokens: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(StagedExecutor, "close", StagedExecutor.release_hints)
            yield from original(self, tokens)

    patch.setattr(ReferenceDecoder, "_chunks", chunks)


def handed_over_in_the_middle_of_a_large_call(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._predict_next

    def predict_next(self: ReferenceDecoder, owner: Any, *others: Any) -> None:
        original(self, owner, *others)
        self._read_ahead(owner.layer + 1)

    patch.setattr(ReferenceDecoder, "_predict_next", predict_next)


def memory_of_a_large_call_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpareBank, "clear", lambda spare: None)


def slots_of_an_allocator(patch: pytest.MonkeyPatch) -> None:
    def page_rows(count: int, nbytes: int) -> Any:
        memory = np.empty(count * nbytes + BLOCK, np.uint8)
        first = -memory.ctypes.data % BLOCK
        return memory[first : first + count * nbytes].reshape(count, nbytes)

    replace_everywhere(patch, readers.page_rows, page_rows)


MUTANTS = {
    the_next_token_embedded: "DEC-002",
    norm_weights_of_raw_checkpoints: "DEC-001",
    heads_normalized_together: "DEC-010",
    rotary_pairs_side_by_side: "DEC-011",
    positions_restart_with_each_call: "DEC-043",
    the_gate_left_out_of_attention: "DEC-010",
    query_heads_take_turns: "DEC-010",
    norms_with_another_epsilon: "DEC-047",
    attention_sees_one_token_less: "DEC-010",
    conv_taps_reversed: "DEC-020",
    conv_state_lost_between_calls: "DEC-043",
    epsilon_on_the_mean: "DEC-022",
    decay_without_softplus: "DEC-023",
    dt_bias_left_out: "DEC-023",
    value_heads_take_turns: "DEC-021",
    memory_decays_after_the_update: "DEC-021",
    shared_gate_skipped: "DEC-031",
    shared_expert_twice: "DEC-030",
    residual_taken_after_the_norm: "DEC-042",
    final_norm_left_out: "DEC-042",
    going_on_after_an_error: "DEC-041",
    going_on_after_an_error_between_calls_of_a_prompt: "DEC-041",
    an_early_end_unnoticed_before_the_layers: "DEC-041",
    a_snapshot_shares_memory: "DEC-044",
    reset_keeps_the_memory: "DEC-046",
    negative_tokens_accepted: "DEC-045",
    bits_that_depend_on_the_chunk: "DEC-040",
    an_observer_that_is_felt: "DEC-048",
    small_calls_like_large_ones: "DEC-049",
    slots_kept_through_a_large_call: "DEC-058",
    handed_over_in_the_middle_of_a_large_call: "DEC-058",
    memory_of_a_large_call_kept: "DEC-058",
    slots_of_an_allocator: "DEC-058",
}
