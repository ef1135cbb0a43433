"""Linear layers, with the recovery LoRA beside them: never merged, so what int4 would round away is kept."""

import mlx.core as mx
from jaxtyping import Float

from edge0_mlx.arrays import DeviceLora, DeviceMatrix, Weight, widened
from edge0_ref.errors import ShapeError

Activations = Float[mx.array, "tokens cols"]
Outputs = Float[mx.array, "tokens rows"]


def linear(x: Activations, weight: Weight, lora: DeviceLora | None = None) -> Outputs:
    """[DEQ-010] [LOR-001] y = W x, or y = W x + scale * B (A x), in the dtype of x. Raises ShapeError."""
    return add_update(x, _multiply(x, weight), lora)


def add_update(x: Activations, base: Outputs, lora: DeviceLora | None) -> Outputs:
    """[LOR-001] base + scale * B (A x), in float32 until the sum is made."""
    if lora is None:
        return base
    update = mx.matmul(mx.matmul(x.astype(mx.float32), lora.down), lora.up)
    return (base.astype(mx.float32) + lora.scale * update).astype(x.dtype)


def _multiply(x: Activations, weight: Weight) -> Outputs:
    """In float32 unless x and the coefficients share another dtype; the result in the dtype of x."""
    rows, cols = weight.shape
    if x.ndim != 2 or x.shape[1] != cols:
        raise ShapeError(f"linear: activations {x.shape} against a weight of [{rows}, {cols}]")
    wide = widened(x, weight.dtype)
    if isinstance(weight, DeviceMatrix):
        y = mx.quantized_matmul(wide, weight.packed, weight.scales, weight.biases, transpose=True, **weight.form)
    else:
        y = mx.matmul(wide, weight.T)
    return y.astype(x.dtype)
