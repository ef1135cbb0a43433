"""Resident weights: what stays in memory for the whole run, each linear layer with its LoRA beside it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from edge0_ref.adapters import Adapters
from edge0_ref.bits import widen
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Lora, QuantizedMatrix
from edge0_ref.lora import linear


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer as the checkpoint holds it, and its LoRA if an adapter brought one."""

    weight: QuantizedMatrix | Array
    lora: Lora | None = None

    def __call__(self, x: Float32[np.ndarray, "tokens cols"]) -> Float32[np.ndarray, "tokens rows"]:
        return linear(x, self.weight, self.lora)


@dataclass(frozen=True)
class Weights:
    """Reads resident weights of a checkpoint. Coefficients are widened once, here, instead of at every use."""

    checkpoint: Checkpoint
    adapters: Adapters

    def linear(self, module: str) -> Linear:
        weight = self.checkpoint.matrix(module)
        if isinstance(weight, QuantizedMatrix):
            weight = QuantizedMatrix(
                weight.packed, widen(weight.scales), widen(weight.biases), weight.bits, weight.group_size
            )
        return Linear(weight, self.adapters.loras.get(module))

    def vector(self, name: str) -> Array:
        return self.checkpoint.vector(name)
