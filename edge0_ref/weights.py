"""Resident weights: what stays in memory for the whole run, each linear layer with its LoRA beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float32

from edge0_ref.adapters import Adapters
from edge0_ref.arithmetic import Arithmetic, Product
from edge0_ref.bits import widen
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Lora, PrerouterHead, QuantizedMatrix
from edge0_ref.dequant import dequantize
from edge0_ref.lora import linear


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer as the checkpoint holds it, and its LoRA if an adapter brought one."""

    weight: QuantizedMatrix | Array
    lora: Lora | None = None
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    @cached_property
    def _product(self) -> Product:
        return self.arithmetic.product([(self.weight, self.lora)])

    def __call__(self, x: Float32[np.ndarray, "tokens cols"]) -> Float32[np.ndarray, "tokens rows"]:
        return self._product(x)[0]


class Joined:
    """Linear layers of the same input, which arithmetic may multiply as one."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._product = parts[0].arithmetic.product([(part.weight, part.lora) for part in parts])

    def __call__(self, x: Float32[np.ndarray, "tokens cols"]) -> list[Float32[np.ndarray, "tokens rows"]]:
        return self._product(x)


@dataclass(frozen=True)
class Weights:
    """Reads resident weights of a checkpoint, for those who will compute with `arithmetic`."""

    checkpoint: Checkpoint
    adapters: Adapters
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def linear(self, module: str) -> Linear:
        weight, lora = self.arithmetic.stored(self.checkpoint.matrix(module)), self.adapters.loras.get(module)
        if lora is not None:
            lora = Lora(self._stored(lora.down), self._stored(lora.up), lora.scale)
        return Linear(weight, lora, self.arithmetic)

    def joined(self, *modules: str) -> Joined:
        return Joined([self.linear(module) for module in modules])

    def head(self, owner: int) -> PrerouterHead | None:
        """The prerouter head of a layer, if an adapter brought one."""
        head = self.adapters.heads.get(owner)
        return head and PrerouterHead(self._stored(head.fc1), self._stored(head.fc2), self._stored(head.linear))

    def _stored(self, numbers: Array) -> Array:
        stored = self.arithmetic.stored(numbers)
        assert not isinstance(stored, QuantizedMatrix)
        return stored

    def dense(self, module: str) -> Float32[np.ndarray, "rows cols"]:
        """[DEC-062] A linear layer's weights as numbers, for a mixer that does not multiply it by activations.

        Its LoRA is added, f32(W + scale * B A): to float32 numbers, so nothing of the update is lost to int4.
        """
        layer = self.linear(module)
        weight = dequantize(layer.weight) if isinstance(layer.weight, QuantizedMatrix) else layer.weight
        if layer.lora is None:
            return weight
        update = linear(np.ascontiguousarray(widen(layer.lora.down).T), layer.lora.up).T
        return (weight + np.float64(layer.lora.scale) * update).astype(np.float32)

    def vector(self, name: str) -> Array:
        return self.checkpoint.vector(name)
