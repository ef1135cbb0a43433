"""Linear layers, with the recovery LoRA beside them: never merged, so what int4 would round away is kept."""

import numpy as np
from jaxtyping import Float32

from edge0_ref import kernels
from edge0_ref.bits import kernel_operand, widen
from edge0_ref.contract import Array, Lora, QuantizedMatrix
from edge0_ref.errors import ShapeError

Activations = Float32[np.ndarray, "tokens cols"]
Outputs = Float32[np.ndarray, "tokens rows"]


def linear(x: Activations, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Outputs:
    """[DEQ-010] [LOR-001] y = W x, or y = f32(W x + scale * B (A x)) with `W x`, `A x`, `B (A x)` float32.

    x [tokens, cols]; weight [rows, cols] quantised, or float32 / float16 / uint16 (bfloat16). Raises ShapeError.
    """
    base = _multiply(x, weight)
    if lora is None:
        return base
    update = _multiply(_multiply(x, lora.down), lora.up)
    return (base.astype(np.float64) + np.float64(lora.scale) * update).astype(np.float32)


def _multiply(x: Activations, weight: QuantizedMatrix | Array) -> Outputs:
    rows, cols = (weight.rows, weight.cols) if isinstance(weight, QuantizedMatrix) else weight.shape
    if x.ndim != 2 or x.shape[1] != cols:
        raise ShapeError(f"linear: activations {x.shape} against a weight of [{rows}, {cols}]")
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty((x.shape[0], rows), np.float32)
    if isinstance(weight, QuantizedMatrix):
        scales, biases = kernel_operand(weight.scales), kernel_operand(weight.biases)
        kernels.linear_quantized(x, weight.codes, scales, biases, weight.bits, y)
    else:
        kernels.linear_float32(x, widen(weight), y)
    return y
