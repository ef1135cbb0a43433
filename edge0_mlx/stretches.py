"""One call's way through the layers, built a stretch at a time.

A stretch is the pieces between two things that the host has a say in: a router's choice, experts that are not in slots
together, attention over a text that grows. For one token it is one compiled function of fixed shapes, so that a
token costs the host a few calls instead of thousands. A prompt's chunks have any length and are built operation by
operation: a compiled function would be traced anew, and kept, for each length.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from edge0_mlx.blocks import Angles, Arrays, AttentionBlock, DeltaBlock, MoeFinish, Passed, Piece
from edge0_mlx.executors import MlxExecutor
from edge0_mlx.heads import Predicted
from edge0_mlx.layers import Layer
from edge0_mlx.mixers.gated_delta import DeltaState
from edge0_mlx.moe import Moe
from edge0_mlx.slots import Evaluations
from edge0_ref.contract import Routing

Built = tuple[Passed, list[Arrays]]


def chain(pieces: Sequence[Piece], passed: Passed, inputs: Sequence[Arrays]) -> Built:
    """Pieces one after the other, each with its own inputs; what the last passes on, and what each put out."""
    outputs = []
    for piece, taken in zip(pieces, inputs, strict=True):
        passed, output = piece(passed, *taken)
        outputs.append(output)
    return passed, outputs


class Stretches:
    """`chain`, compiled once for every row of pieces that a token meets."""

    def __init__(self) -> None:
        self._functions: dict[tuple[Piece, ...], Callable[[Passed, Sequence[Arrays]], Built]] = {}

    def __call__(self, pieces: Sequence[Piece], passed: Passed, inputs: Sequence[Arrays]) -> Built:
        row = tuple(pieces)
        function = self._functions.get(row)
        if function is None:
            function = self._functions[row] = mx.compile(partial(chain, row))
        return function(passed, inputs)

    def forget(self) -> None:
        """Let go of what is compiled, and of the slots it was compiled over."""
        self._functions.clear()


@dataclass(frozen=True)
class Host:
    """What a pass asks of the decoder, and tells it.

    choose: the router's choice for a layer that nobody predicted for, which costs an evaluation. executed: a layer's x
    and the experts that it ran: its head may predict now. note: for an observer, if there is one.
    """

    choose: Callable[[Moe, mx.array], Routing]
    executed: Callable[[int, mx.array, Routing], None]
    owners: Container[int]
    note: Callable[[str, int, Any], None]
    observed: bool
    evaluations: Evaluations
    stretches: Stretches
    submits: bool  # a GPU may begin with a stretch while the next one is built and waits for its slots


class Pass:
    """One call. mixers: states by layer, replaced as the call goes on; predicted: routing of consumers."""

    def __init__(
        self,
        hidden: mx.array,
        mixers: list[Any],
        predicted: Mapping[int, Predicted],
        executors: Mapping[int, MlxExecutor],
        host: Host,
        *,
        keeps_slots: bool,
    ) -> None:
        self._passed: Passed = (hidden, hidden)
        self._tokens, self._mixers, self._predicted = hidden.shape[0], mixers, predicted
        self._executors, self._host, self._keeps_slots = executors, host, keeps_slots
        self._angles: Angles = {}
        self._pieces: list[Piece] = []
        self._inputs: list[Arrays] = []
        self._after: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._build: Callable[..., Built] = host.stretches if self._tokens == 1 else chain

    def through(self, layers: Sequence[Layer]) -> mx.array:
        """Hidden states after the last layer."""
        for layer in layers:
            self._mix(layer)
            if isinstance(layer.finish, MoeFinish):
                self._run_experts(layer.number, layer.finish)
            else:
                self._add(layer.finish, (), self._after_dense, layer.number)
        self._build_stretch()
        return self._passed[0]

    def _add(self, piece: Piece, inputs: Arrays, after: Callable[..., None], *facts: Any) -> None:
        """A piece of the stretch; `after(outputs, *facts)` once it is built."""
        self._pieces.append(piece)
        self._inputs.append(inputs)
        self._after.append((after, facts))

    def _build_stretch(self) -> None:
        if not self._pieces:
            return
        self._passed, outputs = self._build(self._pieces, self._passed, self._inputs)
        followed, self._pieces, self._inputs, self._after = self._after, [], [], []
        for (after, facts), output in zip(followed, outputs, strict=True):
            after(output, *facts)
        if self._host.submits:
            self._host.evaluations.submit(self._passed[0])

    def _mix(self, layer: Layer) -> None:
        number, block, state = layer.number, layer.block, self._mixers[layer.number]
        if isinstance(block, DeltaBlock):
            self._add(block, state.arrays, self._after_mixer, layer)
        else:
            angles = block.angles(state, self._tokens, self._angles)
            self._add(block.opening, angles, self._attend, block, number)
            self._build_stretch()
            self._add(block.closing, self._attended, self._after_mixer, layer)

    def _attend(self, begun: Arrays, block: AttentionBlock, number: int) -> None:
        attended, gate, self._mixers[number] = block.mixer.attend(begun, self._mixers[number])
        self._attended = attended, gate

    def _after_mixer(self, output: Arrays, layer: Layer) -> None:
        mixed, self._x, *state = output
        if state:
            self._mixers[layer.number] = DeltaState.of(*state)
        if self._host.observed:
            self._host.note("mixer_output", layer.number, mixed)
            if isinstance(layer.finish, MoeFinish):
                self._host.note("moe_input", layer.number, self._x)

    def _run_experts(self, number: int, finish: MoeFinish) -> None:
        predicted, executor = self._predicted.get(number), self._executors[number]
        if predicted is None:
            self._build_stretch()
            routing = self._host.choose(finish.moe, self._x)
        else:
            routing = predicted.routing
        held = executor.hold(routing) if self._keeps_slots else None
        if held is None:
            self._build_stretch()
            routed = executor(self._x, routing)
            self._add(finish, (routed,), self._after_experts, number, routing)
        else:
            weights = mx.array(routing.weights) if predicted is None else predicted.weights
            self._add(finish.over(held.bank), (held.slots, weights), self._after_experts, number, routing, executor)
        if not self._keeps_slots:
            self._build_stretch()
            executor.close()  # a layer's prefill memory is the next layer's

    def _after_experts(self, output: Arrays, number: int, routing: Routing, reading: MlxExecutor | None = None) -> None:
        """reading: whose slots a graph reads that has not been built by the executor itself."""
        routed, shared, hidden = output
        if reading is not None:
            self._host.evaluations.reads_slots_of(reading, routed)
        if self._host.observed:
            resident = self._executors[number].resident
            seen = {"routing": routing, "experts_output": routed, "resident": resident, "shared_output": shared}
            for point, value in seen.items():
                self._host.note(point, number, value)
        if number in self._host.owners:
            self._host.executed(number, self._x, routing)
        self._host.note("layer_output", number, hidden)

    def _after_dense(self, output: Arrays, number: int) -> None:
        self._host.note("dense_output", number, output[0])
        self._host.note("layer_output", number, output[1])
