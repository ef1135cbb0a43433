"""A backend under watch: each call has a time limit, and the latest ones are remembered, so that a failure can be kept.

Nothing is copied while things go well: a remembered call holds its arguments, which no backend may change.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from edge0_ref.contract import ExecutorKind, ExpertStore, Routing

REMEMBERED = 16
PARAMETERS = {
    "dequantize": ("matrix",),
    "quantize": ("weights", "bits", "group_size"),
    "linear": ("x", "weight", "lora"),
    "route": ("logits", "spec"),
    "predict": ("head", "features"),
}
Limit = Callable[[str], AbstractContextManager[None]]


@dataclass(eq=False)
class Operation:
    """One call of a vector operation. result: what the backend returned, or None if it raised or never came back."""

    name: str
    kind: str
    inputs: dict[str, Any]
    result: Any = None


@dataclass(eq=False)
class Memory:
    """The latest calls of the test that runs, newest last. backend: whose arrays they hold."""

    backend: Any = None
    operations: deque[Operation] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


def unlimited(what: str) -> AbstractContextManager[None]:
    return nullcontext()


class WatchedBackend:
    """The backend itself in every other respect: what it lacks, this lacks."""

    def __init__(self, inner: Any, memory: Memory, limit: Limit = unlimited, test: str = "") -> None:
        self._inner, self._memory, self._limit, self._test = inner, memory, limit, test
        memory.backend = inner
        memory.operations.clear()

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._inner, name)
        if name in PARAMETERS and callable(member):
            return lambda *given, **named: self._remembered(name, member, given, named)
        if name == "executor":
            return lambda *given: WatchedExecutor(self, *given)
        if name == "decoder":
            return lambda *given, **named: WatchedDecoder(self, self.limited("decoder", member, *given, **named))
        return self._limited_method(name, member) if name in ("from_numpy", "to_numpy") else member

    def limited(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with self._limit(f"{self._test}: {name}"):
            return call(*given, **named)

    def _limited_method(self, name: str, member: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: self.limited(name, member, *given)

    def _remembered(self, name: str, member: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
        operation = self.remember(name, "", dict(zip(PARAMETERS[name], given, strict=False)) | named)
        operation.result = self.limited(name, member, *given, **named)
        return operation.result

    def remember(self, name: str, kind: str, inputs: dict[str, Any]) -> Operation:
        operation = Operation(name, kind, inputs)
        self._memory.operations.append(operation)
        return operation


class WatchedExecutor:
    """An executor under watch.

    Its whole life is one operation for what it reads and keeps (residency) and one for what it computes (sequence);
    each call is an executor operation as well.
    """

    def __init__(self, watched: WatchedBackend, kind: ExecutorKind, store: ExpertStore, slots: int) -> None:
        self._watched, self._kind, self._store, self._slots = watched, kind, store, slots
        self._events: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._inner = watched.limited("executor", watched._inner.executor, kind, store, slots)
        form = {"kind": kind, "slots": slots, "num_experts": store.num_experts, "events": self._events}
        watched.remember("residency", kind, form)
        watched.remember("sequence", kind, {"kind": kind, "slots": slots, "store": store, "steps": self._steps})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _event(self, step: dict[str, Any], **event: Any) -> None:
        failing = sorted(getattr(self._store, "failing", ()))
        told = {"fails": failing} if failing else {}
        self._events.append(event | told)
        self._steps.append(step | told)

    def prepare(self, experts: Sequence[int]) -> None:
        self._event({"hint": list(experts)}, hint=list(experts))
        self._watched.limited(f"prepare of {self._kind}", self._inner.prepare, experts)

    def __call__(self, x: Any, routing: Routing) -> Any:
        self._event({"x": x, "routing": routing}, call=routing.experts.tolist())
        inputs = {"store": self._store, "x": x, "routing": routing, "slots": self._slots}
        operation = self._watched.remember("executor", self._kind, inputs)
        operation.result = self._watched.limited(f"call of {self._kind}", self._inner, x, routing)
        return operation.result

    def release_hints(self) -> None:
        self._event({"release": True}, release=True)
        self._watched.limited(f"release_hints of {self._kind}", self._inner.release_hints)

    def close(self) -> None:
        self._watched.limited(f"close of {self._kind}", self._inner.close)


class WatchedDecoder:
    """A decoder under watch. A model folder is too much for a vector: its calls are not remembered."""

    def __init__(self, watched: WatchedBackend, inner: Any) -> None:
        self._watched, self._inner = watched, inner

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._inner, name)
        if not callable(member):
            return member
        return lambda *given: self._watched.limited(f"{name} of a decoder", member, *given)
