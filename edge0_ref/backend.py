"""The reference as a backend: the same protocol any other implementation offers to conformance and to the engine."""

from collections.abc import Sequence

import numpy as np

from edge0_ref import kernels
from edge0_ref.adapters import Adapters
from edge0_ref.arithmetic import Arithmetic
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import (
    EXECUTOR_KINDS,
    READER_THREADS,
    Array,
    Counters,
    Executor,
    ExecutorKind,
    ExpertStore,
    Lora,
    Observe,
    Plan,
    PrerouterHead,
    QuantizedMatrix,
    RouterSpec,
    Routing,
)
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.dequant import dequantize, quantize
from edge0_ref.executors import RunExperts, make_executor
from edge0_ref.lora import linear
from edge0_ref.prefetch import Prefetcher
from edge0_ref.prerouter import predict
from edge0_ref.router import route


class ReferenceBackend:
    """[BCK-001] NumPy and Numba; every claim, float32 throughout."""

    name = "reference"
    claims = frozenset(
        ["dequant", "quantize", "linear", "lora", "router", "prerouter", "decoder", "mixer:kda", "mixer:mla", "bits"]
        + [f"executor:{kind}" for kind in EXECUTOR_KINDS]
    )
    to_be_read = True  # written for that, not for speed

    def notice(self) -> str | None:
        """[BCK-011] The first run on a machine compiles the kernels."""
        if kernels.compiled_before():
            return None
        return "compiling kernels, once on this machine: seconds, at most half a minute"

    def from_numpy(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def to_numpy(self, array: Array) -> Array:
        return array

    def dequantize(self, matrix: QuantizedMatrix) -> Array:
        return dequantize(matrix)

    def quantize(self, weights: Array, bits: int, group_size: int) -> QuantizedMatrix:
        return quantize(weights, bits, group_size)

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        return linear(x, weight, lora)

    def route(self, logits: Array, spec: RouterSpec) -> Routing:
        return route(logits, spec)

    def predict(self, head: PrerouterHead, features: Array) -> Array:
        return predict(head, features)

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> Executor[Array]:
        return OwningExecutor(kind, store, slots)

    def decoder(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
    ) -> ReferenceDecoder:
        return ReferenceDecoder(checkpoint, plan, adapters, observe)


class OwningExecutor:
    """An executor with reader threads of its own, for use outside a decoder."""

    def __init__(
        self, kind: ExecutorKind, store: ExpertStore, slots: int, run: RunExperts = Arithmetic.run_experts
    ) -> None:
        self.counters = Counters()
        self._prefetcher = Prefetcher(READER_THREADS)
        self._inner = make_executor(kind, store, slots, self._prefetcher, self.counters, run)

    @property
    def resident(self) -> frozenset[int]:
        return self._inner.resident

    def prepare(self, experts: Sequence[int]) -> None:
        self._inner.prepare(experts)

    def __call__(self, x: Array, routing: Routing) -> Array:
        return self._inner(x, routing)

    def release_hints(self) -> None:
        self._inner.release_hints()

    def close(self) -> None:
        self._inner.close()
        self._prefetcher.close()


def create() -> ReferenceBackend:
    """Entry point of the group `edge0.backends`."""
    return ReferenceBackend()
