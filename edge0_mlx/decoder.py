"""The decoder: tokens in, logits out, one sequence at a time, and one evaluation a decoded token.

    for layer N:  hidden, x = block(hidden)                  mixer and norms
                  routing = what was predicted for N, known to the host since the last token,
                            or the router's choice, which costs an evaluation
                  hidden = finish(hidden, x, experts(x, routing))
    evaluate logits and the predictions of all heads together, then hand the predictions to the read-ahead threads

A layer that must ask its router waits for everything before it; what is waiting to be predicted is predicted then too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32

from edge0_mlx.arrays import to_numpy
from edge0_mlx.blocks import (
    Angles,
    Arrays,
    AttentionBlock,
    Block,
    DeltaBlock,
    DenseFinish,
    Mixed,
    MoeFinish,
    Norms,
)
from edge0_mlx.dequant import embed
from edge0_mlx.device import Device
from edge0_mlx.executors import MlxExecutor, make_executor
from edge0_mlx.heads import Heads, Pending, Predicted
from edge0_mlx.mixers.attention import Attention
from edge0_mlx.mixers.gated_delta import GatedDelta
from edge0_mlx.mixers.kda import Kda
from edge0_mlx.mixers.mla import Mla
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.moe import GatedMlp, Moe
from edge0_mlx.prerouter import shift
from edge0_mlx.slots import Evaluations
from edge0_mlx.weights import Weights
from edge0_ref.adapters import Adapters
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
from edge0_ref.contract import Array, Counters, ExecutorKind, Observe, Plan, Routing, RoutingSource
from edge0_ref.errors import NonFiniteError, UsageError
from edge0_ref.packed import open_experts
from edge0_ref.prefetch import Prefetcher

Activations = Float[mx.array, "tokens hidden"]


def keep(layer: int, position: int, routing: Routing) -> Routing:
    """What routers and heads chose is what is executed."""
    return routing


@dataclass
class State:
    """Everything that makes a position: mixer states, and what the prerouter carries from token to token.

    executed: layer -> experts [k] it executed for the last token; predicted: layer -> routing of the next token.
    """

    mixers: list[Any]
    position: int = 0
    executed: dict[int, Array] = field(default_factory=dict)
    predicted: dict[int, Predicted] = field(default_factory=dict)

    def copy(self) -> "State":
        """Its parts are never changed, only replaced, so they need no copies."""
        return State(list(self.mixers), self.position, dict(self.executed), dict(self.predicted))


class Layer:
    """Weights of one decoder layer, as graphs; the executors of its experts are the decoder's."""

    def __init__(self, weights: Weights, number: int, config: LayerConfig, top_k: int, following: Block | None) -> None:
        self.number = number
        epsilon = weights.checkpoint.config.norm_epsilon
        norms = Norms(weights.vector(config.mixer_norm), weights.vector(config.mlp_norm), epsilon)
        mixer, mlp = make_mixer(weights, config, epsilon), make_mlp(weights, number, config, top_k)
        self.block: Block = (
            DeltaBlock(mixer, norms) if isinstance(mixer, GatedDelta | Kda) else AttentionBlock(mixer, norms)
        )
        self.finish = MoeFinish(mlp, following) if isinstance(mlp, Moe) else DenseFinish(mlp)


def make_layers(weights: Weights, top_k: int) -> list[Layer]:
    """Last layer first: one token's graph of a layer reaches into the layer that follows."""
    layers: list[Layer] = []
    for number, config in reversed(list(enumerate(weights.checkpoint.config.layers))):
        layers.append(Layer(weights, number, config, top_k, layers[-1].block if layers else None))
    return layers[::-1]


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


class Call(NamedTuple):
    """What the layers of one call share. angles: computed by the first layer that needs them."""

    executors: Mapping[int, MlxExecutor]
    predicted: Mapping[int, Predicted]
    angles: Angles


Begun = Arrays | None  # what has been built of a layer's block already


