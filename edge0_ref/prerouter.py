"""The prerouter: a small head that predicts, one token ahead, which experts the next layer will use.

Layer N's head sees the hidden state its own experts saw, the experts layer N executed for this token, and those it
executed for the token before. What it predicts is the routing of layer N + 1 for the *next* token.
Source of the architecture: edge0 (arXiv 2609.18063).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float32, Int64

from edge0_ref.contract import Array, PrerouterHead, RouterSpec, Routing, SigmoidGroup
from edge0_ref.errors import ShapeError
from edge0_ref.functions import gelu
from edge0_ref.lora import linear
from edge0_ref.router import route


def predict(
    head: PrerouterHead,
    features: Float32[np.ndarray, "tokens features"],
    multiply: Callable[[Array, Array], Array] | None = None,
) -> Float32[np.ndarray, "tokens experts"]:
    """[PRE-001] logits = linear f + fc2 gelu(fc1 f), the two parts added in float64 and rounded once.

    multiply: x, weight -> x weight^T, if not as the reference does.
    """
    if features.shape[1] != head.fc1.shape[1]:
        raise ShapeError(f"prerouter: {features.shape[1]} features, the head takes {head.fc1.shape[1]}")
    multiply = multiply or linear
    direct = multiply(features, head.linear)
    learned = multiply(gelu(multiply(features, head.fc1)), head.fc2)
    logits: Float32[np.ndarray, "tokens experts"] = (direct.astype(np.float64) + learned).astype(np.float32)
    return logits


def k_hot(experts: Int64[np.ndarray, "tokens k"], num_experts: int) -> Float32[np.ndarray, "tokens experts"]:
    """[PRE-003] 1 where an expert was executed, 0 elsewhere. An id below 0 means "none" and sets nothing.

    >>> k_hot(np.array([[2, 0], [-1, -1]]), 3)
    array([[1., 0., 1.],
           [0., 0., 0.]], dtype=float32)
    """
    hot = np.zeros((experts.shape[0], num_experts), np.float32)
    token, slot = np.nonzero(experts >= 0)
    hot[token, experts[token, slot]] = 1.0
    return hot


def shift(executed: Int64[np.ndarray, "tokens k"], before: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, "tokens k"]:
    """[PRE-005] Row t holds the experts of token t - 1; row 0 those of the token `before` this call (-1: none).

    >>> shift(np.array([[1, 2], [3, 4]]), np.array([-1, -1]))
    array([[-1, -1],
           [ 1,  2]])
    """
    return np.concatenate([before[None, :], executed[:-1]])


def build_features(
    hidden: Float32[np.ndarray, "tokens hidden"],
    executed: Int64[np.ndarray, "tokens k"],
    executed_before: Int64[np.ndarray, "tokens k"],
    num_experts: int,
) -> Float32[np.ndarray, "tokens features"]:
    """[PRE-002] [hidden | experts executed now | experts executed one token before], in this order."""
    return np.concatenate([hidden, k_hot(executed, num_experts), k_hot(executed_before, num_experts)], axis=1)


def routing_from_prediction(
    logits: Float32[np.ndarray, "tokens experts"],
    spec: RouterSpec,
    choose: Callable[[Array, RouterSpec], Routing] | None = None,
) -> Routing:
    """[PRE-006] The prediction *is* the routing: the family's own rule on the head's logits, without expert bias.

    choose: what carries out the rule, if not `route`.
    """
    return (choose or route)(logits, replace(spec, expert_bias=None) if isinstance(spec, SigmoidGroup) else spec)
