"""[BCK-033] What a schema cannot say of a vector: that its parts fit together, and that its operation can be called."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import edge0_ref.errors
from conformance.compare import ConformanceError, Judge
from conformance.driven import Driven
from conformance.operations import read_operations
from conformance.report import Recorder
from conformance.requirements import Requirement, read_requirements
from conformance.vectors import CLAIMS, Case, carry_out
from edge0_ref.contract import EXECUTOR_KINDS, Counters, ExpertStore, Routing
from edge0_ref.errors import Edge0Error

METHODS = {*CLAIMS, "executor", "residency", "sequence"}
requirements = lru_cache(maxsize=1)(read_requirements)


class Reached(Exception):  # noqa: N818  (nothing went wrong)
    """The operation could be called."""


def faults(case: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a case that obeys the schema: where in it, what there is, what was wanted."""
    for id_ in case["requirements"]:
        if id_ not in requirements():
            yield f"requirements: {id_}, which spec/ does not state"
    name, inputs = case["operation"], case["inputs"]
    operation = read_operations()[name]
    if lacking := sorted(operation.inputs - set(inputs)):
        yield f"inputs: {name} lacks {', '.join(lacking)}"
    if "kind" in inputs and inputs["kind"] not in EXECUTOR_KINDS:
        yield f"inputs, kind: {inputs['kind']!r}, wanted one of {', '.join(EXECUTOR_KINDS)}"
    for part in [case.get("expected", {}), *case.get("either", [])]:
        if unknown := sorted(set(part) - operation.outputs):
            yield f"expected: {', '.join(unknown)}, which {name} does not give"
    if unbound := sorted(set(case.get("bound", {})) - set(case.get("expected", {}))):
        yield f"bound: {', '.join(unbound)}, of which nothing is expected"
    if "error" in case and not is_error(case["error"]["kind"]):
        yield f"error, kind: {case['error']['kind']}, which is no error of edge0's"
    for place in ("inputs", "expected", "either", "bound"):
        yield from faults_in(case.get(place), place, shared)


def is_error(kind: str) -> bool:
    found = getattr(edge0_ref.errors, kind, None)
    return isinstance(found, type) and issubclass(found, Edge0Error)


def faults_in(value: Any, place: str, shared: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Tensors with another number of elements than their shape says, references to nothing or to themselves."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, list | dict):
                yield from faults_in(item, f"{place}, {index}", shared, depth)
    elif isinstance(value, dict) and set(value) == {"ref"}:
        name = value["ref"]
        if not isinstance(name, str) or name not in shared:
            yield f"{place}: ref {name!r}, which the file's shared values lack"
        elif depth > len(shared):
            yield f"{place}: ref {name!r}, which leads to itself"
        else:
            yield from faults_in(shared[name], f"{place}, shared {name}", shared, depth + 1)
    elif isinstance(value, dict) and "shape" in value:
        yield from faults_of_tensor(value, place)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from faults_in(item, f"{place}, {name}", shared, depth)


def faults_of_tensor(value: Mapping[str, Any], place: str) -> Iterator[str]:
    dtypes = set(value) - {"shape"}
    if len(dtypes) != 1:
        yield f"{place}: a tensor with {', '.join(sorted(dtypes)) or 'no elements'}, wanted one dtype"
        return
    (elements,) = (value[name] for name in dtypes)
    wanted = math.prod(value["shape"])
    if isinstance(elements, list) and len(elements) != wanted:
        yield f"{place}: {len(elements)} elements, wanted {wanted} for the shape {value['shape']}"


class Dry:
    """A backend that computes nothing: what cannot be called with it can be called with none."""

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def reached(self, *given: Any) -> Any:
        raise Reached

    dequantize = quantize = linear = route = predict = reached

    def executor(self, kind: str, store: ExpertStore, slots: int) -> "DryExecutor":
        if type(slots) is not int:
            raise TypeError(f"slots is {slots!r}, wanted an integer")
        return DryExecutor(store)


class DryExecutor:
    """Checks the experts that are named."""

    def __init__(self, store: ExpertStore) -> None:
        self._experts, self.resident, self.counters = store.num_experts, frozenset[int](), Counters()

    def prepare(self, experts: Sequence[int]) -> None:
        wrong = [expert for expert in experts if type(expert) is not int or not 0 <= expert < self._experts]
        if wrong:
            raise IndexError(f"expert {wrong[0]!r} of {self._experts}")

    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        self.prepare(routing.experts.ravel().tolist())
        return x

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        pass


def why_not(case: Case) -> str:
    """Why nobody can run a case, or "". An error that the case expects of its inputs is none."""
    judge = Judge([Requirement(id_, "?", "", "") for id_ in case.requirements], "", Recorder(), "")
    try:
        case.arguments()
        for name in ("expected", "either", "bound"):
            case.decoded(case.values.get(name))
        if case.operation in METHODS:
            carry_out(Driven(Dry(), judge), case.operation, case.inputs.get("kind", "exact"), case.arguments())
    except (Reached, ConformanceError):
        return ""
    except Edge0Error as error:
        return "" if "error" in case.values else f"inputs: {error}, where no error is expected"
    except KeyError as error:
        return f"inputs: {error} is lacking"
    except Exception as error:
        return f"inputs: {type(error).__name__}: {error}"
    return ""


def unusable(path: Path, cases: Sequence[Case]) -> str:
    """One line that says why the first case that nobody can run is none, or ""."""
    told = next(((case, why) for case in cases if (why := why_not(case))), None)
    return f"{path}: case {told[0].id}, {' '.join(told[1].split())[:200]}" if told else ""
