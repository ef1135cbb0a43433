"""The prerouter: a small head that predicts, one token ahead, which experts the next layer will use.

Heads are float32, whatever the activations: what they predict decides what is read. Those of equal shape are stacked,
so that one product serves all layers of a step: features and heads may have leading axes.
"""

from dataclasses import replace

import mlx.core as mx
from jaxtyping import Float32, Int

from edge0_mlx.arrays import DeviceHead
from edge0_mlx.functions import gelu
from edge0_mlx.router import Choice, choose
from edge0_ref.contract import RouterSpec, SigmoidGroup
from edge0_ref.errors import ShapeError


def predict(
    head: DeviceHead, features: Float32[mx.array, "*heads tokens features"]
) -> Float32[mx.array, "*heads tokens experts"]:
    """[PRE-001] logits = linear f + fc2 gelu(fc1 f)."""
    if features.shape[-1] != head.fc1.shape[-2]:
        raise ShapeError(f"prerouter: {features.shape[-1]} features, the head takes {head.fc1.shape[-2]}")
    return features @ head.linear + gelu(features @ head.fc1) @ head.fc2


def k_hot(experts: Int[mx.array, "*batch k"], num_experts: int) -> Float32[mx.array, "*batch experts"]:
    """[PRE-003] 1 where an expert was executed, 0 elsewhere. An id below 0 means "none" and sets nothing."""
    return (experts[..., None] == mx.arange(num_experts)).any(axis=-2).astype(mx.float32)


def shift(executed: Int[mx.array, "tokens k"], before: Int[mx.array, " k"]) -> Int[mx.array, "tokens k"]:
    """[PRE-005] Row t holds the experts of token t - 1; row 0 those of the token `before` this call (-1: none)."""
    return mx.concatenate([before[None], executed[:-1]])


def build_features(
    hidden: mx.array,
    executed: Int[mx.array, "*batch k"],
    executed_before: Int[mx.array, "*batch k"],
    num_experts: int,
) -> Float32[mx.array, "*batch features"]:
    """[PRE-002] [hidden | experts executed now | experts executed one token before], in this order."""
    parts = [hidden.astype(mx.float32), k_hot(executed, num_experts), k_hot(executed_before, num_experts)]
    return mx.concatenate(parts, axis=-1)


def routing_from_prediction(logits: mx.array, spec: RouterSpec) -> Choice:
    """[PRE-006] The prediction *is* the routing: the family's own rule on the head's logits, without expert bias."""
    return choose(logits, replace(spec, expert_bias=None) if isinstance(spec, SigmoidGroup) else spec)
