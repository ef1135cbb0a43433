"""Backends to be found out: the reference with one mistake each, and objects that are hardly backends at all."""

import time
from typing import Any

import numpy as np

from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import Counters, Lora, PrerouterHead, QuantizedMatrix, RouterSpec, Routing, SoftmaxTopK


class Two(ReferenceBackend):
    """Right, and modest: two claims, so that a whole run is short."""

    name = "two"
    claims = frozenset({"dequant", "router"})


class HigherIdOfEquals(Two):
    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        routing = super().route(logits, spec)
        if not isinstance(spec, SoftmaxTopK):
            return routing
        last = logits.shape[1] - 1
        experts = last - np.argsort(-logits[:, ::-1], axis=1, kind="stable")[:, : spec.top_k]
        return Routing(experts.astype(np.int64), routing.weights)


class ChoosesOnBfloat16(Two):
    """Right until two logits differ by less than a bfloat16 tells."""

    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        right = super().route(logits, spec)
        if not isinstance(spec, SoftmaxTopK):
            return right
        cut = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        experts = np.argsort(-cut, axis=1, kind="stable")[:, : spec.top_k]
        return Routing(experts.astype(np.int64), right.weights)


class UpperNibbleFirst(Two):
    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        weights = super().dequantize(matrix)
        swapped = weights.reshape(matrix.rows, -1, 2)[:, :, ::-1].reshape(weights.shape)
        return np.ascontiguousarray(swapped) if matrix.bits == 4 else weights


def flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


class FlushesWeights(Two):
    """Subnormal weights are zero."""

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        return flushed(super().dequantize(matrix))


class FlushesSums(ReferenceBackend):
    """Subnormals are zero on their way into and out of a linear layer, a router's weights too."""

    claims = frozenset({"linear", "lora", "prerouter", "router"})

    def linear(self, x: np.ndarray, weight: QuantizedMatrix | np.ndarray, lora: Lora | None = None) -> np.ndarray:
        dense = flushed(super().dequantize(weight)) if isinstance(weight, QuantizedMatrix) else weight
        return flushed(super().linear(flushed(x), dense, lora))

    def predict(self, head: PrerouterHead, features: np.ndarray) -> np.ndarray:
        return flushed(super().predict(head, flushed(features)))

    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        right = super().route(logits, spec)
        return Routing(right.experts, flushed(right.weights))


class LosesUpdateScale(ReferenceBackend):
    def linear(self, x: np.ndarray, weight: QuantizedMatrix | np.ndarray, lora: Lora | None = None) -> np.ndarray:
        return super().linear(x, weight, lora and Lora(lora.down, lora.up, 1.0))


class RoundsCodesDown(ReferenceBackend):
    def quantize(self, weights: np.ndarray, bits: int, group_size: int) -> QuantizedMatrix:
        right = super().quantize(weights, bits, group_size)
        return QuantizedMatrix(right.packed & np.uint32(0xFFFFFFFE), right.scales, right.biases, bits, group_size)


class OffByAThousandth(ReferenceBackend):
    def predict(self, head: PrerouterHead, features: np.ndarray) -> np.ndarray:
        right = super().predict(head, features)
        return right + np.float32(1e-3) * np.abs(right)


class Wrapped:
    """An executor that may be wrong in some of its methods."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        result: np.ndarray = self._inner(x, routing)
        return result


class LosesThird(Wrapped):
    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        weights = routing.weights.copy()
        weights[:, 2:] = 0
        return super().__call__(x, Routing(routing.experts, weights))


class AddsUpInHalf(Wrapped):
    """Expert 1 is added up in float16."""

    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        tokens, first = routing.tokens, routing.experts == 1
        kept, spoiled = (np.where(drop, np.float32(0), routing.weights) for drop in (first, ~first))
        both = Routing(np.concatenate([routing.experts] * 2), np.concatenate([kept, spoiled]))
        y = super().__call__(np.concatenate([x, x]), both)  # one call: what is read and resident stays right
        return y[:tokens] + y[tokens:].astype(np.float16).astype(np.float32)


class Inside(Wrapped):
    """An executor that tells of itself what is no state."""

    def __init__(self, inner: Any, **told: Any) -> None:
        super().__init__(inner)
        vars(self).update(told)


class HidesFirst(Wrapped):
    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self._inner.resident - {0})


class Third(ReferenceBackend):
    def executor(self, *given: Any) -> Any:
        return LosesThird(super().executor(*given))


class Half(ReferenceBackend):
    def executor(self, *given: Any) -> Any:
        return AddsUpInHalf(super().executor(*given))


class Hiding(ReferenceBackend):
    def executor(self, *given: Any) -> Any:
        return HidesFirst(super().executor(*given))


class Wide(Two):
    """float64 where float32 was promised."""

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        return super().dequantize(matrix).astype(np.float64)


class Flat(Two):
    """One axis where two were promised."""

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        return super().dequantize(matrix).ravel()


class Spoilt(Two):
    """NaN."""

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        return super().dequantize(matrix) * np.float32(np.nan)


class Nothing(Two):
    """No array at all."""

    def to_numpy(self, array: Any) -> Any:
        return array

    def dequantize(self, matrix: QuantizedMatrix) -> Any:
        return None


class Routeless(Two):
    def route(self, logits: np.ndarray, spec: RouterSpec) -> Any:
        return None


class Unquantized(ReferenceBackend):
    def quantize(self, weights: np.ndarray, bits: int, group_size: int) -> Any:
        return None


class Nested(ReferenceBackend):
    def executor(self, *given: Any) -> Any:
        return Inside(super().executor(*given), resident=[[1]])


class Spelled(ReferenceBackend):
    def executor(self, *given: Any) -> Any:
        return Inside(super().executor(*given), counters=Counters(hits="3"))  # type: ignore[arg-type]


class Raising(Two):
    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        raise ZeroDivisionError("a kernel that was not there")


class Interrupted(Two):
    """Somebody presses Ctrl-C while it routes."""

    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        raise KeyboardInterrupt


class Exiting(Two):
    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        raise SystemExit("no device")


class Sometimes(Two):
    """Fails every third time it is asked."""

    asked = 0

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        self.asked += 1
        if self.asked % 3 == 0:
            raise ZeroDivisionError("a kernel that was not there")
        return super().dequantize(matrix)


class Hanging(Two):
    """Never comes back from the largest groups."""

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        if matrix.group_size == 128:
            time.sleep(600)
        return super().dequantize(matrix)


class Chatting(Two):
    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        print("loading shaders")
        return super().dequantize(matrix)


class Boasting(ReferenceBackend):
    """Claims what nobody knows, and what it has no method for."""

    claims = frozenset({"router", "telepathy", "linear"})
    linear: Any = None


class Bare:
    """No members at all."""


class Listing(Two):
    claims: Any = ("dequant",)


def failing_factory() -> None:
    raise OSError("libcuda.so is not here")


def exiting_factory() -> None:
    raise SystemExit(3)


def hanging_factory() -> None:
    time.sleep(600)
