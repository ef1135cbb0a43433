"""The decoder: tokens in, logits out, one sequence at a time.

The order of one decoded token, and the only place where the prerouter's schedule lives:

    for layer N:  x = norm(h + mixer(norm(h)))
                  routing = what layer N - 1 predicted at the token before, or the router's choice
                  h = h + experts(x, routing) + shared(x)
                  if N owns a head: predict (N + 1, next token) and hand the experts to the read-ahead threads at once
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import AttentionConfig, GatedDeltaConfig, LayerConfig, MoeConfig
from edge0_ref.contract import Array, Counters, Executor, Observe, Plan, Routing
from edge0_ref.dequant import embed
from edge0_ref.errors import UnsupportedModelError, UsageError
from edge0_ref.executors import make_executor
from edge0_ref.expert_store import ExpertFiles
from edge0_ref.mixers.attention import Attention
from edge0_ref.mixers.gated_delta import GatedDelta
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.moe import Moe
from edge0_ref.prefetch import Prefetcher
from edge0_ref.prerouter import build_features, predict, routing_from_prediction, shift
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]


def ignore(point: str, layer: int, value: Any) -> None:
    """The observer of nobody."""


@dataclass
class State:
    """Everything that makes a position: mixer states, and what the prerouter carries from token to token.

    executed: layer -> experts [k] it executed for the last token; predicted: layer -> routing of the next token.
    """

    mixers: list[Any]
    position: int = 0
    executed: dict[int, Array] = field(default_factory=dict)
    predicted: dict[int, Routing] = field(default_factory=dict)

    def copy(self) -> "State":
        return State([m.copy() for m in self.mixers], self.position, copy.deepcopy(self.executed), dict(self.predicted))


class Layer:
    """Weights of one decoder layer, and the executors of its experts."""

    def __init__(self, weights: Weights, number: int, config: LayerConfig, epsilon: float, top_k: int) -> None:
        self.number = number
        self.mixer_norm, self.mlp_norm = weights.vector(config.mixer_norm), weights.vector(config.mlp_norm)
        self.mixer = make_mixer(weights, config, epsilon)
        if not isinstance(config.mlp, MoeConfig):
            raise UnsupportedModelError(f"layer {number}: dense layers arrive with the second model family")
        self.moe = Moe(weights, number, config.mlp_path, config.mlp, top_k)
        self.head = weights.adapters.heads.get(number)


def make_mixer(weights: Weights, config: LayerConfig, epsilon: float) -> Attention | GatedDelta:
    match config.mixer:
        case AttentionConfig():
            return Attention(weights, config.mixer_path, config.mixer, epsilon)
        case GatedDeltaConfig():
            return GatedDelta(weights, config.mixer_path, config.mixer, epsilon)


class ReferenceDecoder:
    """[DEC-040] One sequence through one model. Bits do not depend on chunks, executors, slots, threads, read modes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
    ) -> None:
        config, adapters = checkpoint.config, adapters or Adapters()
        self.config, self.plan, self.observe = config, plan, observe or ignore
        self.counters = Counters()
        weights = Weights(checkpoint, adapters)
        self.embedding = weights.linear(config.embedding)
        self.head = self.embedding if config.head == config.embedding else weights.linear(config.head)
        self.final_norm = weights.vector(config.final_norm)
        self.layers = [
            Layer(weights, number, layer, config.norm_epsilon, plan.top_k) for number, layer in enumerate(config.layers)
        ]
        self._files = ExpertFiles(checkpoint, plan.read_mode)
        self._prefetcher = Prefetcher(plan.reader_threads)
        self._decode = self._executors(plan.executor)
        same = plan.prefill_executor == plan.executor
        self._prefill = self._decode if same else self._executors(plan.prefill_executor)
        self.state, self._interrupted = self._new_state(), False

    def _executors(self, kind: Any) -> dict[int, Executor[Array]]:
        return {
            layer: make_executor(kind, store, self.plan.slots, self._prefetcher, self.counters)
            for layer, store in self._files.stores.items()
        }

    def _new_state(self) -> State:
        return State([layer.mixer.new_state() for layer in self.layers])

    @property
    def position(self) -> int:
        return self.state.position

    def prefill(self, tokens: Sequence[int]) -> Float32[np.ndarray, " vocab"]:
        """Append prompt tokens; logits of the last. Raises UsageError for no tokens or a full context."""
        for hidden in self._chunks(tokens):
            last = hidden[-1:]
        return self._logits(last)[0]

    def all_logits(self, tokens: Sequence[int]) -> Float32[np.ndarray, "tokens vocab"]:
        return np.concatenate([self._logits(hidden) for hidden in self._chunks(tokens)])

    def step(self, token: int) -> Float32[np.ndarray, " vocab"]:
        """Append one token, routed by the predictions made for its position where there are any."""
        self._check([token])
        return self._logits(self._forward([token], self._decode))[0]

    def _chunks(self, tokens: Sequence[int]) -> Iterable[Activations]:
        """[PRE-008] A prompt is routed by the routers: predictions of an earlier turn are forgotten, not consumed."""
        self._check(tokens)
        for first in range(0, len(tokens), self.plan.prefill_chunk):
            self.state.predicted = {}  # a chunk's own predictions too: the next chunk is prompt as well
            for executor in self._decode.values():
                executor.release_hints()
            yield self._forward(tokens[first : first + self.plan.prefill_chunk], self._prefill)

    def _check(self, tokens: Sequence[int]) -> None:
        if self._interrupted:
            raise UsageError("the last call failed half-way: reset the decoder, or restore a snapshot")
        if not len(tokens):
            raise UsageError("no tokens: a prompt needs at least one")
        outside = [token for token in tokens if not 0 <= token < self.config.vocab_size]
        if outside:
            raise UsageError(f"token id {outside[0]} is outside the vocabulary of {self.config.vocab_size}")
        if self.position + len(tokens) > self.plan.context:
            raise UsageError(
                f"context full: {self.position} tokens and {len(tokens)} more, room for {self.plan.context}"
            )

    def _forward(self, tokens: Sequence[int], executors: dict[int, Executor[Array]]) -> Activations:
        """[DEC-041] Hidden states after the last layer. An error leaves a half-advanced state: only `reset` helps."""
        self._interrupted = True
        hidden = embed(self.embedding.weight, np.asarray(tokens))
        self.observe("embedding", -1, hidden)
        consumed, self.state.predicted = self.state.predicted, {}
        for layer in self.layers:
            executor = executors[layer.number]
            hidden = self._run_layer(layer, hidden, consumed.get(layer.number), executor)
            if executors is not self._decode:
                executor.close()  # a layer's prefill memory is the next layer's
        self.state.position += len(tokens)
        self._interrupted = False
        return hidden

    def _run_layer(
        self, layer: Layer, hidden: Activations, predicted: Routing | None, executor: Executor[Array]
    ) -> Activations:
        number, epsilon, observe = layer.number, self.config.norm_epsilon, self.observe
        mixed = layer.mixer(rms_norm(hidden, layer.mixer_norm, epsilon), self.state.mixers[number])
        observe("mixer_output", number, mixed)
        hidden = hidden + mixed
        x = rms_norm(hidden, layer.mlp_norm, epsilon)
        observe("moe_input", number, x)
        routing = predicted or self._choose(layer, x)
        observe("routing", number, routing)
        routed = executor(x, routing)
        observe("experts_output", number, routed)
        shared = layer.moe.shared_output(x)
        observe("shared_output", number, shared)
        if layer.head is not None:
            self._predict_next(layer, x, routing)
        hidden = hidden + (routed + shared)
        observe("layer_output", number, hidden)
        return hidden

    def _choose(self, layer: Layer, x: Activations) -> Routing:
        logits = layer.moe.router_logits(x)
        self.observe("router_logits", layer.number, logits)
        return layer.moe.route(logits)

    def _predict_next(self, layer: Layer, x: Activations, routing: Routing) -> None:
        """[PRE-007] Every position predicts from the executed experts; only the newest prediction is kept."""
        assert layer.head is not None
        before = self.state.executed.get(layer.number, np.full(routing.experts.shape[1], -1))
        features = build_features(x, routing.experts, shift(routing.experts, before), layer.moe.num_experts)
        logits = predict(layer.head, features)
        consumer = self.layers[layer.number + 1]
        self.observe("prediction_logits", consumer.number, logits)
        prediction = routing_from_prediction(logits[-1:], consumer.moe.spec)
        self.state.executed[layer.number] = routing.experts[-1]
        self.state.predicted[consumer.number] = prediction
        self._decode[consumer.number].prepare([int(expert) for expert in prediction.experts[0]])

    def _logits(self, hidden: Activations) -> Float32[np.ndarray, "tokens vocab"]:
        logits = self.head(rms_norm(hidden, self.final_norm, self.config.norm_epsilon))
        self.observe("logits", -1, logits)
        return logits

    def reset(self) -> None:
        self.state, self._interrupted = self._new_state(), False
        for executor in self._decode.values():
            executor.release_hints()

    def snapshot(self) -> State:
        return self.state.copy()

    def restore(self, state: State) -> None:
        """Return to a snapshot; its predictions are read ahead again."""
        self.reset()
        self.state = state.copy()
        for layer, prediction in state.predicted.items():
            self._decode[layer].prepare([int(expert) for expert in prediction.experts[0]])

    def close(self) -> None:
        for executors in (self._decode, self._prefill):
            for executor in executors.values():
                executor.close()
        self._prefetcher.close()
        self._files.close()
