"""The decoder: tokens in, logits out, one sequence at a time.

The order of one decoded token, and the only place where the prerouter's schedule lives:

    for layer N:  h = h + mixer(norm(h))
                  x = norm(h); a dense layer: h = h + mlp(x), and that is all
                  routing = what layer N - 1 predicted at the token before, or the router's choice
                  h = h + experts(x, routing) + shared(x)
                  if N owns a head: predict (N + 1, next token) and hand the experts to the read-ahead threads at once
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from edge0_ref.adapters import Adapters
from edge0_ref.arithmetic import Arithmetic
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import (
    AttentionConfig,
    DenseConfig,
    GatedDeltaConfig,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    MoeConfig,
)
from edge0_ref.contract import (
    Array,
    Counters,
    Executor,
    ExecutorKind,
    Observe,
    Plan,
    PrerouterHead,
    Routing,
    RoutingSource,
)
from edge0_ref.dequant import embed
from edge0_ref.errors import NonFiniteError, UsageError
from edge0_ref.executors import SpareBank, make_executor
from edge0_ref.mixers.attention import Attention
from edge0_ref.mixers.gated_delta import GatedDelta
from edge0_ref.mixers.kda import Kda
from edge0_ref.mixers.mla import Mla
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.moe import GatedMlp, Moe
from edge0_ref.packed import open_experts
from edge0_ref.prefetch import Prefetcher
from edge0_ref.prerouter import build_features, routing_from_prediction, shift
from edge0_ref.snapshots import State, arrays_of, state_of
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]


def ignore(point: str, layer: int, value: Any) -> None:
    """The observer of nobody."""


def keep(layer: int, position: int, routing: Routing) -> Routing:
    """What routers and heads chose is what is executed."""
    return routing


class Layer:
    """Weights of one decoder layer: a mixer, and experts or a plain feed-forward part."""

    def __init__(self, weights: Weights, number: int, config: LayerConfig, epsilon: float, top_k: int) -> None:
        self.number = number
        self.mixer_norm, self.mlp_norm = weights.vector(config.mixer_norm), weights.vector(config.mlp_norm)
        self.mixer = make_mixer(weights, config, epsilon)
        self.mlp = make_mlp(weights, number, config, top_k)
        self.head = weights.head(number)


def make_mixer(weights: Weights, config: LayerConfig, epsilon: float) -> Attention | GatedDelta | Kda | Mla:
    match config.mixer:
        case AttentionConfig():
            return Attention(weights, config.mixer_path, config.mixer, epsilon)
        case GatedDeltaConfig():
            return GatedDelta(weights, config.mixer_path, config.mixer, epsilon)
        case KdaConfig():
            return Kda(weights, config.mixer_path, config.mixer, epsilon)
        case MlaConfig():
            return Mla(weights, config.mixer_path, config.mixer, epsilon)


def make_mlp(weights: Weights, number: int, config: LayerConfig, top_k: int) -> Moe | GatedMlp:
    match config.mlp:
        case MoeConfig():
            return Moe(weights, number, config.mlp_path, config.mlp, top_k)
        case DenseConfig():
            return GatedMlp(weights, config.mlp_path)


class ReferenceDecoder:
    """[DEC-040] One sequence through one model. Bits do not depend on chunks, executors, slots, threads, read modes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        config, adapters = checkpoint.config, adapters or Adapters()
        self.config, self.plan, self.observe = config, plan, observe or ignore
        self.counters, self.arithmetic = Counters(), arithmetic or Arithmetic()
        self.routing_source: RoutingSource = keep  # [ENG-072] a measurement may have another routing executed
        weights = Weights(checkpoint, adapters, self.arithmetic)
        self.embedding = weights.linear(config.embedding)
        self.head = self.embedding if config.head == config.embedding else weights.linear(config.head)
        self.final_norm = weights.vector(config.final_norm)
        self.layers = [
            Layer(weights, number, layer, config.norm_epsilon, plan.top_k) for number, layer in enumerate(config.layers)
        ]
        self.state, self._interrupted = self._new_state(), False
        self._files = open_experts(checkpoint, plan.read_mode)
        self._prefetcher = Prefetcher(plan.reader_threads)
        self._spare = SpareBank()
        self._decode: dict[int, Executor[Array]] = {}
        self._prefill: dict[int, Executor[Array]] = {}
        try:
            self._decode, self._prefill = plan.executors(self._files.stores, adapters.heads, self._executor)
        except BaseException:
            self.close()
            raise

    def _executor(self, layer: int, kind: ExecutorKind, slots: int) -> Executor[Array]:
        store, run = self._files.stores[layer], self.arithmetic.run_experts
        return make_executor(kind, store, slots, self._prefetcher, self.counters, run, self._spare)

    def _new_state(self) -> State:
        return State([layer.mixer.new_state() for layer in self.layers])

    @property
    def position(self) -> int:
        return self.state.position

    def prefill(self, tokens: Sequence[int]) -> Float32[np.ndarray, " vocab"]:
        """Append prompt tokens; logits of the last. Raises UsageError for no tokens or a full context."""
        for hidden in self._chunks(tokens):
            last = hidden[-1:]
        logits: Float32[np.ndarray, " vocab"] = self._whole(self._logits(last))[0]
        return logits

    def all_logits(self, tokens: Sequence[int]) -> Float32[np.ndarray, "tokens vocab"]:
        return self._whole(np.concatenate([self._logits(hidden) for hidden in self._chunks(tokens)]))

    def step(self, token: int) -> Float32[np.ndarray, " vocab"]:
        """Append one token, routed by the predictions made for its position where there are any."""
        self._begin([token])
        hidden = self._forward([token], self._decode)
        logits: Float32[np.ndarray, " vocab"] = self._whole(self._logits(hidden))[0]
        return logits

    def _chunks(self, tokens: Sequence[int]) -> Iterable[Activations]:
        """[PRE-008] A prompt is routed by the routers: predictions of an earlier turn are forgotten, not consumed."""
        self._begin(tokens)
        for first in range(0, len(tokens), self.plan.prefill_chunk):
            self.state.predicted = {}  # a chunk's own predictions too: the next chunk is prompt as well
            chunk = tokens[first : first + self.plan.prefill_chunk]
            executors = self._prefill if len(chunk) >= self.plan.prefill_from else self._decode
            for executor in self._decode.values():
                if executors is self._decode:
                    executor.release_hints()
                else:
                    executor.close()  # [DEC-058] their memory is the prompt's now
            try:
                hidden = self._forward(chunk, executors)
            finally:
                self._spare.clear()
            if executors is not self._decode and first + len(chunk) == len(tokens):
                self._read_ahead(*self.state.predicted)
            yield hidden

    def _begin(self, tokens: Sequence[int]) -> None:
        """[DEC-041] Refuse what cannot be done. From here on, what ends early is half done: only `reset` helps."""
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
        self._interrupted = True

    def _forward(self, tokens: Sequence[int], executors: dict[int, Executor[Array]]) -> Activations:
        """Hidden states after the last layer."""
        hidden = embed(self.embedding.weight, np.asarray(tokens))
        self.observe("embedding", -1, hidden)
        consumed, self.state.predicted = self.state.predicted, {}
        with np.errstate(over="ignore", invalid="ignore"):  # routers and logits are checked, and name the place
            for layer in self.layers:
                prefill = None if executors is self._decode else executors.get(layer.number)
                try:
                    if prefill is not None:
                        prefill.prepare(())  # a whole layer is read while its mixer computes
                    hidden = self._run_layer(layer, hidden, consumed.get(layer.number), executors)
                finally:
                    if prefill is not None:
                        prefill.close()  # a layer's memory is the next layer's
        self.state.position += len(tokens)
        return hidden

    def _run_layer(
        self, layer: Layer, hidden: Activations, predicted: Routing | None, executors: dict[int, Executor[Array]]
    ) -> Activations:
        number, epsilon, observe = layer.number, self.config.norm_epsilon, self.observe
        mixed = layer.mixer(rms_norm(hidden, layer.mixer_norm, epsilon), self.state.mixers[number])
        observe("mixer_output", number, mixed)
        hidden = hidden + mixed
        x = rms_norm(hidden, layer.mlp_norm, epsilon)
        match layer.mlp:
            case Moe():
                hidden = hidden + self._run_moe(layer.mlp, layer.head, x, predicted, executors[number])
            case GatedMlp():
                dense = layer.mlp(x)
                observe("dense_output", number, dense)
                hidden = hidden + dense
        observe("layer_output", number, hidden)
        return hidden

    def _run_moe(
        self,
        moe: Moe,
        head: PrerouterHead | None,
        x: Activations,
        predicted: Routing | None,
        executor: Executor[Array],
    ) -> Activations:
        number, observe = moe.layer, self.observe
        observe("moe_input", number, x)
        routing = predicted or self.routing_source(number, self.position, self._choose(moe, x))
        observe("routing", number, routing)
        routed = executor(x, routing)
        observe("experts_output", number, routed)
        observe("resident", number, executor.resident)
        shared = moe.shared_output(x)
        observe("shared_output", number, shared)
        if head is not None:
            self._predict_next(moe, head, x, routing)
            if executor is self._decode[number]:
                self._read_ahead(number + 1)
        y: Activations = routed + shared
        return y

    def _choose(self, moe: Moe, x: Activations) -> Routing:
        logits = moe.router_logits(x)
        self.observe("router_logits", moe.layer, logits)
        return moe.route(logits)

    def _predict_next(self, owner: Moe, head: PrerouterHead, x: Activations, routing: Routing) -> None:
        """[PRE-007] Predict from the executed experts: at the newest position, and for an observer at every one."""
        before = self.state.executed.get(owner.layer, np.full(routing.experts.shape[1], -1))
        features = build_features(x, routing.experts, shift(routing.experts, before), owner.num_experts)
        if self.observe is ignore:
            features = features[-1:]
        logits = self.arithmetic.predict(head, features)
        consumer = self.layers[owner.layer + 1].mlp
        assert isinstance(consumer, Moe)  # [PRE-012] no adapter with a head for another kind of layer was opened
        self.observe("prediction_logits", consumer.layer, logits)
        try:
            prediction = routing_from_prediction(logits[-1:], consumer.spec, self.arithmetic.route)
        except NonFiniteError as error:
            raise NonFiniteError(f"layer {owner.layer} predicting for layer {consumer.layer}: {error}") from None
        prediction = self.routing_source(consumer.layer, self.position + 1, prediction)
        self.state.executed[owner.layer] = routing.experts[-1]
        self.state.predicted[consumer.layer] = prediction

    def _read_ahead(self, *layers: int) -> None:
        """[PRE-024] Hand over what is predicted for these layers."""
        for layer in layers:
            self._decode[layer].prepare([int(expert) for expert in self.state.predicted[layer].experts[0]])

    def _whole(self, logits: Float32[np.ndarray, "tokens vocab"]) -> Float32[np.ndarray, "tokens vocab"]:
        """The call has come to its end: the next one may begin."""
        self._interrupted = False
        return logits

    def _logits(self, hidden: Activations) -> Float32[np.ndarray, "tokens vocab"]:
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.head(rms_norm(hidden, self.final_norm, self.config.norm_epsilon))
        self.observe("logits", -1, logits)
        if not np.isfinite(logits).all():
            raise NonFiniteError(f"logits of tokens up to position {self.position - 1} hold NaN or infinity")
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
        self._read_ahead(*self.state.predicted)

    def arrays_of(self, state: State) -> dict[str, Array]:
        """A snapshot as named arrays."""
        return arrays_of(state)

    def state_of(self, arrays: Mapping[str, Array]) -> State:
        """The snapshot that such arrays were made from, by any decoder of the same model."""
        return state_of(arrays, self._new_state().mixers)

    def close(self) -> None:
        for executors in (self._decode, self._prefill):
            for executor in executors.values():
                executor.close()
        self._spare.clear()
        self._prefetcher.close()
        self._files.close()
