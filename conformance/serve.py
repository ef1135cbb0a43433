"""The other side: any Python backend as a program. `python -m conformance.serve --backend NAME`.

With it a backend can be held to the spec on another machine (`--exec "ssh HOST python -m conformance.serve ..."`), or
in a process of its own, where its crash ends nobody else.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from conformance.framing import Message
from conformance.profiles import activations_of
from conformance.wire import Wire, WireStore
from edge0_ref.adapters import Adapters
from edge0_ref.contract import (
    ExpertLayout,
    Lora,
    Plan,
    PrerouterHead,
    QuantizedMatrix,
    Routing,
    SigmoidGroup,
    SoftmaxTopK,
)
from edge0_ref.errors import BackendError, Edge0Error
from edge0_ref.inventory import open_checkpoint

PROTOCOL = 1
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]
PLAN = tuple(Plan.__dataclass_fields__)
LAYOUT = tuple(ExpertLayout.__dataclass_fields__)


@dataclass
class Server:
    """Carries out requests on a backend.

    parts: open executors and decoders, stores: of executors, states: snapshots of decoders; all by number.
    """

    backend: Any
    wire: Wire
    parts: dict[int, Any] = field(default_factory=dict)
    stores: dict[int, WireStore] = field(default_factory=dict)
    states: dict[int, list[Any]] = field(default_factory=dict)

    def run(self) -> None:
        while (request := self.wire.next_request()) is not None:
            try:
                told, tensors = self.answer(request)
            except Edge0Error as error:
                told, tensors = {"error": {"kind": type(error).__name__, "message": str(error)}}, {}
            self.wire.reply(Message(told | self.state(request.fields), tensors))
            if request.fields["operation"] in ("executor_close", "decoder_close"):
                self.forget(request.fields)
        for part in self.parts.values():
            part.close()

    def forget(self, fields: Mapping[str, Any]) -> None:
        for table in (self.parts, self.stores, self.states):
            table.pop(fields.get("executor", fields.get("decoder")), None)

    def state(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What a reply tells of the executor or decoder that the request named, a refusal too."""
        if "executor" in fields and fields["executor"] in self.parts:
            executor = self.parts[fields["executor"]]
            self.stores[fields["executor"]].settle(executor.counters.reads)
            return {"resident": sorted(executor.resident), "counters": vars(executor.counters)}
        if "decoder" in fields and fields["decoder"] in self.parts:
            decoder = self.parts[fields["decoder"]]
            return {"position": decoder.position, "counters": vars(decoder.counters)}
        return {}

    def answer(self, request: Message) -> Answer:
        operation: str = request.fields["operation"]
        noun, _, what = operation.partition("_")
        if operation == "hello":
            told = {"name": self.backend.name, "claims": sorted(self.backend.claims)}
            return {"protocol": PROTOCOL, "activations": activations_of(self.backend)} | told, {}
        if noun == "executor":
            return self.executor(what, request.fields, request.tensors)
        if noun == "decoder":
            return self.decoder(what, request.fields, request.tensors)
        return {}, self.function(operation, request.fields, request.tensors)

    def array(self, value: Any) -> np.ndarray:
        return np.asarray(self.backend.to_numpy(value))

    def function(self, operation: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """An operation without a state."""
        given: Callable[[str], Any] = lambda name: self.backend.from_numpy(tensors[name])  # noqa: E731
        match operation:
            case "dequantize":
                return {"weights": self.array(self.backend.dequantize(matrix_in(fields, tensors)))}
            case "quantize":
                matrix = self.backend.quantize(tensors["weights"], fields["bits"], fields["group_size"])
                return {"packed": matrix.packed, "scales": matrix.scales, "biases": matrix.biases}
            case "linear":
                weight = matrix_in(fields, tensors) if "packed" in tensors else tensors["weight"]
                lora = None
                if "lora_scale" in fields:
                    lora = Lora(tensors["lora_down"], tensors["lora_up"], fields["lora_scale"])
                return {"y": self.array(self.backend.linear(given("x"), weight, lora))}
            case "route":
                return dict(vars(self.backend.route(given("logits"), spec_in(fields, tensors))))
            case "predict":
                head = PrerouterHead(tensors["fc1"], tensors["fc2"], tensors["linear"])
                return {"logits": self.array(self.backend.predict(head, given("features")))}
            case _:
                raise BackendError(f"operation {operation!r} is not known")

    def executor(self, what: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        number, result = fields["executor"], {}
        if what == "open":
            layout = ExpertLayout(*(fields[name] for name in LAYOUT))
            store = self.stores[number] = WireStore(self.wire, fields["num_experts"], layout)
            self.parts[number] = self.backend.executor(fields["kind"], store, fields["slots"])
        executor = self.parts[number]
        match what:
            case "prepare":
                executor.prepare(fields["experts"])
            case "call":
                routing = Routing(tensors["experts"], tensors["weights"])
                result["y"] = self.array(executor(self.backend.from_numpy(tensors["x"]), routing))
            case "release":
                executor.release_hints()
            case "close":
                executor.close()
        return {}, result

    def decoder(self, what: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Answer:
        number, result, told = fields["decoder"], {}, {}
        if what == "open":
            checkpoint, plan = open_checkpoint(fields["checkpoint"]), Plan(*(fields[name] for name in PLAN))
            observe = partial(self.observed, number) if fields["observe"] else None
            self.parts[number] = self.backend.decoder(checkpoint, plan, adapters_in(fields, tensors), observe)
        decoder = self.parts[number]
        match what:
            case "prefill" | "all_logits":
                result["logits"] = self.array(getattr(decoder, what)(fields["tokens"]))
            case "step":
                result["logits"] = self.array(decoder.step(fields["token"]))
            case "snapshot":
                states = self.states.setdefault(number, [])
                told["state"] = len(states)
                states.append(decoder.snapshot())
            case "restore":
                decoder.restore(self.states[number][fields["state"]])
            case "reset":
                decoder.reset()
            case "close":
                decoder.close()
        return told, result

    def observed(self, number: int, point: str, layer: int, value: Any) -> None:
        """[BCK-027] What happens inside a decoder, told before the reply."""
        fields = {"observe": point, "layer": layer, "counters": vars(self.parts[number].counters)}
        if isinstance(value, Routing):
            self.wire.tell(Message(fields, dict(vars(value))))
        elif isinstance(value, frozenset):
            self.wire.tell(Message(fields | {"resident": sorted(value)}))
        else:
            self.wire.tell(Message(fields, {"value": self.array(value)}))


def matrix_in(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> QuantizedMatrix:
    parts = (tensors["packed"], tensors["scales"], tensors["biases"])
    return QuantizedMatrix(*parts, fields["bits"], fields["group_size"])


def spec_in(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> SoftmaxTopK | SigmoidGroup:
    if fields["family"] == "softmax":
        return SoftmaxTopK(fields["top_k"])
    numbers = (fields[name] for name in ("top_k", "num_groups", "top_groups", "scale"))
    return SigmoidGroup(*numbers, tensors.get("expert_bias"))


def adapters_in(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Adapters:
    heads = {
        owner: PrerouterHead(*(tensors[f"head.{owner}.{name}"] for name in ("fc1", "fc2", "linear")))
        for owner in fields["heads"]
    }
    loras = {
        module: Lora(tensors[f"lora.{module}.down"], tensors[f"lora.{module}.up"], scale)
        for module, scale in fields["loras"].items()
    }
    return Adapters(heads, loras)


def main() -> None:
    from conformance.loading import load_backend

    parser = argparse.ArgumentParser("python -m conformance.serve", description="A Python backend as a program.")
    parser.add_argument("--backend", required=True, help="a name from edge0.backends, or package.module:factory")
    name = parser.parse_args().backend
    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever the backend prints is not a reply
    Server(load_backend(name), Wire(sys.stdin.buffer, replies)).run()


if __name__ == "__main__":
    main()
