"""Resident weights: what stays in memory for the whole run, each linear layer with its LoRA beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from jaxtyping import Float

from edge0_mlx.arrays import DeviceLora, DeviceMatrix, Weight, device_lora, device_weight, from_numpy
from edge0_mlx.dequant import dequantize
from edge0_mlx.device import Device
from edge0_mlx.lora import add_update, linear
from edge0_ref.adapters import Adapters
from edge0_ref.bits import widen
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import QuantizedMatrix


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer in the device's dtypes, and its LoRA if an adapter brought one."""

    weight: Weight
    lora: DeviceLora | None = None

    def __call__(self, x: Float[mx.array, "tokens cols"]) -> Float[mx.array, "tokens rows"]:
        return linear(x, self.weight, self.lora)


class Joined:
    """Linear layers of the same input, as one product if they are coded alike: their rows, one below the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._loras = [part.lora for part in parts]
        self._weights = [part.weight for part in parts]
        self._ends = [int(end) for end in np.cumsum([weight.shape[0] for weight in self._weights])[:-1]]
        self._whole = joined([part.weight for part in parts])
        if self._whole is not None:
            self._weights = []

    def __call__(self, x: Float[mx.array, "tokens cols"]) -> list[Float[mx.array, "tokens rows"]]:
        if self._whole is None:
            return [linear(x, weight, lora) for weight, lora in zip(self._weights, self._loras, strict=True)]
        bases = mx.split(linear(x, self._whole), self._ends, axis=-1)
        return [add_update(x, base, lora) for base, lora in zip(bases, self._loras, strict=True)]


def joined(weights: Sequence[Weight]) -> DeviceMatrix | None:
    """One matrix, or None if bits, groups or dtypes differ."""
    matrices = [weight for weight in weights if isinstance(weight, DeviceMatrix)]
    if len(matrices) < len(weights) or len({(m.bits, m.group_size, str(m.dtype)) for m in matrices}) > 1:
        return None
    packed = mx.concatenate([m.packed for m in matrices])
    scales, biases = mx.concatenate([m.scales for m in matrices]), mx.concatenate([m.biases for m in matrices])
    mx.eval(packed, scales, biases)
    return DeviceMatrix(packed, scales, biases, matrices[0].bits, matrices[0].group_size)


@dataclass(frozen=True)
class Weights:
    """Reads resident weights of a checkpoint, one at a time: what is on the device is not also on the host."""

    checkpoint: Checkpoint
    adapters: Adapters
    device: Device

    def linear(self, module: str) -> Linear:
        weight = device_weight(self.checkpoint.matrix(module), self.device)
        return Linear(weight, device_lora(self.adapters.loras.get(module)))

    def joined(self, *modules: str) -> Joined:
        return Joined([self.linear(module) for module in modules])

    def dense(self, module: str) -> Float[mx.array, "rows cols"]:
        """[DEC-062] A linear layer's weights as numbers, float32, its LoRA added: W + scale * B A."""
        matrix, lora = self.checkpoint.matrix(module), device_lora(self.adapters.loras.get(module))
        weight = dequantize(matrix) if isinstance(matrix, QuantizedMatrix) else from_numpy(widen(matrix))
        return weight if lora is None else weight + lora.scale * mx.matmul(lora.down, lora.up).T

    def vector(self, name: str) -> mx.array:
        """Float32, for what is computed in float32 on every device; norms are."""
        return from_numpy(self.checkpoint.vector(name))
