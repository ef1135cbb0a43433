"""[BCK-032] From a failed comparison to a vector: the shrunk inputs of a call, and what should have come out."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance import oracles
from conformance.cases import packed
from conformance.compare import ConformanceError, Evidence
from conformance.profiles import Profile, profile_of
from conformance.residency_model import model_of
from conformance.vector_files import encoded
from conformance.watched import Memory, Operation
from edge0_ref.contract import Expert, QuantizedMatrix, RouterSpec, Routing, SoftmaxTopK

Expectation = dict[str, Any]
OUTPUTS = {"dequantize": "weights", "linear": "y", "predict": "logits", "executor": "y", "sequence": "y"}


def counterexamples(memory: Memory, error: BaseException) -> Iterator[tuple[Operation, Expectation]]:
    """What may show the failure again, best first.

    The comparison that failed, if it was of an output of a remembered call; then every remembered call, the latest
    first, with what the oracles say of it.
    """
    latest_first = list(reversed(memory.operations))
    evidence = error.evidence if isinstance(error, ConformanceError) else None
    if evidence is not None and evidence.got is None:
        for operation in latest_first[:1]:
            kind, mention = evidence.wanted
            yield operation, {"error": {"kind": kind, "mentions": [mention] if mention else []}}
    elif evidence is not None:
        for operation in latest_first:
            named = attempted(outputs, operation, memory.backend.to_numpy) or {}
            for name, output in named.items():
                if same(output, evidence.got):
                    yield operation, expectation_of(operation, name, evidence)
    for operation in latest_first:
        expected = attempted(expectation, operation, memory.backend.to_numpy, profile_of(memory.backend))
        if expected:
            yield operation, expected


def attempted(function: Callable[..., Any], *given: Any) -> Any:
    """None where the inputs are such that the oracles cannot take them, or the results such that nobody can."""
    try:
        return function(*given)
    except Exception:
        return None


def same(a: Any, b: Any) -> bool:
    arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return arrays and a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def outputs(operation: Operation, to_numpy: Callable[[Any], np.ndarray]) -> dict[str, np.ndarray]:
    """What a call returned, by the names that vectors give its outputs; and codes, which are judged unpacked."""
    if operation.result is None:
        return {}
    if operation.name == "quantize":
        named = {name: getattr(operation.result, name) for name in ("packed", "scales", "biases")}
        return named | {"codes": oracles.codes(operation.result)}
    if operation.name == "route":
        return {"experts": operation.result.experts, "weights": operation.result.weights}
    return {OUTPUTS[operation.name]: to_numpy(operation.result)}


def expectation_of(operation: Operation, name: str, evidence: Evidence) -> Expectation:
    """The failed comparison in the words of a vector."""
    if evidence.bound is not None:
        wanted = np.asarray(evidence.wanted, np.float64)
        return {"expected": {name: wanted}, "bound": {name: np.broadcast_to(evidence.bound, wanted.shape)}}
    options = evidence.wanted
    if name == "codes":
        name, options = "packed", [packed(option, operation.inputs["bits"]) for option in options]
    if len(options) == 1:
        return {"expected": {name: options[0]}}
    return {"either": [{name: option} for option in options]}


def within(name: str, value: oracles.Bounded) -> Expectation:
    return {"expected": {name: value.value}, "bound": {name: value.bound}}


def expectation(operation: Operation, to_numpy: Callable[[Any], np.ndarray], profile: Profile) -> Expectation | None:
    """What the oracles say of a call; None where they have nothing to say that a vector could hold."""
    given = operation.inputs
    match operation.name:
        case "dequantize":
            return {"either": [{"weights": option} for option in oracles.dequantized(given["matrix"])]}
        case "quantize":
            return quantized(given["weights"], given["bits"], given["group_size"])
        case "linear":
            return within("y", oracles.linear(to_numpy(given["x"]), given["weight"], given.get("lora"), profile))
        case "route":
            return routed(to_numpy(given["logits"]), given["spec"])
        case "predict":
            return within("logits", oracles.head_logits(given["head"], to_numpy(given["features"]), profile))
        case "executor":
            experts = getattr(given["store"], "experts", None)
            if experts is None:
                return None
            return within("y", oracles.experts_output(to_numpy(given["x"]), given["routing"], experts, profile))
        case "sequence":
            return computed(given, to_numpy, profile)
        case _:
            return resided(given)


def quantized(weights: np.ndarray, bits: int, group_size: int) -> Expectation | None:
    if weights.ndim != 2 or weights.shape[1] % group_size:
        return {"error": {"kind": "ShapeError", "mentions": []}}
    codes, scales, biases = oracles.quantized(weights, bits, group_size)
    stored = {name: oracles.stored(v, weights.dtype) for name, v in (("scales", scales), ("biases", biases))}
    if np.isnan(oracles.real(weights)).any():  # the code of a NaN is nobody's promise
        return {"expected": stored}
    return {"expected": {"packed": packed(codes, bits)} | stored}


def routed(logits: np.ndarray, spec: RouterSpec) -> Expectation | None:
    if not np.isfinite(logits).all():
        token, expert = (int(index) for index in np.argwhere(~np.isfinite(logits))[0])
        return {"error": {"kind": "NonFiniteError", "mentions": [f"token {token}", f"expert {expert}"]}}
    if isinstance(spec, SoftmaxTopK):
        if spec.top_k > logits.shape[1]:
            return {"error": {"kind": "ShapeError", "mentions": []}}
        experts = oracles.largest(logits, spec.top_k)
        weights = oracles.softmax_weights(logits, experts)
    else:
        kept, ragged = divmod(logits.shape[1], spec.num_groups)
        if ragged or spec.top_k > kept * spec.top_groups:
            return {"error": {"kind": "ShapeError", "mentions": []}}
        choice = oracles.sigmoid_group_choice(logits, spec)
        if choice.gap.min() < 2.0**-21:  # [RTR-021] either order is right
            return None
        experts = choice.experts
        weights = oracles.sigmoid_group_weights(logits, experts, spec.scale)
    return {"expected": {"experts": experts, "weights": weights.value}, "bound": {"weights": weights.bound}}


def computed(given: Mapping[str, Any], to_numpy: Callable[[Any], np.ndarray], profile: Profile) -> Expectation | None:
    """What the calls of an executor's life give, one after the other, if none was spoiled by a failing disk."""
    experts, steps = getattr(given["store"], "experts", None), given["steps"]
    calls = [(to_numpy(step["x"]), step["routing"]) for step in steps if "x" in step]
    if experts is None or not calls or any("fails" in step for step in steps):
        return None
    parts = [oracles.experts_output(x, routing, experts, profile) for x, routing in calls]
    return within("y", oracles.Bounded(*(np.concatenate(part) for part in zip(*parts, strict=True))))


