"""All layers for a batch of sequences, whole sequences in parallel, with the prerouter's schedule kept exact.

A consumer's experts at position t are those that the layer before it predicted at position t - 1. Within one layer all
positions are independent of each other's choice, so the schedule is sequential over layers only: predictions of layer
N, shifted by one position, route layer N + 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from jaxtyping import Float32, Int

from edge0_mlx.arrays import DeviceHead
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.prerouter import build_features, predict
from edge0_mlx.router import gather, softmax, top_k
from edge0_mlx.train.elementwise import sigmoid, swiglu
from edge0_mlx.train.experts import routed_experts
from edge0_mlx.train.floats import FloatWeights
from edge0_mlx.train.mixers import NO_LORAS, Loras, Projection, make_mixer
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import LayerConfig, MoeConfig
from edge0_ref.contract import Lora, SoftmaxTopK
from edge0_ref.errors import UnsupportedModelError

Watch = Callable[[str, int, Any], None]


@dataclass
class Carry:
    """What makes a position, for a batch of sequences: mixer states, and what the prerouter hands on.

    executed: owner -> experts [batch, k] of the last position; predicted: consumer -> logits [batch, experts].
    """

    mixers: list[Any]
    position: int = 0
    executed: dict[int, mx.array] = field(default_factory=dict)
    predicted: dict[int, mx.array] = field(default_factory=dict)

    @property
    def arrays(self) -> list[Any]:
        return [self.mixers, list(self.executed.values()), list(self.predicted.values())]


class MoeLayer:
    """Weights of one layer."""

    def __init__(self, weights: FloatWeights, number: int, layer: LayerConfig, epsilon: float) -> None:
        moe, path = layer.mlp, layer.mlp_path
        if not isinstance(moe, MoeConfig) or not isinstance(moe.router, SoftmaxTopK):
            raise UnsupportedModelError(f"training runs softmax-routed layers; {path} is another kind")
        self.number, self.moe, self.top_k = number, moe, moe.router.top_k
        self.mixer_norm, self.mlp_norm = weights.vector(layer.mixer_norm), weights.vector(layer.mlp_norm)
        self.mixer = make_mixer(weights, layer, epsilon)
        self.router, self.experts = weights.matrix(f"{path}.gate"), weights.experts(number, moe)
        shared = f"{path}.{moe.shared_name}"
        self.shared_in = Projection(weights, f"{shared}.gate_proj", f"{shared}.up_proj")
        self.shared_out = Projection(weights, f"{shared}.down_proj")
        self.shared_gate = weights.matrix(f"{shared}_gate") if moe.shared_gate else None

    def shared_output(self, x: mx.array, loras: Loras) -> mx.array:
        (y,) = self.shared_out(swiglu(*self.shared_in(x, loras)), loras)
        return y if self.shared_gate is None else sigmoid(x @ self.shared_gate) * y


class ParallelModel:
    """A model for whole sequences: the teacher (float weights, no heads) or the student (int4, heads, LoRA)."""

    def __init__(self, checkpoint: Checkpoint, merged: Mapping[str, Lora] | None = None) -> None:
        config, weights = checkpoint.config, FloatWeights(checkpoint, merged or {})
        self.config, self.epsilon = config, config.norm_epsilon
        self.embedding = mx.contiguous(weights.matrix(config.embedding).T)
        self.head = weights.matrix(config.head)
        self.final_norm = weights.vector(config.final_norm)
        self.layers = [MoeLayer(weights, number, layer, self.epsilon) for number, layer in enumerate(config.layers)]

    def new_carry(self, batch: int) -> Carry:
        return Carry([layer.mixer.new_state(batch) for layer in self.layers])

    def __call__(
        self,
        tokens: Int[mx.array, "batch tokens"],
        carry: Carry | None = None,
        *,
        heads: Mapping[int, DeviceHead] | None = None,
        loras: Loras = NO_LORAS,
        decode_from: int | None = None,
        watch: Watch | None = None,
    ) -> tuple[Float32[mx.array, "batch tokens vocab"], Carry]:
        """[PRE-021] Logits of every position, and what the next call goes on from.

        heads: owner -> head; decode_from: the first position, counted from the start of the sequence, that is routed
        by predictions: those before it are prompt. None: all are.
        """
        batch, length = tokens.shape
        before = carry or self.new_carry(batch)
        first = before.position
        after = Carry([], first + length)
        decoded = np.arange(first, first + length) >= (first + length if decode_from is None else decode_from)
        call = Call(heads or {}, loras, decoded, before, after, watch)
        hidden = self.embedding[tokens]
        for layer in self.layers:
            hidden = self._run_layer(layer, hidden, call)
        return rms_norm(hidden, self.final_norm, self.epsilon) @ self.head, after

    def _run_layer(self, layer: MoeLayer, hidden: mx.array, call: "Call") -> mx.array:
        number = layer.number
        normed = rms_norm(hidden, layer.mixer_norm, self.epsilon)
        mixed, state = layer.mixer(normed, call.before.mixers[number], call.loras)
        call.after.mixers.append(state)
        hidden = hidden + mixed
        x = rms_norm(hidden, layer.mlp_norm, self.epsilon)
        logits = call.routing_logits(layer, x)
        chosen = top_k(mx.stop_gradient(logits), layer.top_k)
        weights = softmax(gather(logits, chosen))
        call.note("moe_input", number, x)
        call.note("experts", number, chosen)
        flat = np.array(chosen).reshape(-1, layer.top_k)
        routed = routed_experts(x.reshape(-1, x.shape[-1]), flat, weights.reshape(flat.shape), layer.experts)
        if number in call.heads:
            call.predict_next(layer, x, chosen)
        return hidden + routed.reshape(x.shape) + layer.shared_output(x, call.loras)


@dataclass
class Call:
    """One pass over the layers. decoded [tokens]: which positions are routed by predictions.

    predicted: consumer -> logits [batch, tokens, experts] for each position, made at the position before it; those of
    a first position that nobody predicted are zeros, and no decoded position.
    """

    heads: Mapping[int, DeviceHead]
    loras: Loras
    decoded: np.ndarray
    before: Carry
    after: Carry
    watch: Watch | None
    predicted: dict[int, mx.array] = field(default_factory=dict)

    def note(self, point: str, layer: int, value: Any) -> None:
        if self.watch is not None:
            self.watch(point, layer, value)

    def routing_logits(self, layer: MoeLayer, x: mx.array) -> mx.array:
        """[PRE-021] What a layer's experts are chosen by: its prediction where there is one to consume."""
        number = layer.number
        predicted = self.predicted.get(number)
        if predicted is not None and self.decoded.all():
            return predicted
        router_logits = x @ layer.router
        self.note("router_logits", number, router_logits)
        if predicted is None or not self.decoded.any():
            return router_logits
        return mx.where(mx.array(self.decoded)[:, None], predicted, router_logits)

    def predict_next(self, owner: MoeLayer, x: mx.array, executed: mx.array) -> None:
        """[PRE-007] Every position predicts from executed experts; the last one's prediction is for the next call."""
        batch, number = executed.shape[0], owner.number
        last = self.before.executed.get(number)
        last = mx.full((batch, owner.top_k), -1) if last is None else last
        shifted = mx.concatenate([last[:, None], executed[:, :-1].astype(last.dtype)], axis=1)
        features = build_features(x, executed, shifted, owner.moe.num_experts)
        logits = predict(self.heads[number], features)
        self.note("prediction_logits", number + 1, logits)
        held = self.before.predicted.get(number + 1)
        held = mx.zeros((batch, logits.shape[-1])) if held is None else held
        self.predicted[number + 1] = mx.concatenate([held[:, None], logits[:, :-1]], axis=1)
        self.after.executed[number] = executed[:, -1]
        self.after.predicted[number + 1] = logits[:, -1]
