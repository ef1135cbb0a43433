"""Running `spec/vectors`: decoding cases, and carrying out the operations they name (spec/README.md describes both)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from conformance import oracles
from conformance.cases import ExpertsRecipe
from conformance.checkpoints import write_safetensors
from conformance.driven import Driven
from conformance.pieces import piece
from conformance.profiles import FLOAT32, Profile
from conformance.recording_store import RecordingStore
from edge0_ref import functions
from edge0_ref.adapters import open_adapters
from edge0_ref.bits import narrow, widen
from edge0_ref.config import read_config
from edge0_ref.contract import (
    Expert,
    Lora,
    PrerouterHead,
    QuantizedMatrix,
    RouterSpec,
    Routing,
    SigmoidGroup,
    SoftmaxTopK,
)
from edge0_ref.dequant import dequantize_as
from edge0_ref.engine.sampling import DrawStream, SamplingSettings, sample
from edge0_ref.errors import ReadError
from edge0_ref.kernels import fold_sum
from edge0_ref.prerouter import build_features, shift

DTYPES = {"float16": "u2", "bfloat16": "u2", "float32": "u4", "float64": "u8", "uint32": "u4"}
WORDS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "uint32": "U32", "int64": "I64"}
CLAIMS = {"dequantize": "dequant", "route": "router", "predict": "prerouter"} | {n: n for n in ("quantize", "linear")}
EMBEDDED = Path(__file__).resolve().parent.parent / "edge0_ref" / "assets" / "kjv-moe"


@dataclass(frozen=True)
class Case:
    """One case of a vector file, its values decoded when they are needed."""

    values: Mapping[str, Any]
    shared: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def claims(self, kind: str) -> tuple[str, ...]:
        """Claims the case needs; functions of edge0 itself concern whoever promises its bits."""
        if kind:
            return (f"executor:{kind}",)
        base = (CLAIMS.get(self.values["operation"], "bits"),)
        return (*base, "lora") if "lora" in self.values["inputs"] else base

    def kinds(self, every: tuple[str, ...]) -> tuple[str, ...]:
        """The executors it concerns: all, one, or "" when it concerns none."""
        operation = self.values["operation"]
        if operation == "executor":
            return every
        return (self.values["inputs"]["kind"],) if operation in ("residency", "sequence") else ("",)

    def arguments(self) -> dict[str, Any]:
        """Decoded inputs, fresh for each call. Files of adapters keep the dtype words of their tensors beside them."""
        inputs: dict[str, Any] = self.decoded(self.values["inputs"])
        if self.values["operation"] == "adapters":
            for raw, file in zip(self.values["inputs"]["files"], inputs["files"], strict=True):
                file["words"] = {name: word_of(value) for name, value in raw["tensors"].items()}
        return inputs

    def bounds(self, profile: Profile) -> dict[str, Any]:
        """[NUM-011] By output. A vector states float32's; of another profile they follow from the same inputs."""
        bounds: dict[str, Any] = self.decoded(self.values.get("bound", {}))
        if profile is FLOAT32 or not bounds:
            return bounds
        inputs = self.arguments()
        match self.values["operation"]:
            case "linear":
                lora = Lora(**inputs["lora"]) if "lora" in inputs else None
                bounds["y"] = oracles.linear(inputs["x"], weight_of(inputs["weight"]), lora, profile).bound
            case "predict":
                head = PrerouterHead(**inputs["head"])
                bounds["logits"] = oracles.head_logits(head, inputs["features"], profile).bound
            case "executor" | "sequence":
                experts = experts_of(inputs["experts"])
                calls = [call for call in inputs.get("events", [inputs]) if "x" in call]
                parts = [oracles.experts_output(c["x"], Routing(**c["routing"]), experts, profile) for c in calls]
                bounds["y"] = np.concatenate([part.bound for part in parts])
        return bounds

    def decoded(self, value: Any) -> Any:
        """Tensors as arrays, references followed, anything else as it is."""
        if isinstance(value, list):
            return [self.decoded(item) for item in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"ref"}:
            return self.decoded(self.shared[value["ref"]])
        return tensor(value) if "shape" in value else {name: self.decoded(item) for name, item in value.items()}


def word_of(value: Mapping[str, Any]) -> str:
    """How a safetensors header calls the dtype of a tensor."""
    (dtype,) = set(value) - {"shape"}
    return WORDS[dtype]


def tensor(value: Mapping[str, Any]) -> np.ndarray:
    """A tensor from the words of its elements; one word stands for all."""
    (dtype,) = set(value) - {"shape"}
    words, shape = value[dtype], tuple(value["shape"])
    if dtype == "int64":
        return np.array(words, np.int64).reshape(shape)
    words = [words] * int(np.prod(shape)) if isinstance(words, str) else words
    patterns = np.array([int(word, 16) for word in words], DTYPES[dtype]).reshape(shape)
    return patterns if dtype == "bfloat16" else patterns.view(dtype)


def matrix_of(value: Mapping[str, Any]) -> QuantizedMatrix:
    return QuantizedMatrix(value["packed"], value["scales"], value["biases"], value["bits"], value["group_size"])


def weight_of(value: Any) -> QuantizedMatrix | np.ndarray:
    return matrix_of(value) if isinstance(value, dict) else value


def spec_of(value: dict[str, Any]) -> RouterSpec:
    fields = {name: item for name, item in value.items() if name != "family"}
    return SoftmaxTopK(**fields) if value["family"] == "softmax" else SigmoidGroup(**fields)


