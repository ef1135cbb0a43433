"""Routers: which experts a token uses, and with what weights.

Two families. Softmax-top-k chooses on the logits themselves: softmax is monotone, and on probabilities that underflow
the choice would be arbitrary. Sigmoid-group scores each expert alone, biases the choice only, and drops whole groups.
Equal values go to the lower id, everywhere.
"""

import numpy as np
from jaxtyping import Float32, Int64

from edge0_ref.bits import widen
from edge0_ref.contract import RouterSpec, Routing, SigmoidGroup, SoftmaxTopK
from edge0_ref.errors import NonFiniteError, ShapeError
from edge0_ref.functions import sigmoid

Logits = Float32[np.ndarray, "tokens experts"]


def route(logits: Logits, spec: RouterSpec) -> Routing:
    """[RTR-001] The routing of every token. Raises NonFiniteError for a NaN or infinite logit, ShapeError for k > E."""
    check_logits(logits, spec.top_k)
    match spec:
        case SoftmaxTopK():
            experts = top_k(logits, spec.top_k)
            return Routing(experts, softmax(gather(logits, experts)))
        case SigmoidGroup():
            scores = sigmoid_scores(logits)
            experts = top_k(drop_groups(biased(scores, spec), spec), spec.top_k)
            return Routing(experts, renormalize(gather(scores, experts), spec.scale))


def check_logits(logits: Logits, k: int) -> None:
    """[RTR-002] Refuse what has no meaningful order."""
    if k > logits.shape[-1]:
        raise ShapeError(f"router: top_k {k} of {logits.shape[-1]} experts")
    if not np.isfinite(logits).all():
        token, expert = np.argwhere(~np.isfinite(logits))[0]
        raise NonFiniteError(f"router logit of token {token}, expert {expert} is {logits[token, expert]}")


def top_k(values: np.ndarray, k: int) -> Int64[np.ndarray, "tokens k"]:
    """[RTR-003] Ids of the k largest, largest first, equal values by ascending id.

    A stable sort of the negated values keeps ids ascending within a tie.

    >>> top_k(np.array([[1.0, 3.0, 3.0, 2.0]], np.float32), 2)
    array([[1, 2]])
    """
    return np.argsort(-values, axis=-1, kind="stable")[:, :k].astype(np.int64)


def gather(values: np.ndarray, experts: Int64[np.ndarray, "tokens k"]) -> np.ndarray:
    """The chosen experts' values, [tokens, k]."""
    chosen: np.ndarray = values[np.arange(values.shape[0])[:, None], experts]
    return chosen


def softmax(chosen: Float32[np.ndarray, "tokens k"]) -> Float32[np.ndarray, "tokens k"]:
    """[RTR-011] Softmax over the chosen logits only: the full softmax renormalised, without its underflow.

    >>> softmax(np.array([[0.0, 0.0]], np.float32))
    array([[0.5, 0.5]], dtype=float32)
    """
    wide = chosen.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    weights: Float32[np.ndarray, "tokens k"] = (powers / ascending_sum(powers)).astype(np.float32)
    return weights


def sigmoid_scores(logits: Logits) -> Logits:
    """[RTR-021] Scores of the sigmoid family, float32: saturated scores tie, as in the models' own code."""
    return sigmoid(logits)


def biased(scores: Logits, spec: SigmoidGroup) -> Logits:
    """[RTR-022] Scores for the choice: float32 score plus float32 expert bias."""
    return scores if spec.expert_bias is None else scores + widen(spec.expert_bias)


def drop_groups(choice: np.ndarray, spec: SigmoidGroup) -> np.ndarray:
    """[RTR-023] Experts outside the best `top_groups` groups become -inf.

    A group's score is the sum of its two largest choice scores (of its only one, if it has one expert).
    """
    tokens, experts = choice.shape
    if experts % spec.num_groups:
        raise ShapeError(f"router: {experts} experts do not form {spec.num_groups} groups")
    groups = choice.reshape(tokens, spec.num_groups, -1)
    best_two = -np.sort(-groups, axis=-1)[..., :2]
    kept = top_k(best_two.sum(axis=-1), spec.top_groups)
    if spec.top_k > spec.top_groups * groups.shape[-1]:
        raise ShapeError(f"router: top_k {spec.top_k} of {spec.top_groups} groups of {groups.shape[-1]} experts")
    mask = np.zeros((tokens, spec.num_groups), bool)
    np.put_along_axis(mask, kept, True, axis=-1)
    return np.where(mask[..., None], groups, -np.inf).reshape(tokens, experts)


def renormalize(chosen: np.ndarray, scale: float) -> Float32[np.ndarray, "tokens k"]:
    """[RTR-024] weights = chosen / (sum + 1e-20) * scale: raw scores, without the bias."""
    wide = chosen.astype(np.float64)
    return (wide / (ascending_sum(wide) + 1e-20) * scale).astype(np.float32)


def ascending_sum(values: np.ndarray) -> np.ndarray:
    """[NUM-002] Sum over the last axis from the first element to the last, [tokens, 1]."""
    return np.cumsum(values, axis=-1)[..., -1:]
