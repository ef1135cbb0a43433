"""MLX as a backend: the same protocol any other implementation offers to conformance and to the engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from edge0_mlx.arrays import device_head, device_lora, device_weight, from_numpy, to_numpy
from edge0_mlx.decoder import MlxDecoder
from edge0_mlx.dequant import dequantize, quantize
from edge0_mlx.device import ActivationName, Device, default_device
from edge0_mlx.executors import make_executor
from edge0_mlx.lora import linear
from edge0_mlx.memory import limit_memory
from edge0_mlx.prerouter import predict
from edge0_mlx.router import route
from edge0_mlx.slots import Evaluations, host_memory
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import (
    EXECUTOR_KINDS,
    READER_THREADS,
    Array,
    Counters,
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
from edge0_ref.prefetch import Prefetcher

if TYPE_CHECKING:
    from edge0_mlx.train.trainer import MlxTrainer


class MlxBackend:
    """[BCK-001] MLX, on a GPU where there is one. Results of the contract are float32 whatever activations are."""

    name = "mlx"
    claims = frozenset(
        ["dequant", "quantize", "linear", "lora", "router", "prerouter", "decoder", "mixer:kda", "mixer:mla", "train"]
        + [f"executor:{kind}" for kind in EXECUTOR_KINDS]
    )

    def __init__(self, dtype: ActivationName | None = None) -> None:
        self.device = default_device(dtype)

    @property
    def activations(self) -> ActivationName:
        """[BCK-012] The dtype of what travels between operations; sums and what decides are float32 on every GPU."""
        return "bfloat16" if self.device.activations == mx.bfloat16 else "float32"

    def notice(self) -> str | None:
        """[BCK-011] [NUM-011] What a run is like: no GPU, rounded activations, memory that readers cannot fill."""
        notes = []
        if self.activations == "bfloat16":
            notes.append("activations are rounded to bfloat16")
        if not self.device.gpu:
            notes.append("MLX finds no GPU and runs on the CPU, which is slow: --backend numba is faster here")
        probe = mx.zeros(1)
        mx.eval(probe)
        if host_memory(probe) is None:
            notes.append("this MLX gives no writable memory: every expert that is read is copied once more")
        return "; ".join(notes) or None

    def limit_memory(self, budget: int | None) -> None:
        """A plan's budget: MLX keeps within it, and keeps few freed buffers in any case."""
        limit_memory(budget, self.device)

    def from_numpy(self, array: Array) -> mx.array:
        return from_numpy(array)

    def to_numpy(self, array: mx.array) -> Array:
        return to_numpy(array)

    def dequantize(self, matrix: QuantizedMatrix) -> mx.array:
        return dequantize(matrix)

    def quantize(self, weights: Array, bits: int, group_size: int) -> QuantizedMatrix:
        return quantize(weights, bits, group_size)

    def linear(self, x: mx.array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> mx.array:
        y = linear(x.astype(self.device.activations), device_weight(weight, self.device), device_lora(lora))
        return y.astype(mx.float32)

    def route(self, logits: mx.array, spec: RouterSpec) -> Routing:
        return route(logits, spec)

    def predict(self, head: PrerouterHead, features: mx.array) -> mx.array:
        return predict(device_head(head), features)

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> "OwningExecutor":
        return OwningExecutor(kind, store, slots, self.device)

    def trainer(self) -> "MlxTrainer":
        """Stages of training, and whole sequences' logits."""
        from edge0_mlx.train.trainer import MlxTrainer

        return MlxTrainer()

    def decoder(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
    ) -> MlxDecoder:
        return MlxDecoder(checkpoint, plan, self.device, adapters, observe)


class OwningExecutor:
    """An executor with reader threads of its own, for use outside a decoder; its results are evaluated, float32."""

    def __init__(self, kind: ExecutorKind, store: ExpertStore, slots: int, device: Device) -> None:
        self.counters = Counters()
        self._device, self._evaluations = device, Evaluations(self.counters)
        self._prefetcher = Prefetcher(READER_THREADS)
        self._inner = make_executor(kind, store, slots, self._prefetcher, self.counters, device, self._evaluations)

    @property
    def resident(self) -> frozenset[int]:
        return self._inner.resident

    def prepare(self, experts: Sequence[int]) -> None:
        self._inner.prepare(experts)

    def __call__(self, x: mx.array, routing: Routing) -> mx.array:
        y = self._inner(x.astype(self._device.activations), routing).astype(mx.float32)
        self._evaluations.run(y)
        return y

    def release_hints(self) -> None:
        self._inner.release_hints()

    def close(self) -> None:
        self._inner.close()
        self._prefetcher.close()


def create(dtype: ActivationName | None = None) -> MlxBackend:
    """Entry point of the group `edge0.backends`. dtype: of activations; None is what suits the device."""
    return MlxBackend(dtype)


def in_float32() -> MlxBackend:
    """The same with float32 activations on a GPU too: `python -m conformance --backend edge0_mlx.backend:in_float32`.

    Its bounds are far narrower than bfloat16's, and show what that rounding hides.
    """
    return create("float32")
