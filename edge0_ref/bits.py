"""Bit patterns: nibbles in words, bfloat16 in uint16.

Reference for the packing: the affine format of mlx (`mx.quantize`), read from checkpoints it wrote.
"""

import numpy as np
from jaxtyping import Float32, UInt8, UInt16, UInt32

from edge0_ref.contract import Array
from edge0_ref.errors import ShapeError


def unpack_codes(packed: UInt32[np.ndarray, "rows words"], bits: int) -> UInt8[np.ndarray, "rows cols"]:
    """[DEQ-003] Codes of a packed matrix: the lowest `bits` of a word are its first element.

    >>> unpack_codes(np.array([[0x76543210]], np.uint32), bits=4)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    >>> unpack_codes(np.array([[0x76543210]], np.uint32), bits=8)
    array([[ 16,  50,  84, 118]], dtype=uint8)
    """
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    codes = (packed[..., None] >> shifts) & np.uint32(2**bits - 1)
    rows: UInt8[np.ndarray, "rows cols"] = codes.astype(np.uint8).reshape(packed.shape[0], packed.shape[1] * per_word)
    return rows


def pack_codes(codes: UInt8[np.ndarray, "rows cols"], bits: int) -> UInt32[np.ndarray, "rows words"]:
    """[DEQ-003] The inverse of `unpack_codes`.

    >>> [hex(word) for word in pack_codes(np.arange(8, dtype=np.uint8)[None], bits=4)[0].tolist()]
    ['0x76543210']
    """
    per_word = 32 // bits
    if codes.shape[1] % per_word:
        raise ShapeError(f"a row of {codes.shape[1]} codes does not fill whole words of {per_word}")
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    grouped = codes.astype(np.uint32).reshape(codes.shape[0], codes.shape[1] // per_word, per_word)
    words: UInt32[np.ndarray, "rows words"] = np.bitwise_or.reduce(grouped << shifts, axis=-1)
    return words


def bfloat16_to_float32(patterns: UInt16[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """[NUM-004] Exact: a bfloat16 is the upper half of a float32.

    >>> bfloat16_to_float32(np.array([0x3F80, 0xC000], np.uint16))
    array([ 1., -2.], dtype=float32)
    """
    wide: Float32[np.ndarray, "..."] = np.left_shift(patterns, 16, dtype=np.uint32).view(np.float32)
    return wide


def float32_to_bfloat16(values: Float32[np.ndarray, "..."]) -> UInt16[np.ndarray, "..."]:
    """[NUM-004] Round to nearest, ties to even; a NaN stays a (quiet) NaN.

    Adding 0x7FFF plus the last kept bit carries into the kept half exactly when rounding goes up.

    >>> [hex(word) for word in float32_to_bfloat16(np.array([1.00390625, 1.01171875, np.nan], np.float32)).tolist()]
    ['0x3f80', '0x3f82', '0x7fc0']
    """
    words = values.view(np.uint32)
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (words >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def widen(values: Array) -> Float32[np.ndarray, "..."]:
    """[NUM-004] float32, float16 or bfloat16 patterns (uint16) as float32, exactly."""
    if values.dtype == np.uint16:
        return bfloat16_to_float32(values)
    return np.ascontiguousarray(values, dtype=np.float32)


def kernel_operand(values: Array) -> Array:
    """The same values as kernels read them: float32 and bfloat16 patterns as they are, float16 widened."""
    return widen(values) if values.dtype == np.float16 else values


def narrow(values: Float32[np.ndarray, "..."], dtype: np.dtype) -> Array:
    """[NUM-004] float32 rounded once to `dtype` (float32, float16, or uint16 for bfloat16)."""
    if dtype == np.uint16:
        return float32_to_bfloat16(np.ascontiguousarray(values))
    with np.errstate(over="ignore"):  # beyond float16 is infinity, by rule and not by accident
        return values.astype(dtype)