def resided(given: Mapping[str, Any]) -> Expectation | None:
    """What the model of chapter 6 says of an executor's life, as long as it knows every read of it."""
    model = model_of(given["kind"], given["slots"], given["num_experts"])
    counters = dict.fromkeys(("reads", "hits", "read_ahead", "on_demand", "drops"), 0)
    told = []
    for event in given["events"]:
        failing = set(event.get("fails", ()))
        if "hint" in event:
            step = model.prepare(event["hint"], failing)
        elif "call" in event:
            step = model.call(list(dict.fromkeys(e for row in event["call"] for e in row)), failing)
        else:
            model.release()
            step = None
        if model.owed or (step is not None and step.failed is not None):
            return None
        told.append({"reads": sorted(set(step.certain)) if step else [], "resident": sorted(model.resident)})
        for name in ("hits", "read_ahead", "on_demand") if step else ():
            counters[name] += getattr(step, name)
        counters["reads"] += len(step.asked) if step else 0
    return {"expected": {"events": told, "counters": counters}}


def inputs_of(operation: Operation, to_numpy: Callable[[Any], np.ndarray]) -> dict[str, Any] | None:
    """The inputs as a vector writes them."""
    given = operation.inputs
    match operation.name:
        case "dequantize":
            return {"matrix": matrix(given["matrix"])}
        case "quantize" | "residency":
            return dict(encoded(given))
        case "linear":
            weight, lora = given["weight"], given.get("lora")
            weight = matrix(weight) if isinstance(weight, QuantizedMatrix) else weight
            beside = {} if lora is None else {"lora": vars(lora)}
            return dict(encoded({"x": to_numpy(given["x"]), "weight": weight} | beside))
        case "route":
            return dict(encoded({"logits": to_numpy(given["logits"]), "spec": spec(given["spec"])}))
        case "predict":
            return dict(encoded({"head": vars(given["head"]), "features": to_numpy(given["features"])}))
        case "sequence":
            experts = getattr(given["store"], "experts", [])
            form = {"kind": given["kind"], "slots": given["slots"], "experts": [expert_value(e) for e in experts]}
            return form | {"events": [step_value(step, to_numpy) for step in given["steps"]]}
        case _:
            experts, routing = getattr(given["store"], "experts", None), given["routing"]
            if experts is None:
                return None
            inputs = {"experts": [expert_value(e) for e in experts], "x": to_numpy(given["x"])}
            return dict(encoded(inputs | {"routing": routing_value(routing), "slots": given["slots"]}))


def step_value(step: Mapping[str, Any], to_numpy: Callable[[Any], np.ndarray]) -> dict[str, Any]:
    if "x" in step:
        step = {"x": to_numpy(step["x"]), "routing": routing_value(step["routing"])}
    return dict(encoded(step))


def routing_value(routing: Routing) -> dict[str, Any]:
    return {"experts": routing.experts, "weights": routing.weights}


def expert_value(expert: Expert) -> dict[str, Any]:
    return {"gate": matrix(expert.gate), "up": matrix(expert.up), "down": matrix(expert.down)}


def matrix(value: QuantizedMatrix) -> dict[str, Any]:
    names = ("packed", "scales", "biases", "bits", "group_size")
    return dict(encoded({name: getattr(value, name) for name in names}))


def spec(value: RouterSpec) -> dict[str, Any]:
    if isinstance(value, SoftmaxTopK):
        return {"family": "softmax", "top_k": value.top_k}
    fields = {name: field for name, field in vars(value).items() if field is not None}
    return {"family": "sigmoid_group"} | fields
