"""What experts compute, and how a token's experts are added up."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float, Float32, UInt32

from edge0_mlx.arrays import DeviceMatrix, widened
from edge0_mlx.functions import swiglu
from edge0_ref.contract import Array

Activations = Float[mx.array, "tokens hidden"]
Matrices = tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix]


class Places(NamedTuple):
    """Where experts run: place p takes row `rows[p]` of x, and is place `numbers[p]` = p for the last product."""

    rows: UInt32[mx.array, "*places"]
    numbers: UInt32[mx.array, "*places"]

    @classmethod
    def of(cls, rows: Array) -> "Places":
        numbers = np.arange(rows.size, dtype=np.uint32).reshape(rows.shape)
        return cls(mx.array(rows.astype(np.uint32)), mx.array(numbers))


def run_experts(
    x: Float[mx.array, "*rows 1 hidden"],
    bank: Matrices,
    slots: UInt32[mx.array, "*places"],
    places: Places,
) -> Float[mx.array, "*places 1 hidden"]:
    """[EXE-003] At each place, a row of x through the expert in a slot: down(silu(gate x) * (up x)). Never a LoRA.

    Each place is a product of its own. MLX's kernel that runs an expert's places as one wants a matrix of all slots in
    one piece, which readers do not leave it in: it would first copy them all.
    """

    def multiply(values: mx.array, matrix: DeviceMatrix, rows: mx.array) -> mx.array:
        return mx.gather_qmm(
            widened(values, matrix.dtype),
            matrix.packed,
            matrix.scales,
            matrix.biases,
            lhs_indices=rows,
            rhs_indices=slots,
            transpose=True,
            **matrix.form,
        ).astype(x.dtype)

    gate, up, down = bank
    inner = swiglu(multiply(x, gate, places.rows), multiply(x, up, places.rows))
    by_place = places.numbers.size, 1, inner.shape[-1]  # said in full, a shape that is so already costs nothing
    return multiply(inner.reshape(by_place), down, places.numbers)


def combine(outputs: Float[mx.array, "tokens k hidden"], weights: Float32[mx.array, "tokens k"]) -> Activations:
    """[EXE-004] y = sum over j of weights[j] * outputs[j], in float32, best expert first."""
    return (outputs.astype(mx.float32) * weights[..., None]).sum(axis=-2).astype(outputs.dtype)
