"""A model's weights as float32 numbers, whatever its files hold: int4 is dequantised once and stays frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float32

from edge0_mlx.arrays import from_numpy
from edge0_mlx.dequant import dequantize, quantize
from edge0_ref.bits import narrow, widen
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import MoeConfig
from edge0_ref.contract import Lora, QuantizedMatrix
from edge0_ref.errors import CheckpointError


class ExpertWeights(NamedTuple):
    """One layer's experts as products take them: gate, up [experts, hidden, inner]; down [experts, inner, hidden]."""

    gate: mx.array
    up: mx.array
    down: mx.array


@dataclass(frozen=True)
class FloatWeights:
    """Reads weights of a checkpoint, quantised or not, one at a time.

    merged: LoRA to add to the weights, which are then quantised as they were: what should not be done.
    """

    checkpoint: Checkpoint
    merged: Mapping[str, Lora] = field(default_factory=dict)

    def matrix(self, module: str) -> Float32[mx.array, "cols rows"]:
        """A linear layer's weights, transposed: x @ matrix is the layer."""
        held = self.checkpoint.matrix(module)
        if isinstance(held, QuantizedMatrix) and module in self.merged:
            held = merge(held, self.merged[module])
        weight = dequantize(held) if isinstance(held, QuantizedMatrix) else from_numpy(widen(held))
        return contiguous(weight.T)

    def joined(self, *modules: str) -> Float32[mx.array, "cols rows"]:
        """Linear layers of the same input, one beside the other."""
        return contiguous(mx.concatenate([self.matrix(module) for module in modules], axis=1))

    def vector(self, name: str) -> mx.array:
        return from_numpy(self.checkpoint.vector(name))

    def experts(self, layer: int, moe: MoeConfig) -> ExpertWeights:
        """Raises CheckpointError where experts are not stacked as one tensor a projection."""
        names, config = ("gate_proj", "up_proj", "down_proj"), self.checkpoint.config
        found = (
            path
            for path in config.tensors.experts[layer]
            if all(f"{path}.{name}.weight" in self.checkpoint for name in names)
        )
        path = next(found, None)
        if path is None:
            raise CheckpointError(f"{self.checkpoint.folder}: layer {layer} has no stacked experts")
        inputs = (config.hidden_size, config.hidden_size, moe.inner_size)
        stacks = (self._stack(f"{path}.{name}", moe.num_experts, n) for name, n in zip(names, inputs, strict=True))
        return ExpertWeights(*stacks)

    def _stack(self, module: str, experts: int, cols: int) -> Float32[mx.array, "experts cols rows"]:
        weight = self.checkpoint.read(f"{module}.weight")
        if weight.ndim != 3 or weight.shape[0] != experts:
            raise CheckpointError(f"{module}.weight: shape {[*weight.shape]}, wanted {experts} matrices")
        if f"{module}.scales" in self.checkpoint:
            scales, biases = (self.checkpoint.read(f"{module}.{part}") for part in ("scales", "biases"))
            bits, group_size = self.checkpoint.quantization(module, weight.shape[:2], cols)
            packed, scales, biases = (part.reshape(-1, part.shape[-1]) for part in (weight, scales, biases))
            wide = dequantize(QuantizedMatrix(packed, scales, biases, bits, group_size)).reshape(experts, -1, cols)
        else:
            wide = from_numpy(widen(weight))
        return contiguous(wide.swapaxes(1, 2))


def merge(base: QuantizedMatrix, lora: Lora) -> QuantizedMatrix:
    """W + scale * B A in the coefficients' dtype, quantised with the bits and groups of the base."""
    update = np.float32(lora.scale) * (widen(lora.up) @ widen(lora.down))
    weight = np.array(dequantize(base)) + update
    return quantize(narrow(weight, base.scales.dtype), base.bits, base.group_size)


def contiguous(x: mx.array) -> mx.array:
    """Evaluated, row after row: products of transposed views are slower."""
    y = mx.contiguous(x)
    mx.eval(y)
    return y