def carry_out(driven: Driven, operation: str, kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs of an operation, by name. Raises what the operation raises."""
    match operation:
        case "dequantize":
            return {"weights": driven.dequantize(matrix_of(inputs["matrix"]))}
        case "quantize":
            made = driven.quantize(inputs["weights"], inputs["bits"], inputs["group_size"])
            return {"packed": made.packed, "scales": made.scales, "biases": made.biases}
        case "linear":
            lora = Lora(**inputs["lora"]) if "lora" in inputs else None
            return {"y": driven.linear(inputs["x"], weight_of(inputs["weight"]), lora)}
        case "route":
            return vars(driven.route(inputs["logits"], spec_of(inputs["spec"])))
        case "predict":
            return {"logits": driven.predict(PrerouterHead(**inputs["head"]), inputs["features"])}
        case "executor":
            return {"y": run_executor(driven, kind, inputs)}
        case "residency":
            return run_residency(driven, kind, inputs)
        case "sequence":
            return {"y": run_sequence(driven, kind, inputs)}
        case _:
            return own_function(operation, inputs)


def experts_of(values: list[dict[str, Any]]) -> list[Expert]:
    return [Expert(*(matrix_of(expert[name]) for name in ("gate", "up", "down"))) for expert in values]


def run_executor(driven: Driven, kind: Any, inputs: dict[str, Any]) -> np.ndarray:
    store = RecordingStore.of(experts_of(inputs["experts"]))
    executor = driven.executor(kind, store, inputs["slots"])
    return executor(inputs["x"], Routing(**inputs["routing"]))


def run_sequence(driven: Driven, kind: Any, inputs: dict[str, Any]) -> np.ndarray:
    """The outputs of all calls, one after the other; before each step every read that was asked for has ended."""
    store, outputs = RecordingStore.of(experts_of(inputs["experts"])), []
    executor = driven.executor(kind, store, inputs["slots"])
    for event in inputs["events"]:
        if "hint" in event:
            executor.prepare(event["hint"])
        elif "x" in event:
            outputs.append(executor(event["x"], Routing(**event["routing"])))
        elif "release" in event:
            executor.release_hints()
        else:
            executor.close()
        store.settle_count(executor.counters.reads)
    return np.concatenate(outputs)


def run_residency(driven: Driven, kind: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the store was asked for and what is resident after each event, and the counters at the end."""
    store = RecordingStore(ExpertsRecipe(inputs["num_experts"]))
    executor = driven.executor(kind, store, inputs["slots"])
    told = []
    for event in inputs["events"]:
        seen, asked, store.failing = len(store.reads), executor.counters.reads, set(event.get("fails", ()))
        if "hint" in event:
            executor.prepare(event["hint"])
        elif "call" in event:
            rows = np.array(event["call"], np.int64)
            routing = Routing(rows, np.full(rows.shape, 1 / rows.shape[1], np.float32))
            try:
                executor(np.zeros((len(rows), 32), np.float32), routing)
            except ReadError:
                if event.get("raises") != "ReadError":
                    raise
        elif "release" in event:
            executor.release_hints()
        else:
            executor.close()
        # by event: a second try reads once more than was asked for, and so must not stand for a later read
        reads = store.settle_count(seen + executor.counters.reads - asked)[seen:]
        told.append({"reads": sorted(set(reads)), "resident": sorted(executor.resident)})
    return {"events": told, "counters": vars(executor.counters)}


class OneDraw(DrawStream):
    """A draw stream that gives what a case says."""

    def __init__(self, draw: float) -> None:
        self.draw = draw

    def next(self) -> float:
        return self.draw


def own_function(operation: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Functions of edge0 itself."""
    if (outputs := piece(operation, inputs)) is not None:
        return outputs
    match operation:
        case "features":
            before = shift(inputs["executed"], inputs["before"])
            return {"features": build_features(inputs["hidden"], inputs["executed"], before, inputs["num_experts"])}
        case "widen":
            return {"values": widen(inputs["values"])}
        case "narrow":
            dtype = np.dtype("uint16" if inputs["dtype"] == "bfloat16" else inputs["dtype"])
            return {"values": narrow(inputs["values"], dtype)}
        case "dequantize_as":
            return {"weights": dequantize_as(matrix_of(inputs["matrix"]))}
        case "elementwise":
            return {"y": getattr(functions, inputs["function"])(inputs["x"])}
        case "fold":
            return {"sum": np.float64(fold_sum(inputs["terms"].copy(), len(inputs["terms"])))}
        case "sample":
            settings, draws = SamplingSettings(**inputs["settings"]), OneDraw(inputs["draw"])
            sequences = (inputs["prompt"].tolist(), inputs["generated"].tolist())
            return {"token": sample(inputs["logits"], settings, *sequences, draws)}
        case "draws":
            stream = DrawStream(inputs["seed"])
            return {"draws": np.array([stream.next() for _ in range(inputs["count"])])}
        case "adapters":
            return opened_adapters(inputs["files"])
        case _:
            raise ValueError(f"vectors name the operation {operation!r}, which this suite does not know")


def opened_adapters(files: list[dict[str, Any]]) -> dict[str, Any]:
    with TemporaryDirectory(prefix="conformance-") as name:
        for number, file in enumerate(files):
            tensors = {key: (file["words"][key], values) for key, values in file["tensors"].items()}
            write_safetensors(Path(name) / f"{number}.safetensors", tensors, file["metadata"])
        adapters = open_adapters(Path(name), read_config(EMBEDDED))
    scales = {module: lora.scale for module, lora in adapters.loras.items()}
    return {"owners": sorted(adapters.heads), "top_k": adapters.top_k, "notes": len(adapters.notes), "scales": scales}
