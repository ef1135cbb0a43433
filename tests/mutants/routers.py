"""Mutants of chapter 3: choices and weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge0_ref import backend, bits, router
from edge0_ref.contract import Routing, SigmoidGroup, SoftmaxTopK


def ties_to_the_higher_id(patch: pytest.MonkeyPatch) -> None:
    def top_k(values: np.ndarray, k: int) -> np.ndarray:
        last = values.shape[-1] - 1
        return (last - np.argsort(-values[:, ::-1], axis=-1, kind="stable")[:, :k]).astype(np.int64)

    patch.setattr(router, "top_k", top_k)


def chosen_in_order_of_id(patch: pytest.MonkeyPatch) -> None:
    original = router.top_k
    patch.setattr(router, "top_k", lambda values, k: np.sort(original(values, k), axis=-1))


def chosen_on_probabilities(patch: pytest.MonkeyPatch) -> None:
    original = router.top_k

    def top_k(values: np.ndarray, k: int) -> np.ndarray:
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return original(powers / powers.sum(axis=-1, keepdims=True), k)

    patch.setattr(router, "top_k", top_k)


def chosen_on_bfloat16(patch: pytest.MonkeyPatch) -> None:
    original = router.top_k

    def top_k(values: np.ndarray, k: int) -> np.ndarray:
        return original(bits.widen(bits.float32_to_bfloat16(values.astype(np.float32))), k)

    patch.setattr(router, "top_k", top_k)


def everyone_routed_like_the_first(patch: pytest.MonkeyPatch) -> None:
    original = router.route

    def route(logits: np.ndarray, spec: Any) -> Routing:
        first = original(logits[:1], spec)
        return Routing(*(np.repeat(part, len(logits), axis=0) for part in (first.experts, first.weights)))

    patch.setattr(backend, "route", route)


def nan_may_be_chosen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router, "check_logits", lambda logits, k: None)


def error_without_its_place(patch: pytest.MonkeyPatch) -> None:
    original = router.check_logits

    def vague(logits: np.ndarray, k: int) -> None:
        try:
            original(logits, k)
        except ArithmeticError as error:
            raise type(error)("a router logit is not finite") from None

    patch.setattr(router, "check_logits", vague)


def weights_not_renormalized(patch: pytest.MonkeyPatch) -> None:
    def route(logits: np.ndarray, spec: Any) -> Routing:
        experts = router.top_k(logits, spec.top_k)
        return Routing(experts, router.gather(router.softmax(logits), experts))

    patch.setattr(backend, "route", route)


def scores_of_large_logits_overflow(patch: pytest.MonkeyPatch) -> None:
    def sigmoid_scores(logits: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            powers = np.exp(logits.astype(np.float64))
            return (powers / (1 + powers)).astype(np.float32)

    patch.setattr(router, "sigmoid_scores", sigmoid_scores)


def sigmoid_weights_not_renormalized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router, "renormalize", lambda chosen, scale: (chosen * np.float32(scale)).astype(np.float32))


def epsilon_lost(patch: pytest.MonkeyPatch) -> None:
    def renormalize(chosen: np.ndarray, scale: float) -> np.ndarray:
        wide = chosen.astype(np.float64)
        return (wide / wide.sum(axis=-1, keepdims=True) * scale).astype(np.float32)

    patch.setattr(router, "renormalize", renormalize)


def scale_applied_before_renormalizing(patch: pytest.MonkeyPatch) -> None:
    original = router.renormalize
    patch.setattr(router, "renormalize", lambda chosen, scale: original(chosen * np.float32(scale), 1.0))


def bias_in_the_weights(patch: pytest.MonkeyPatch) -> None:
    def route(logits: np.ndarray, spec: SigmoidGroup) -> Routing:
        choice = router.biased(router.sigmoid_scores(logits), spec)
        experts = router.top_k(router.drop_groups(choice, spec), spec.top_k)
        return Routing(experts, router.renormalize(router.gather(choice, experts), spec.scale))

    patch.setattr(backend, "route", route)


def bias_left_out_of_the_choice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router, "biased", lambda scores, spec: scores)


def dropped_groups_at_zero(patch: pytest.MonkeyPatch) -> None:
    original = router.drop_groups

    def drop_groups(choice: np.ndarray, spec: SigmoidGroup) -> np.ndarray:
        dropped = original(choice, spec)
        return np.where(np.isneginf(dropped), 0, dropped)

    patch.setattr(router, "drop_groups", drop_groups)


def group_scored_by_its_best_alone(patch: pytest.MonkeyPatch) -> None:
    def drop_groups(choice: np.ndarray, spec: SigmoidGroup) -> np.ndarray:
        groups = choice.reshape(len(choice), spec.num_groups, -1)
        kept = router.top_k(groups.max(axis=-1), spec.top_groups)
        mask = np.zeros(groups.shape[:2], bool)
        np.put_along_axis(mask, kept, True, axis=-1)
        return np.where(mask[..., None], groups, -np.inf).reshape(choice.shape)

    patch.setattr(router, "drop_groups", drop_groups)


def scores_kept_in_float64(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router, "sigmoid_scores", lambda logits: 1 / (1 + np.exp(-logits.astype(np.float64))))


def groups_that_do_not_divide_accepted(patch: pytest.MonkeyPatch) -> None:
    original = router.drop_groups

    def lenient(choice: np.ndarray, spec: SigmoidGroup) -> np.ndarray:
        if choice.shape[1] % spec.num_groups:
            spec = replace(spec, num_groups=1, top_groups=1)
        return original(choice, spec)

    patch.setattr(router, "drop_groups", lenient)


def exp_in_float32(patch: pytest.MonkeyPatch) -> None:
    def softmax(chosen: np.ndarray) -> np.ndarray:
        powers = np.exp(chosen - chosen.max(axis=-1, keepdims=True))
        return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)

    patch.setattr(router, "softmax", softmax)


def weights_uniform(patch: pytest.MonkeyPatch) -> None:
    original = router.route

    def route(logits: np.ndarray, spec: Any) -> Routing:
        routing = original(logits, spec)
        uniform = np.full_like(routing.weights, 1 / routing.weights.shape[1])
        return Routing(routing.experts, uniform if isinstance(spec, SoftmaxTopK) else routing.weights)

    patch.setattr(backend, "route", route)


MUTANTS = {
    ties_to_the_higher_id: "RTR-003",
    chosen_in_order_of_id: "RTR-003",
    chosen_on_probabilities: "RTR-010",
    chosen_on_bfloat16: "RTR-010",
    everyone_routed_like_the_first: "RTR-001",
    nan_may_be_chosen: "RTR-002",
    error_without_its_place: "NUM-009",
    weights_not_renormalized: "RTR-011",
    weights_uniform: "RTR-011",
    exp_in_float32: "NUM-003",
    scores_of_large_logits_overflow: "RTR-021",
    sigmoid_weights_not_renormalized: "RTR-024",
    epsilon_lost: "RTR-024",
    scale_applied_before_renormalizing: "RTR-024",
    bias_in_the_weights: "RTR-022",
    bias_left_out_of_the_choice: "RTR-022",
    dropped_groups_at_zero: "RTR-023",
    group_scored_by_its_best_alone: "RTR-023",
    scores_kept_in_float64: "RTR-021",
    groups_that_do_not_divide_accepted: "RTR-020",
}