class MlxDecoder:
    """[DEC-042] One sequence through one model; everything of MLX happens in the thread that calls it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        device: Device,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
    ) -> None:
        config, adapters = checkpoint.config, adapters or Adapters()
        self.config, self.plan, self._device, self._observe = config, plan, device, observe
        self.routing_source: RoutingSource = keep  # [ENG-072] a measurement may have another routing executed
        self.counters = Counters()
        self.evaluations = Evaluations(self.counters)
        weights = Weights(checkpoint, adapters, device)
        self.embedding = weights.linear(config.embedding)
        self.head = self.embedding if config.head == config.embedding else weights.linear(config.head)
        self.final_norm = weights.vector(config.final_norm)
        self.layers = make_layers(weights, plan.top_k)
        experts = {layer.number: layer.finish.moe for layer in self.layers if isinstance(layer.finish, MoeFinish)}
        self.heads = Heads(adapters.heads, {number: moe.spec for number, moe in experts.items()})
        self._logits_of_one = mx.compile(self._logits)
        self._pending: list[Pending] = []
        self.state, self._interrupted = self._new_state(), False
        self._files = open_experts(checkpoint, plan.read_mode)
        self._prefetcher = Prefetcher(plan.reader_threads)
        self._decode: dict[int, MlxExecutor] = {}
        self._prefill: dict[int, MlxExecutor] = {}
        try:
            self._decode = self._executors(plan.executor)
            same = plan.prefill_executor == plan.executor
            self._prefill = self._decode if same else self._executors(plan.prefill_executor)
        except BaseException:
            self.close()
            raise

    def _executors(self, kind: ExecutorKind) -> dict[int, MlxExecutor]:
        shared = self._prefetcher, self.counters, self._device, self.evaluations
        stores = self._files.stores.items()
        return {layer: make_executor(kind, store, self.plan.slots, *shared) for layer, store in stores}

    def _new_state(self) -> State:
        return State([layer.block.mixer.new_state() for layer in self.layers])

    @property
    def position(self) -> int:
        return self.state.position

    def prefill(self, tokens: Sequence[int]) -> Float32[mx.array, " vocab"]:
        """Append prompt tokens; logits of the last. Raises UsageError for no tokens or a full context."""
        *_, last = self._chunks(tokens, every=False)
        return last[0]

    def all_logits(self, tokens: Sequence[int]) -> Float32[mx.array, "tokens vocab"]:
        return mx.concatenate(list(self._chunks(tokens, every=True)))

    def step(self, token: int) -> Float32[mx.array, " vocab"]:
        """Append one token, routed by the predictions made for its position where there are any."""
        self._check([token])
        hidden = self._forward([token], self._decode)
        return self._evaluated_logits(self._logits_of_one(hidden))[0]

    def _chunks(self, tokens: Sequence[int], every: bool) -> Iterator[mx.array]:
        """[PRE-008] Logits of a prompt, chunk by chunk; of its very last token only, unless `every` is wanted.

        A prompt is routed by the routers: predictions of an earlier turn are forgotten, not consumed.
        """
        self._check(tokens)
        for first in range(0, len(tokens), self.plan.prefill_chunk):
            self.state.predicted = {}  # a chunk's own predictions too: the next chunk is prompt as well
            for executor in self._decode.values():
                executor.release_hints()
            hidden = self._forward(tokens[first : first + self.plan.prefill_chunk], self._prefill)
            if every:
                yield self._evaluated_logits(self._logits(hidden))
            elif first + self.plan.prefill_chunk >= len(tokens):
                yield self._evaluated_logits(self._logits_of_one(hidden[-1:]))
            else:
                self._evaluate(hidden)
        mx.clear_cache()  # a chunk's buffers are of no use to single tokens

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

    def _forward(self, tokens: Sequence[int], executors: dict[int, MlxExecutor]) -> Activations:
        """[DEC-041] The graph of the hidden states after the last layer. An error leaves a half-advanced state."""
        self._interrupted = True
        hidden = embed(self.embedding.weight, mx.array(list(tokens))).astype(self._device.activations)
        self._note("embedding", -1, hidden)
        consumed, self.state.predicted = self.state.predicted, {}
        call = Call(executors, consumed, {})
        begun: Begun = None
        for layer in self.layers:
            hidden, begun = self._run_layer(layer, hidden, begun, call)
            if executors is not self._decode and layer.number in executors:
                executors[layer.number].close()  # a layer's prefill memory is the next layer's
            elif self._device.gpu:
                # its slots are full: it may run while the next layer is built and waits for its own
                self.evaluations.submit(hidden)
        self.state.position += len(tokens)
        return hidden

    def _run_layer(self, layer: Layer, hidden: Activations, begun: Begun, call: Call) -> tuple[Activations, Begun]:
        """Hidden states after a layer, and what has been built of the next one already."""
        number, mixers = layer.number, self.state.mixers
        if begun is None:
            mixed, mixers[number] = layer.block(hidden, mixers[number], call.angles)
        else:
            mixed, mixers[number] = layer.block.end(hidden, begun, mixers[number])
        self._note("mixer_output", number, mixed.mixed)
        match layer.finish:
            case MoeFinish():
                hidden, begun = self._run_moe(layer.finish, mixed, call)
            case DenseFinish():
                (dense, hidden), begun = layer.finish(mixed.hidden, mixed.x), None
                self._note("dense_output", number, dense)
        self._note("layer_output", number, hidden)
        return hidden, begun

    def _run_moe(self, finish: MoeFinish, mixed: Mixed, call: Call) -> tuple[Activations, Begun]:
        number = finish.moe.layer
        executor = call.executors[number]
        self._note("moe_input", number, mixed.x)
        predicted = call.predicted.get(number)
        if predicted is None:
            routing = self.routing_source(number, self.position, self._choose(finish.moe, mixed.x))
        else:
            routing = predicted.routing
        self._note("routing", number, routing)
        held = executor.hold(routing)
        if held is None:
            routed = executor(mixed.x, routing)
            shared, hidden = finish(mixed.hidden, mixed.x, routed)
            begun: Begun = None
        else:
            following = self.state.mixers[number + 1] if number + 1 < len(self.layers) else None
            weights = predicted.weights if predicted else mx.array(routing.weights)
            routed, shared, hidden, *rest = finish.between(held, weights, mixed, following, call.angles)
            self.evaluations.reads_slots_of(executor, routed)
            begun = tuple(rest) or None
        self._note("experts_output", number, routed)
        if self._observe is not None:
            self._note("resident", number, executor.resident)
        self._note("shared_output", number, shared)
        if number in self.heads:
            self._predict_next(number, mixed.x, routing)
        return hidden, begun

    def _choose(self, moe: Moe, x: Activations) -> Routing:
        """The router's choice: an evaluation, in which predictions that wait are made as well."""
        logits = moe.router_logits(x)
        self._note("router_logits", moe.layer, logits)
        experts, weights = moe.route(logits)
        self._evaluate(logits, experts, weights)
        moe.check(to_numpy(logits))
        return Routing(np.array(experts).astype(np.int64), np.array(weights))

    def _predict_next(self, number: int, x: Activations, routing: Routing) -> None:
        """[PRE-007] Every position predicts from the executed experts; only the newest prediction is kept."""
        experts, first = routing.experts, self.state.executed.get(number)
        if first is None:
            first = np.full(experts.shape[1], -1)
        if len(experts) > 1:
            self._pending.append(Pending(number, x[-1:], experts[-1], experts[-2]))
        else:
            self._pending.append(Pending(number, x, experts[0], first))
        self.state.executed[number] = experts[-1]
        if self._observe is not None:  # of all tokens, apart from what is used, so that observing changes nothing
            executed = mx.array(experts)
            logits = self.heads.logits(number, x, executed, shift(executed, mx.array(first)))
            self._note("prediction_logits", number + 1, logits)

    def _evaluate(self, *arrays: mx.array) -> None:
        """[PRE-024] Evaluate, and hand what was predicted to the consumers' executors."""
        pending, self._pending = self._pending, []
        predictions = self.heads.predict(pending)
        states = [state.arrays for state in self.state.mixers]
        self.evaluations.run(arrays, states, [(p.logits, p.experts, p.weights) for p in predictions])
        for made in predictions:
            for consumer, predicted in made.routings().items():
                self.state.predicted[consumer] = predicted
                self._decode[consumer].prepare(predicted.routing.experts[0].tolist())

    def _logits(self, hidden: Activations) -> Float32[mx.array, "tokens vocab"]:
        return self.head(rms_norm(hidden, self.final_norm, self.config.norm_epsilon)).astype(mx.float32)

    def _evaluated_logits(self, logits: Float32[mx.array, "tokens vocab"]) -> Float32[mx.array, "tokens vocab"]:
        self._evaluate(logits)
        self._interrupted = False
        self._note("logits", -1, logits)
        if not np.isfinite(np.array(logits, copy=False)).all():
            raise NonFiniteError(f"logits of tokens up to position {self.position - 1} hold NaN or infinity")
        return logits

    def _note(self, point: str, layer: int, value: Any) -> None:
        """[DEC-048] What is shown may not have run yet: an observer who reads it has it run, which changes no bit."""
        if self._observe is not None:
            self._observe(point, layer, value)

    def _forget(self) -> None:
        """Of a call that failed half-way, nothing is left."""
        self.evaluations.forget()
        self._pending, self._interrupted = [], False

    def reset(self) -> None:
        self._forget()
        self.state = self._new_state()
        for executor in self._decode.values():
            executor.release_hints()

    def snapshot(self) -> State:
        return self.state.copy()

    def restore(self, state: State) -> None:
        """Return to a snapshot; its predictions are read ahead again."""
        self.reset()
        self.state = state.copy()
        for layer, predicted in state.predicted.items():
            self._decode[layer].prepare(predicted.routing.experts[0].tolist())

    def close(self) -> None:
        self._forget()
        for executors in (self._decode, self._prefill):
            for executor in executors.values():
                executor.close()
        self._prefetcher.close()
        self._files.close()
        mx.clear_cache()
