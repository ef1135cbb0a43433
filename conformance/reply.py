"""[BCK-021] What a program replied, and whether it has what its operation gives."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import edge0_ref.errors
from conformance.framing import Message
from conformance.process import Process
from edge0_ref.contract import Counters, Routing
from edge0_ref.errors import Edge0Error

COUNTED = ("bytes_read", "reads", "hits", "read_ahead", "on_demand", "drops")  # what a program has to tell


@dataclass(frozen=True, eq=False)
class Reply:
    """What came back, and from which process."""

    process: Process
    operation: str
    message: Message

    def checked(self) -> "Reply":
        """[BCK-023] Itself, unless it is a refusal: then the error it names, which is one of edge0's tree."""
        error = self.message.fields.get("error")
        if error is None:
            return self
        kind = error.get("kind") if isinstance(error, dict) else None
        found = getattr(edge0_ref.errors, str(kind), None)
        if not (isinstance(found, type) and issubclass(found, Edge0Error)):
            raise self.process.broken(self.operation, f"an error of no kind that the spec lists: {error}")
        raise found(str(error.get("message")))

    def field(self, name: str, wanted: type) -> Any:
        value = self.message.fields.get(name)
        if not isinstance(value, wanted):
            raise self.process.broken(self.operation, f"{name} is {value!r}, wanted {wanted.__name__}")
        return value

    def numbers(self, name: str) -> frozenset[int]:
        """A list of ids."""
        listed = self.field(name, list)
        if not all(type(number) is int for number in listed):
            raise self.process.broken(self.operation, f"{name} is {listed!r}, wanted integers")
        return frozenset(listed)

    def tensor(self, name: str) -> np.ndarray:
        if name not in self.message.tensors:
            there = ", ".join(self.message.tensors) or "none"
            raise self.process.broken(self.operation, f"the reply lacks the tensor {name!r}; there: {there}")
        return self.message.tensors[name]

    def built(self, form: Callable[..., Any], *names: str, **named: Any) -> Any:
        """A result of several tensors, which have to fit together."""
        tensors = [self.tensor(name) for name in names]
        try:
            return form(*tensors, **named)
        except Edge0Error as error:
            raise self.process.broken(self.operation, f"tensors that do not fit together: {error}") from error

    def observation(self) -> tuple[str, int, Any]:
        point, layer = self.field("observe", str), self.field("layer", int)
        match point:
            case "routing":
                return point, layer, self.built(Routing, "experts", "weights")
            case "resident":
                return point, layer, self.numbers("resident")
            case _:
                return point, layer, self.tensor("value")

    def counters(self) -> Counters:
        told = self.field("counters", dict)
        if missing := [name for name in COUNTED if name not in told]:
            raise self.process.broken(self.operation, f"counters lack {', '.join(missing)}")
        try:
            counters = Counters(**told)
        except TypeError as error:
            raise self.process.broken(self.operation, f"counters {told}: {error}") from error
        if wrong := uncounted(counters):
            raise self.process.broken(self.operation, f"counters: {wrong}, wanted numbers from 0 up")
        return counters


def uncounted(counters: Any) -> str:
    """Which of an executor's counters is no count, and what it is instead, or ""."""
    for name in (named.name for named in fields(Counters)):
        value = getattr(counters, name, None)
        real = name == "wait_seconds" and isinstance(value, float)
        if not (real or (isinstance(value, int | np.integer) and not isinstance(value, bool))) or not value >= 0:
            return f"{name} is {value!r}"
    return ""
