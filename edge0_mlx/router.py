"""Routers: which experts a token uses, and with what weights.

Choices are made on the device, where they stay until an evaluation brings them back (`choose`), or at once (`route`).
"""

import mlx.core as mx
import numpy as np
from jaxtyping import Float32, Int

from edge0_mlx.arrays import from_numpy, to_numpy
from edge0_ref.bits import widen
from edge0_ref.contract import Array, RouterSpec, Routing, SigmoidGroup, SoftmaxTopK
from edge0_ref.errors import NonFiniteError, ShapeError

Logits = Float32[mx.array, "tokens experts"]
LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 0.693359375, -2.1219444005469057e-4
Choice = tuple[Int[mx.array, "tokens k"], Float32[mx.array, "tokens k"]]


def route(logits: Logits, spec: RouterSpec) -> Routing:
    """[RTR-001] The routing of every token. Raises NonFiniteError for a NaN or infinite logit, ShapeError for k > E."""
    check_logits(to_numpy(logits), spec.top_k)
    experts, weights = choose(logits, spec)
    return Routing(np.array(experts).astype(np.int64), np.array(weights))


def choose(logits: Logits, spec: RouterSpec) -> Choice:
    """[RTR-001] Experts and weights, not evaluated; `check_logits` is due when the logits are."""
    match spec:
        case SoftmaxTopK():
            experts = top_k(logits, spec.top_k)
            return experts, softmax(gather(logits, experts))
        case SigmoidGroup():
            scores = sigmoid_scores(logits)
            experts = top_k(drop_groups(biased(scores, spec), spec), spec.top_k)
            return experts, renormalize(gather(scores, experts), spec.scale)


def check_logits(logits: Array, k: int) -> None:
    """[RTR-002] Refuse what has no meaningful order; logits on the host, [tokens, experts]."""
    if k > logits.shape[-1]:
        raise ShapeError(f"router: top_k {k} of {logits.shape[-1]} experts")
    if not np.isfinite(logits).all():
        token, expert = np.argwhere(~np.isfinite(logits))[0]
        raise NonFiniteError(f"router logit of token {token}, expert {expert} is {logits[token, expert]}")


def top_k(values: mx.array, k: int) -> Int[mx.array, "tokens k"]:
    """[RTR-003] Ids of the k largest, largest first, equal values by ascending id.

    MLX documents its sorts as stable on every device; `mx.topk` and `mx.argpartition` leave order and ties open.
    """
    return mx.argsort(-values, axis=-1)[..., :k]


def gather(values: mx.array, experts: Int[mx.array, "tokens k"]) -> mx.array:
    """The chosen experts' values, [tokens, k]."""
    return mx.take_along_axis(values, experts, axis=-1)


def softmax(chosen: Float32[mx.array, "tokens k"]) -> Float32[mx.array, "tokens k"]:
    """[RTR-011] Softmax over the chosen logits only: the full softmax renormalised, without its underflow."""
    return mx.softmax(chosen, axis=-1, precise=True)


def sigmoid_scores(logits: Logits) -> Logits:
    """[RTR-021] Scores of the sigmoid family, float32: saturated scores tie, as in the models' own code."""
    decayed = exp(-mx.abs(logits))
    return mx.where(logits >= 0, 1.0, decayed) / (1.0 + decayed)


def exp(x: mx.array) -> mx.array:
    """exp, to the last bits also of tiny results: `mx.exp` is off by x units in the last place on a CPU.

    exp(x) = 2^n exp(x - n ln 2), with ln 2 in two parts of which the first times n is exact unless n is huge.
    """
    x = mx.maximum(x, -200.0)  # whose exp is 0 as well
    n = mx.round(x * LOG2_E)
    return mx.exp((x - n * LN_2_HIGH) - n * LN_2_LOW) * mx.power(2.0, n)


def biased(scores: Logits, spec: SigmoidGroup) -> Logits:
    """[RTR-022] Scores for the choice: float32 score plus float32 expert bias."""
    return scores if spec.expert_bias is None else scores + from_numpy(widen(spec.expert_bias))


def drop_groups(choice: mx.array, spec: SigmoidGroup) -> mx.array:
    """[RTR-023] Experts outside the best `top_groups` groups become -inf.

    A group's score is the sum of its two largest choice scores (of its only one, if it has one expert).
    """
    *tokens, experts = choice.shape
    if experts % spec.num_groups:
        raise ShapeError(f"router: {experts} experts do not form {spec.num_groups} groups")
    groups = choice.reshape(*tokens, spec.num_groups, -1)
    if spec.top_k > spec.top_groups * groups.shape[-1]:
        raise ShapeError(f"router: top_k {spec.top_k} of {spec.top_groups} groups of {groups.shape[-1]} experts")
    best_two = -mx.sort(-groups, axis=-1)[..., :2]
    kept = top_k(best_two.sum(axis=-1), spec.top_groups)
    mask = (kept[..., None] == mx.arange(spec.num_groups)).any(axis=-2)
    return mx.where(mask[..., None], groups, -mx.inf).reshape(choice.shape)


def renormalize(chosen: mx.array, scale: float) -> Float32[mx.array, "tokens k"]:
    """[RTR-024] weights = chosen / (sum + 1e-20) * scale: raw scores, without the bias."""
    return chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scale
