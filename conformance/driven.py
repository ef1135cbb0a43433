"""A backend with NumPy on both sides: arguments are converted, results are checked for form, arguments for change."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from conformance.compare import Judge
from conformance.reply import uncounted
from edge0_ref.contract import ExecutorKind, ExpertStore, Lora, PrerouterHead, QuantizedMatrix, RouterSpec, Routing


def arrays_in(value: Any) -> list[np.ndarray]:
    """Every array of an argument, also those inside frozen data."""
    if isinstance(value, np.ndarray):
        return [value]
    if is_dataclass(value):
        return [array for part in fields(value) for array in arrays_in(getattr(value, part.name))]
    return []


@dataclass(repr=False)
class Driven:
    """Calls one backend on behalf of one test; whatever it opened is closed at the end."""

    backend: Any
    judge: Judge
    opened: list[Any] = field(default_factory=list)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Short: Hypothesis prints the arguments of a failing test."""
        printer.text("driven")

    def _numpy(self, value: Any, what: str, ndim: int) -> np.ndarray:
        array = self.backend.to_numpy(value)
        self.judge.holds(isinstance(array, np.ndarray), f"{what}: to_numpy", type(array).__name__, "ndarray")
        form = (array.dtype, array.ndim)
        self.judge.holds(form == (np.float32, ndim), f"{what}: result", form, ("float32", ndim))
        return np.array(array)

    def _unchanged(self, call: Callable[[], Any], what: str, *arguments: Any) -> Any:
        """[BCK-009] The result of `call`, which leaves its arguments as they were."""
        held = [array for argument in arguments for array in arrays_in(argument)]
        before = [array.tobytes() for array in held]
        result = call()
        changed = [i for i, array in enumerate(held) if array.tobytes() != before[i]]
        self.judge.holds(not changed, f"{what} changed its arguments", changed, [])
        return result

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        result = self._unchanged(lambda: self.backend.dequantize(matrix), "dequantize", matrix)
        return self._numpy(result, "dequantize", 2)

    def quantize(self, weights: np.ndarray, bits: int, group_size: int) -> QuantizedMatrix:
        call = lambda: self.backend.quantize(weights, bits, group_size)  # noqa: E731
        result = self._unchanged(call, "quantize", weights)
        self._of_type(result, QuantizedMatrix, "quantize: result")
        made: QuantizedMatrix = result
        return made

    def _of_type(self, result: Any, wanted: type, what: str) -> None:
        self.judge.holds(isinstance(result, wanted), what, type(result).__name__, wanted.__name__)

    def linear(self, x: np.ndarray, weight: QuantizedMatrix | np.ndarray, lora: Lora | None = None) -> np.ndarray:
        given = self.backend.from_numpy(x)
        result = self._unchanged(lambda: self.backend.linear(given, weight, lora), "linear", x, weight, lora)
        return self._numpy(result, "linear", 2)

    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        given = self.backend.from_numpy(logits)
        routing = self._unchanged(lambda: self.backend.route(given, spec), "route", logits, spec)
        self._of_type(routing, Routing, "route: result")
        form = (type(routing).__name__, str(routing.experts.dtype), str(routing.weights.dtype))
        self.judge.state(form, ("Routing", "int64", "float32"), "route: result")
        result: Routing = routing
        return result

    def predict(self, head: PrerouterHead, features: np.ndarray) -> np.ndarray:
        given = self.backend.from_numpy(features)
        result = self._unchanged(lambda: self.backend.predict(head, given), "predict", head, features)
        return self._numpy(result, "predict", 2)

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> "DrivenExecutor":
        executor = DrivenExecutor(self, self.backend.executor(kind, store, slots))
        self.opened.append(executor.inner)
        return executor

    def decoder(self, *arguments: Any, **named: Any) -> "DrivenDecoder":
        decoder = DrivenDecoder(self, self.backend.decoder(*arguments, **named))
        self.opened.append(decoder.inner)
        return decoder

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@dataclass(frozen=True, repr=False)
class DrivenExecutor:
    """An executor with NumPy on both sides."""

    driven: Driven
    inner: Any

    def prepare(self, experts: Sequence[int]) -> None:
        self.inner.prepare(list(experts))

    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        given = self.driven.backend.from_numpy(x)
        result = self.driven._unchanged(lambda: self.inner(given, routing), "executor", x, routing)
        return self.driven._numpy(result, "executor", 2)

    def release_hints(self) -> None:
        self.inner.release_hints()

    @property
    def resident(self) -> set[int]:
        told = self.inner.resident
        whole = isinstance(told, Collection) and all(isinstance(expert, int | np.integer) for expert in told)
        if not whole:
            self.driven.judge.fail("resident of an executor", repr(told), "a set of integers")
        return {int(expert) for expert in told}

    @property
    def counters(self) -> Any:
        told = self.inner.counters
        if wrong := uncounted(told):
            self.driven.judge.fail("counters of an executor", wrong, "numbers from 0 up")
        return told

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, repr=False)
class DrivenDecoder:
    """A decoder whose logits are NumPy."""

    driven: Driven
    inner: Any

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        return self.driven._numpy(self.inner.prefill(tokens), "prefill", 1)

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self.driven._numpy(self.inner.all_logits(tokens), "all_logits", 2)

    def step(self, token: int) -> np.ndarray:
        return self.driven._numpy(self.inner.step(token), "step", 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
