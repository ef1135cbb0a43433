"""Affine quantisation: int4 and int8 codes, a scale and a bias for every group of 32, 64 or 128."""

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32

from edge0_mlx.arrays import DeviceMatrix, Weight, from_numpy, stored_dtype
from edge0_ref.bits import narrow, widen
from edge0_ref.contract import Array, QuantizedMatrix
from edge0_ref.errors import ShapeError


def dequantize(matrix: QuantizedMatrix) -> Float32[mx.array, "rows cols"]:
    """[DEQ-002] w = f32(f32(code * scale) + bias), coefficients widened exactly before MLX sees them.

    MLX dequantises in the dtype of the coefficients, so those of 16 bits would round twice to 16 bits.
    """
    packed, scales, biases = (from_numpy(part) for part in (matrix.packed, widen(matrix.scales), widen(matrix.biases)))
    return mx.dequantize(packed, scales, biases, group_size=matrix.group_size, bits=matrix.bits)


def dequantize_as(matrix: QuantizedMatrix) -> Array:
    """[DEQ-004] The same in the coefficients' own dtype T: w = T(T(code * scale) + bias)."""
    dtype = stored_dtype(matrix.scales)
    scales, biases = (from_numpy(widen(part)).astype(dtype) for part in (matrix.scales, matrix.biases))
    weights = mx.dequantize(
        from_numpy(matrix.packed), scales, biases, group_size=matrix.group_size, bits=matrix.bits, stream=mx.cpu
    )
    return narrow(np.array(weights.astype(mx.float32)), matrix.scales.dtype)


def quantize(weights: Array, bits: int, group_size: int) -> QuantizedMatrix:
    """[DEQ-020] Codes and coefficients of weights [rows, cols], in their dtype.

    Always on the CPU: MLX's GPU kernels round halves away from zero and give other codes.
    """
    if weights.ndim != 2 or weights.shape[1] % group_size:
        raise ShapeError(f"weights {weights.shape}: rows are not whole groups of {group_size}")
    dtype = stored_dtype(weights)
    wide = from_numpy(widen(weights)).astype(dtype)
    packed, scales, biases = mx.quantize(wide, group_size=group_size, bits=bits, stream=mx.cpu)
    held = [narrow(np.array(part.astype(mx.float32)), weights.dtype) for part in (scales, biases)]
    return QuantizedMatrix(np.array(packed), held[0], held[1], bits, group_size)


def embed(matrix: Weight, tokens: mx.array) -> Float[mx.array, "tokens hidden"]:
    """[DEC-002] The rows of an embedding table, dequantised if it is quantised."""
    if not isinstance(matrix, DeviceMatrix):
        return matrix[tokens]
    return mx.dequantize(matrix.packed[tokens], matrix.scales[tokens], matrix.biases[tokens], **matrix.form)
