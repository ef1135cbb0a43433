"""The decoder: tokens in, logits out, one sequence at a time, and one evaluation a decoded token.

    for layer N:  hidden, x = mixer and norms
                  routing = what was predicted for N, known to the host since the last token,
                            or the router's choice, which costs an evaluation
                  hidden = hidden + experts(x, routing) + shared(x)
    evaluate logits and the predictions of all heads together, then hand the predictions to the read-ahead threads

A layer that must ask its router waits for everything before it; what is waiting to be predicted is predicted then too.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32

from edge0_mlx.arrays import to_numpy
from edge0_mlx.blocks import MoeFinish
from edge0_mlx.dequant import embed
from edge0_mlx.device import Device
from edge0_mlx.executors import MlxExecutor, make_executor
from edge0_mlx.heads import Heads, Pending, Predicted
from edge0_mlx.layers import Layer
from edge0_mlx.memory import give_back, measured_memory
from edge0_mlx.mixers.norm import rms_norm
from edge0_mlx.moe import Moe
from edge0_mlx.prerouter import shift
from edge0_mlx.slots import Evaluations
from edge0_mlx.snapshots import State, arrays_of, state_of
from edge0_mlx.stretches import Host, Pass, Stretches
from edge0_mlx.weights import Weights
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Counters, ExecutorKind, Observe, Plan, Routing, RoutingSource
from edge0_ref.errors import NonFiniteError, UsageError
from edge0_ref.packed import open_experts
from edge0_ref.prefetch import Prefetcher

Activations = Float[mx.array, "tokens hidden"]
MEASURED_STEPS = 64  # what `measures` tells about


def keep(layer: int, position: int, routing: Routing) -> Routing:
    """What routers and heads chose is what is executed."""
    return routing


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
        self.layers = [
            Layer(weights, number, layer, config.norm_epsilon, plan.top_k) for number, layer in enumerate(config.layers)
        ]
        experts = {layer.number: layer.finish.moe for layer in self.layers if isinstance(layer.finish, MoeFinish)}
        self.heads = Heads(adapters.heads, {number: moe.spec for number, moe in experts.items()})
        self._embed_one, self._logits_of_one = mx.compile(self._embed), mx.compile(self._logits)
        self._stretches = Stretches()
        self._host = Host(
            choose=self._choose,
            executed=self._predict_next,
            owners=frozenset(self.heads.owners),
            note=self._note,
            observed=observe is not None,
            evaluations=self.evaluations,
            stretches=self._stretches,
            submits=device.gpu,
        )
        self._pending: list[Pending] = []
        self._slots_kept = True
        self._steps: deque[tuple[float, int]] = deque(maxlen=MEASURED_STEPS)  # seconds of the host, evaluations
        self.state, self._interrupted = self._new_state(), False
        self._files = open_experts(checkpoint, plan.read_mode)
        self._prefetcher = Prefetcher(plan.reader_threads)
        self._decode: dict[int, MlxExecutor] = {}
        self._prefill: dict[int, MlxExecutor] = {}
        try:
            self._decode, self._prefill = plan.executors(self._files.stores, adapters.heads, self._executor)
        except BaseException:
            self.close()
            raise

    def _executor(self, layer: int, kind: ExecutorKind, slots: int) -> MlxExecutor:
        shared = self._prefetcher, self.counters, self._device, self.evaluations
        return make_executor(kind, self._files.stores[layer], slots, *shared)

    def _new_state(self) -> State:
        return State([layer.block.mixer.new_state() for layer in self.layers])

    @property
    def position(self) -> int:
        return self.state.position

    def prefill(self, tokens: Sequence[int]) -> Float32[mx.array, " vocab"]:
        """Append prompt tokens; logits of the last. Raises UsageError for no tokens or a full context."""
        *_, last = self._chunks(tokens, every=False)
        return self._whole(last)[0]

    def all_logits(self, tokens: Sequence[int]) -> Float32[mx.array, "tokens vocab"]:
        return self._whole(mx.concatenate(list(self._chunks(tokens, every=True))))

    def step(self, token: int) -> Float32[mx.array, " vocab"]:
        """Append one token, routed by the predictions made for its position where there are any."""
        start, waited, evaluations = time.perf_counter(), self._waited, self.counters.evaluations
        self._begin([token])
        hidden = self._forward([token], self._decode)
        logits = self._whole(self._evaluated_logits(self._logits_of_one(hidden)))[0]
        seconds = time.perf_counter() - start - (self._waited - waited)
        self._steps.append((seconds, self.counters.evaluations - evaluations))
        return logits

    @property
    def _waited(self) -> float:
        """Seconds so far in which this thread waited for graphs or reads."""
        return self.evaluations.seconds + self.counters.wait_seconds

    def measures(self) -> Mapping[str, float]:
        """[ENG-079] graph_build: what the host does in a step besides waiting for graphs and reads; median."""
        if not self._steps:
            return measured_memory()
        seconds, evaluations = zip(*self._steps, strict=True)
        steps = {"graph_build_ms_per_token": median(seconds) * 1e3, "evaluations_per_token": fmean(evaluations)}
        return {**steps, **measured_memory()}

    def _chunks(self, tokens: Sequence[int], every: bool) -> Iterator[mx.array]:
        """[PRE-008] Logits of a prompt, chunk by chunk; of its very last token only, unless `every` is wanted.

        A prompt is routed by the routers: predictions of an earlier turn are forgotten, not consumed.
        """
        self._begin(tokens)
        for first in range(0, len(tokens), self.plan.prefill_chunk):
            self.state.predicted = {}  # a chunk's own predictions too: the next chunk is prompt as well
            chunk = tokens[first : first + self.plan.prefill_chunk]
            last = first + len(chunk) == len(tokens)
            executors = self._prefill if len(chunk) >= self.plan.prefill_from else self._decode
            self._keep_slots(executors is self._decode)
            hidden = self._forward(chunk, executors)
            if every:
                logits = self._evaluated_logits(self._logits(hidden))
            elif last:
                logits = self._evaluated_logits(self._logits_of_one(hidden[-1:]))
            else:
                self._evaluate(hidden)
            if last and not self._slots_kept:
                self._keep_slots(True)
                self._read_ahead(*self.state.predicted)
            if every or last:
                yield logits
        mx.clear_cache()  # a chunk's buffers are of no use to single tokens

    def _keep_slots(self, kept: bool) -> None:
        """[DEC-058] Slots hold what they have, or their memory is a prompt's for the length of a call."""
        for executor in self._decode.values():
            if kept:
                executor.release_hints()
            else:
                executor.close()
        if not (kept and self._slots_kept):
            self._forget_slots()
            give_back()
        self._slots_kept = kept

    def _forget_slots(self) -> None:
        """Of what has been compiled over slots, nothing keeps them."""
        self._stretches.forget()
        for layer in self.layers:
            if isinstance(layer.finish, MoeFinish):
                layer.finish.forget()

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

    def _forward(self, tokens: Sequence[int], executors: Mapping[int, MlxExecutor]) -> Activations:
        """The graph of the hidden states after the last layer."""
        hidden = (self._embed_one if len(tokens) == 1 else self._embed)(mx.array(list(tokens)))
        self._note("embedding", -1, hidden)
        consumed, self.state.predicted = self.state.predicted, {}
        self._next = self.position + len(tokens)  # whose routing this call predicts
        decodes = executors is self._decode
        call = Pass(hidden, self.state.mixers, consumed, executors, self._host, keeps_slots=decodes)
        hidden = call.through(self.layers)
        self.state.position += len(tokens)
        return hidden

    def _embed(self, tokens: mx.array) -> Activations:
        return embed(self.embedding.weight, tokens).astype(self._device.activations)

    def _choose(self, moe: Moe, x: Activations) -> Routing:
        """The router's choice: an evaluation, in which predictions that wait are made as well."""
        logits = moe.router_logits(x)
        self._note("router_logits", moe.layer, logits)
        experts, weights = moe.route(logits)
        self._evaluate(logits, experts, weights)
        moe.check(to_numpy(logits))
        chosen = Routing(np.array(experts).astype(np.int64), np.array(weights))
        return self.routing_source(moe.layer, self.position, chosen)

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
                routing = self.routing_source(consumer, self._next, predicted.routing)
                if routing is not predicted.routing:
                    predicted = Predicted(routing, mx.array(routing.weights))
                self.state.predicted[consumer] = predicted
                if self._slots_kept:
                    self._read_ahead(consumer)

    def _read_ahead(self, *layers: int) -> None:
        for layer in layers:
            self._decode[layer].prepare(self.state.predicted[layer].routing.experts[0].tolist())

    def _logits(self, hidden: Activations) -> Float32[mx.array, "tokens vocab"]:
        return self.head(rms_norm(hidden, self.final_norm, self.config.norm_epsilon)).astype(mx.float32)

    def _evaluated_logits(self, logits: Float32[mx.array, "tokens vocab"]) -> Float32[mx.array, "tokens vocab"]:
        self._evaluate(logits)
        self._note("logits", -1, logits)
        if not np.isfinite(np.array(logits, copy=False)).all():
            raise NonFiniteError(f"logits of tokens up to position {self.position - 1} hold NaN or infinity")
        return logits

    def _whole(self, logits: Float32[mx.array, "tokens vocab"]) -> Float32[mx.array, "tokens vocab"]:
        """The call has come to its end: the next one may begin."""
        self._interrupted = False
        return logits

    def _note(self, point: str, layer: int, value: Any) -> None:
        """[DEC-048] What is shown may not have run yet: an observer who reads it has it run, which changes no bit."""
        if self._observe is not None:
            self._observe(point, layer, value)

    def _forget(self) -> None:
        """Of a call that failed half-way, nothing is left."""
        self.evaluations.forget()
        if self._interrupted:
            self._forget_slots()  # what failed may have let go of some
            for executor in self._prefill.values():
                executor.close()  # in mid-layer it still holds that layer's memory
        self._pending, self._interrupted, self._slots_kept = [], False, True

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
        self._read_ahead(*self.state.predicted)

    def arrays_of(self, state: State) -> dict[str, Array]:
        """A snapshot as named arrays."""
        return arrays_of(state)

    def state_of(self, arrays: Mapping[str, Array]) -> State:
        """The snapshot that such arrays were made from, by any decoder of the same model."""
        return state_of(arrays, self._new_state().mixers)

    def close(self) -> None:
        self._forget()
        self._forget_slots()
        for executors in (self._decode, self._prefill):
            for executor in executors.values():
                executor.close()
        self._prefetcher.close()
        self._files.close()
        mx.clear_cache()
