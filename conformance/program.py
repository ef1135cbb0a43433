"""[BCK-020] A backend that is a program: each method is one request, and the program's reply is its result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.framing import Message
from conformance.process import Process, ProgramError
from conformance.profiles import FLOAT32
from conformance.program_parts import ProgramDecoder, ProgramExecutor
from conformance.reply import Reply
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import (
    ExecutorKind,
    ExpertStore,
    Lora,
    Observe,
    Plan,
    PrerouterHead,
    QuantizedMatrix,
    RouterSpec,
    Routing,
    SoftmaxTopK,
)
from edge0_ref.errors import BackendError

PROTOCOL = 1
Tensors = dict[str, np.ndarray]


def matrix_fields(matrix: QuantizedMatrix) -> tuple[dict[str, Any], Tensors]:
    """A quantised matrix as fields and tensors of a request."""
    form = {"bits": matrix.bits, "group_size": matrix.group_size}
    return form, {"packed": matrix.packed, "scales": matrix.scales, "biases": matrix.biases}


def spec_fields(spec: RouterSpec) -> tuple[dict[str, Any], Tensors]:
    """A router's settings as fields and tensors of a request."""
    if isinstance(spec, SoftmaxTopK):
        return {"family": "softmax", "top_k": spec.top_k}, {}
    fields = {"top_k": spec.top_k, "num_groups": spec.num_groups, "top_groups": spec.top_groups, "scale": spec.scale}
    return {"family": "sigmoid_group"} | fields, {} if spec.expert_bias is None else {"expert_bias": spec.expert_bias}


@dataclass(eq=False)
class Program:
    """A backend that runs as a process of its own; one that ended is started again by the next request."""

    command: str
    seconds: float = 60.0
    _process: Process | None = field(default=None, init=False)
    _handles: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        try:
            hello = self._running().hello
        except ProgramError as error:
            raise BackendError(str(error)) from error
        name, claims = hello.get("name"), hello.get("claims")
        if not isinstance(name, str) or not isinstance(claims, list) or not all(isinstance(c, str) for c in claims):
            self.close()
            raise BackendError(f"{self.command}: hello: got {dict(hello)}, wanted a name and a list of claims")
        self.name, self.activations = name, hello.get("activations", FLOAT32.name)
        self.claims = frozenset(claims) | {"program"}

    def _running(self) -> Process:
        if self._process is None or self._process.ended:
            self._process = Process(self.command, self.seconds)
            self._process.greet(PROTOCOL)
        return self._process

    def close(self) -> None:
        """[BCK-025] Close stdin and wait for the program to end."""
        if self._process is not None:
            self._process.close()

    def ask(self, operation: str, fields: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Reply:
        """One request and its reply. Raises the error that the reply names."""
        return self.send(operation, fields or {}, tensors or {}).checked()

    def send(
        self,
        operation: str,
        fields: dict[str, Any],
        tensors: Tensors,
        read: Callable[[int], Message] | None = None,
        observe: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """One request and its reply; reads that the program asks for on the way are made, observations passed on."""
        process = self._running()
        with process.whole(operation):
            message = process.exchange(Message({"operation": operation, **fields}, tensors), operation)
            while read is not None and "read" in message.fields:
                message = process.exchange(read(message.fields["read"]), operation)
            while observe is not None and "observe" in message.fields:
                observe(Reply(process, operation, message))
                message = process.exchange(None, operation)
            return Reply(process, operation, message)

    def handle(self) -> tuple[int, Process]:
        """A number for an executor or decoder, never used again, and the process that will know it."""
        self._handles += 1
        return self._handles, self._running()

    def knows(self, process: Process) -> bool:
        """Whether this process still runs: executors and decoders end with theirs."""
        return process is self._process and not process.ended

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        return self.ask("dequantize", *matrix_fields(matrix)).tensor("weights")

    def quantize(self, weights: np.ndarray, bits: int, group_size: int) -> QuantizedMatrix:
        reply = self.ask("quantize", {"bits": bits, "group_size": group_size}, {"weights": weights})
        return reply.built(QuantizedMatrix, "packed", "scales", "biases", bits=bits, group_size=group_size)

    def linear(self, x: np.ndarray, weight: QuantizedMatrix | np.ndarray, lora: Lora | None = None) -> np.ndarray:
        quantized = isinstance(weight, QuantizedMatrix)
        fields, tensors = matrix_fields(weight) if quantized else ({}, {"weight": weight})
        if lora is not None:
            fields, tensors = (
                fields | {"lora_scale": lora.scale},
                tensors | {"lora_down": lora.down, "lora_up": lora.up},
            )
        return self.ask("linear", fields, {"x": x} | tensors).tensor("y")

    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        fields, tensors = spec_fields(spec)
        return self.ask("route", fields, {"logits": logits} | tensors).built(Routing, "experts", "weights")

    def predict(self, head: PrerouterHead, features: np.ndarray) -> np.ndarray:
        return self.ask("predict", {}, vars(head) | {"features": features}).tensor("logits")

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> ProgramExecutor:
        return ProgramExecutor(self, kind, store, slots)

    def decoder(
        self, checkpoint: Checkpoint, plan: Plan, adapters: Adapters | None = None, observe: Observe | None = None
    ) -> ProgramDecoder:
        return ProgramDecoder(self, checkpoint, plan, adapters or Adapters(), observe)
