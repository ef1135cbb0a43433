"""Affine quantisation: int4 and int8 codes, a scale and a bias for every group of 32, 64 or 128.

Reference: mlx `mx.quantize` on its CPU device, which this reproduces to the bit for float32, float16 and bfloat16.
"""

import numpy as np
from jaxtyping import Float32

from edge0_ref import kernels
from edge0_ref.bits import kernel_operand, narrow, pack_codes, unpack_codes, widen
from edge0_ref.contract import Array, QuantizedMatrix
from edge0_ref.errors import ShapeError

SMALLEST_SCALE = np.float32(1e-7)


def dequantize(matrix: QuantizedMatrix) -> Float32[np.ndarray, "rows cols"]:
    """[DEQ-002] w = f32(f32(code * scale) + bias): two roundings, coefficients widened exactly.

    >>> packed = np.array([[0x76543210, 0, 0, 0]], np.uint32)
    >>> matrix = QuantizedMatrix(packed, np.array([[-0.5]], np.float32), np.array([[1.0]], np.float32), 4, 32)
    >>> dequantize(matrix)[0, :4]
    array([ 1. ,  0.5,  0. , -0.5], dtype=float32)
    """
    weights = np.empty((matrix.rows, matrix.cols), np.float32)
    scales, biases = kernel_operand(matrix.scales), kernel_operand(matrix.biases)
    kernels.dequantize_rows(matrix.codes, scales, biases, matrix.bits, weights)
    return weights


def dequantize_as(matrix: QuantizedMatrix) -> Array:
    """[DEQ-004] The same in the coefficients' own dtype T: w = T(T(code * scale) + bias)."""
    dtype = matrix.scales.dtype
    codes = unpack_codes(matrix.packed, matrix.bits).astype(np.float32)
    scales, biases = (np.repeat(widen(c), matrix.group_size, axis=1) for c in (matrix.scales, matrix.biases))
    scaled = widen(narrow(codes * scales, dtype))
    return narrow(scaled + biases, dtype)


def quantize(weights: Array, bits: int, group_size: int) -> QuantizedMatrix:
    """[DEQ-020] Codes and coefficients of weights [rows, cols] (float32, float16, or uint16 for bfloat16).

    The edge of the range that is larger in magnitude is represented exactly: its code is rounded first and the scale
    is adjusted to it. Codes use the unrounded scale and bias; the coefficients are then rounded to the weights' dtype.
    """
    if weights.ndim != 2 or weights.shape[1] % group_size:
        raise ShapeError(f"weights {weights.shape}: rows are not whole groups of {group_size}")
    groups = widen(weights).reshape(weights.shape[0], -1, group_size)
    scales, biases = _coefficients(groups, np.float32(2**bits - 1))
    with np.errstate(invalid="ignore"):  # a NaN weight has no code; it becomes 0
        steps = np.rint((groups - biases[..., None]) / scales[..., None])
        codes = np.clip(np.nan_to_num(steps, nan=0.0), 0, 2**bits - 1).astype(np.uint8)
    packed = pack_codes(codes.reshape(weights.shape), bits)
    return QuantizedMatrix(packed, narrow(scales, weights.dtype), narrow(biases, weights.dtype), bits, group_size)


def _coefficients(
    groups: Float32[np.ndarray, "rows groups size"], top_code: np.float32
) -> tuple[Float32[np.ndarray, "rows groups"], Float32[np.ndarray, "rows groups"]]:
    """[DEQ-021] The unrounded scale and bias of each group."""
    highest, lowest = np.fmax.reduce(groups, axis=-1), np.fmin.reduce(groups, axis=-1)
    low_is_edge = np.abs(lowest) > np.abs(highest)
    scales = np.maximum((highest - lowest) / top_code, SMALLEST_SCALE)
    scales = np.where(low_is_edge, scales, -scales)
    edges = np.where(low_is_edge, lowest, highest)
    edge_codes = np.rint(edges / scales)
    exact = edge_codes != 0
    scales = np.where(exact, edges / np.where(exact, edge_codes, 1), scales)
    return scales.astype(np.float32), np.where(exact, edges, 0).astype(np.float32)


def embed(matrix: QuantizedMatrix | Array, tokens: Array) -> Float32[np.ndarray, "tokens hidden"]:
    """[DEC-002] The rows of an embedding table, dequantised if it is quantised."""
    if not isinstance(matrix, QuantizedMatrix):
        return widen(matrix[tokens])
    rows = QuantizedMatrix(
        matrix.packed[tokens], matrix.scales[tokens], matrix.biases[tokens], matrix.bits, matrix.group_size
    )
    return dequantize(rows)
