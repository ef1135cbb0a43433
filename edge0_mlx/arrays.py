"""The contract's NumPy data as MLX arrays, and back."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from edge0_mlx.device import Device
from edge0_ref.bits import widen
from edge0_ref.contract import Array, ExpertLayout, Lora, PrerouterHead, QuantizedMatrix

BFLOAT16_PATTERNS = np.dtype(np.uint16)
COEFFICIENT_DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """`contract.QuantizedMatrix` on the device; leading axes, if any, count experts or slots."""

    packed: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    @property
    def dtype(self) -> mx.Dtype:
        return self.scales.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., rows, cols]."""
        *leading, words = self.packed.shape
        return (*leading, words * 32 // self.bits)

    @property
    def form(self) -> dict[str, Any]:
        """What MLX's quantised operations want to know."""
        return {"group_size": self.group_size, "bits": self.bits}


@dataclass(frozen=True, eq=False)
class DeviceLora:
    """`contract.Lora` as a product takes it: down [cols, rank], up [rank, rows]."""

    down: mx.array
    up: mx.array
    scale: float


@dataclass(frozen=True, eq=False)
class DeviceHead:
    """`contract.PrerouterHead` as products take it: transposed, float32. A leading axis, if any, counts heads."""

    fc1: mx.array
    fc2: mx.array
    linear: mx.array


Weight: TypeAlias = DeviceMatrix | mx.array


def widened(x: mx.array, coefficients: mx.Dtype) -> mx.array:
    """x as a product with such coefficients takes it: MLX promotes them to float32, but not all pairs."""
    return x if x.dtype == coefficients else x.astype(mx.float32)


def from_numpy(array: Array) -> mx.array:
    """A copy on the device, in the array's own dtype."""
    return mx.array(np.ascontiguousarray(array))


def to_numpy(array: mx.array) -> Array:
    """A copy on the host; bfloat16, which NumPy lacks, as float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def stored_dtype(values: Array) -> mx.Dtype:
    """The dtype a coefficient array has in its file: uint16 are bfloat16 patterns."""
    return mx.bfloat16 if values.dtype == BFLOAT16_PATTERNS else COEFFICIENT_DTYPES[values.dtype.name]


def coefficients(values: Array, device: Device) -> mx.array:
    """Scales, biases or a float weight in the dtype of the rule."""
    wide = from_numpy(widen(values))  # exact, and so is the way back to the stored dtype
    return wide.astype(device.coefficients(stored_dtype(values)))


def device_weight(weight: QuantizedMatrix | Array, device: Device) -> Weight:
    """A linear layer's weight; float weights [rows, cols]."""
    if not isinstance(weight, QuantizedMatrix):
        return coefficients(weight, device)
    scales, biases = coefficients(weight.scales, device), coefficients(weight.biases, device)
    return DeviceMatrix(from_numpy(weight.packed), scales, biases, weight.bits, weight.group_size)


def device_lora(lora: Lora | None) -> DeviceLora | None:
    """Float32: an update is small beside its base, and rounding it to 16 bits would take most of it away."""
    if lora is None:
        return None
    return DeviceLora(from_numpy(widen(lora.down).T), from_numpy(widen(lora.up).T), lora.scale)


def device_head(head: PrerouterHead) -> DeviceHead:
    return DeviceHead(*(from_numpy(widen(part).T) for part in (head.fc1, head.fc2, head.linear)))


def layout_dtype(layout: ExpertLayout) -> mx.Dtype:
    return COEFFICIENT_DTYPES[layout.coefficient_dtype]
