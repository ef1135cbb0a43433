"""Mutants of chapter 7: heads, features, and the schedule."""

from typing import Any

import numpy as np
import pytest

from edge0_ref import backend, decoder, prerouter
from edge0_ref.contract import Plan, Routing
from edge0_ref.decoder import ReferenceDecoder, State
from edge0_ref.executors.staged import StagedExecutor


def tanh_for_erf(patch: pytest.MonkeyPatch) -> None:
    def gelu(x: np.ndarray) -> np.ndarray:
        z = x.astype(np.float64)
        return (z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2).astype(np.float32)

    patch.setattr(prerouter, "gelu", gelu)


def the_line_left_out(patch: pytest.MonkeyPatch) -> None:
    def predict(head: Any, features: np.ndarray) -> np.ndarray:
        return prerouter.linear(prerouter.gelu(prerouter.linear(features, head.fc1)), head.fc2)

    patch.setattr(backend, "predict", predict)


def features_as(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Build features from other arguments: change(hidden, executed, before)."""
    original = prerouter.build_features

    def build(hidden: Any, executed: Any, before: Any, num_experts: int) -> Any:
        return original(*change(hidden, executed, before), num_experts)

    patch.setattr(decoder, "build_features", build)


def previous_one_hot_swapped(patch: pytest.MonkeyPatch) -> None:
    features_as(patch, lambda hidden, executed, before: (hidden, before, executed))


def only_the_best_expert_is_hot(patch: pytest.MonkeyPatch) -> None:
    features_as(patch, lambda hidden, executed, before: (hidden, executed[:, :1], before[:, :1]))


def no_shift_between_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder, "shift", lambda executed, before: executed)


def the_token_before_forgotten_between_calls(patch: pytest.MonkeyPatch) -> None:
    original = prerouter.shift
    patch.setattr(decoder, "shift", lambda executed, before: original(executed, np.full_like(before, -1)))


def fed_the_routers_choice(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._predict_next

    def predict_next(self: ReferenceDecoder, owner: Any, head: Any, x: Any, routing: Routing) -> None:
        original(self, owner, head, x, owner.route(owner.router_logits(x)))

    patch.setattr(ReferenceDecoder, "_predict_next", predict_next)


def a_prompt_consumes_old_predictions(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._forward

    def chunks(self: ReferenceDecoder, tokens: Any) -> Any:
        self._begin(tokens)
        for token in tokens:
            yield original(self, [token], self._prefill)

    patch.setattr(ReferenceDecoder, "_chunks", chunks)


def the_first_step_is_routed_by_routers(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder.prefill
    every = ReferenceDecoder.all_logits

    def forgetful(call: Any) -> Any:
        def method(self: ReferenceDecoder, tokens: Any) -> Any:
            logits = call(self, tokens)
            self.state.predicted = {}
            return logits

        return method

    patch.setattr(ReferenceDecoder, "prefill", forgetful(original))
    patch.setattr(ReferenceDecoder, "all_logits", forgetful(every))


def a_prediction_consumed_one_step_late(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder.step

    def step(self: ReferenceDecoder, token: int) -> Any:
        fresh = dict(self.state.predicted)
        self.state.predicted = getattr(self, "late", fresh)
        self.late = fresh  # type: ignore[attr-defined]
        return original(self, token)

    patch.setattr(ReferenceDecoder, "step", step)


def the_first_position_of_a_chunk_predicts(patch: pytest.MonkeyPatch) -> None:
    original = decoder.build_features

    def build_features(*given: Any) -> np.ndarray:
        features = original(*given)
        return np.repeat(features[:1], len(features), axis=0)

    patch.setattr(decoder, "build_features", build_features)


def the_worst_predicted_are_consumed(patch: pytest.MonkeyPatch) -> None:
    original = prerouter.routing_from_prediction
    patch.setattr(decoder, "routing_from_prediction", lambda logits, *rule: original(-logits, *rule))


def the_router_runs_all_the_same(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._run_moe

    def run_moe(self: ReferenceDecoder, moe: Any, head: Any, x: Any, predicted: Any, executor: Any) -> Any:
        if predicted is not None:
            self._choose(moe, x)
        return original(self, moe, head, x, predicted, executor)

    patch.setattr(ReferenceDecoder, "_run_moe", run_moe)


def predictions_go_to_every_layer_after(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._predict_next

    def predict_next(self: ReferenceDecoder, owner: Any, head: Any, x: Any, routing: Routing) -> None:
        original(self, owner, head, x, routing)
        prediction = self.state.predicted[owner.layer + 1]
        for layer in range(owner.layer + 2, len(self.layers)):
            self.state.predicted.setdefault(layer, prediction)

    patch.setattr(ReferenceDecoder, "_predict_next", predict_next)


def predictions_outlive_a_reset(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder.reset

    def reset(self: ReferenceDecoder) -> None:
        kept = self.state.predicted
        original(self)
        self.state.predicted = kept

    patch.setattr(ReferenceDecoder, "reset", reset)


def handed_to_the_layer_that_predicts(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder._read_ahead

    def read_ahead(self: ReferenceDecoder, *layers: int) -> None:
        kept = self._decode
        self._decode = kept | {layer: kept[layer - 1] for layer in layers}
        original(self, *layers)
        self._decode = kept

    patch.setattr(ReferenceDecoder, "_read_ahead", read_ahead)


def nothing_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedExecutor, "prepare", lambda executor, experts: None)


def the_wrong_experts_are_handed_over(patch: pytest.MonkeyPatch) -> None:
    original = StagedExecutor.prepare
    patch.setattr(StagedExecutor, "prepare", lambda executor, experts: original(executor, [e ^ 1 for e in experts]))


def a_snapshot_without_predictions(patch: pytest.MonkeyPatch) -> None:
    original = State.copy

    def copy(state: State) -> State:
        kept = original(state)
        kept.predicted = {}
        return kept

    patch.setattr(State, "copy", copy)


def layers_without_predictions_like_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Plan, "of_layer", lambda plan, predicted: (plan.executor, plan.slots))


def slots_by_age_where_nobody_predicts(patch: pytest.MonkeyPatch) -> None:
    def of_layer(plan: Plan, predicted: bool) -> tuple[str, int]:
        return "staged", plan.slots if predicted or plan.on_demand_slots is None else plan.on_demand_slots

    patch.setattr(Plan, "of_layer", of_layer)


MUTANTS = {
    tanh_for_erf: "PRE-004",
    the_line_left_out: "PRE-001",
    previous_one_hot_swapped: "PRE-002",
    only_the_best_expert_is_hot: "PRE-003",
    no_shift_between_tokens: "PRE-005",
    the_token_before_forgotten_between_calls: "PRE-005",
    fed_the_routers_choice: "PRE-007",
    a_prompt_consumes_old_predictions: "PRE-008",
    the_first_step_is_routed_by_routers: "PRE-021",
    a_prediction_consumed_one_step_late: "PRE-022",
    the_first_position_of_a_chunk_predicts: "PRE-020",
    the_worst_predicted_are_consumed: "PRE-006",
    the_router_runs_all_the_same: "PRE-027",
    predictions_go_to_every_layer_after: "PRE-023",
    predictions_outlive_a_reset: "PRE-022",
    nothing_is_handed_over: "PRE-024",
    handed_to_the_layer_that_predicts: "PRE-025",
    the_wrong_experts_are_handed_over: "PRE-025",
    a_snapshot_without_predictions: "PRE-026",
    layers_without_predictions_like_the_others: "PRE-028",
    slots_by_age_where_nobody_predicts: "PRE-028",
}
