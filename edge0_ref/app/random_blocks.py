"""Random tensors of any size out of a few blocks that fit in memory.

A tensor is a run through a block that is repeated end to end, begun at a place of the tensor's own. Block lengths are
prime, so no two experts of a layer hold the same bytes.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from edge0_ref.bits import narrow
from edge0_ref.contract import Array
from edge0_ref.safetensors_header import DTYPES

CODE_WORDS = 8_388_593
FLOATS = 1_048_573

Kind = Literal["codes", "scales", "biases", "normal", "uniform"]


@dataclass(frozen=True)
class Values:
    """What a tensor is filled with.

    codes: random words. scales, biases: coefficients of `bits`-bit codes such that weights have mean 0 and the given
    spread: w = s * (code - (2^bits - 1) / 2), where the spread of the codes is sqrt((4^bits - 1) / 12).
    normal: mean `center` and `spread`; uniform: `center` plus or minus `spread`.
    """

    kind: Kind
    spread: float = 1.0
    center: float = 0.0
    bits: int = 4


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `place` decides where its run begins: scales and biases of a module share theirs."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Values
    place: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class RandomBlocks:
    """Makes each block once; the same seed gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._normals = np.random.default_rng([seed, 0]).standard_normal(FLOATS, np.float32)
        self._uniforms = np.random.default_rng([seed, 1]).uniform(-1, 1, FLOATS).astype(np.float32)
        self._blocks: dict[tuple[str, Values], memoryview] = {}

    def chunks(self, tensor: NewTensor) -> Iterator[memoryview]:
        """The bytes of a tensor, in pieces of one block at most."""
        key = (tensor.dtype, tensor.values)
        if key not in self._blocks:
            self._blocks[key] = self._block(*key).view(np.uint8).data
        block, left = self._blocks[key], tensor.nbytes
        itemsize = DTYPES[tensor.dtype].itemsize
        start = zlib.crc32(f"{self._seed} {tensor.place}".encode()) % (len(block) // itemsize) * itemsize
        while left:
            chunk = block[start : start + left]
            yield chunk
            left, start = left - len(chunk), 0

    def _block(self, dtype: str, values: Values) -> Array:
        match values.kind:
            case "codes":
                return np.random.default_rng([self._seed, 2]).integers(0, 2**32, CODE_WORDS, np.uint32)
            case "scales" | "biases":
                codes = 2**values.bits - 1
                factor = 1.0 if values.kind == "scales" else -codes / 2
                size = values.spread * (12 / (codes * (codes + 2))) ** 0.5 * factor
                floats = np.copysign(1 + 0.5 * self._uniforms, self._normals) * np.float32(size)  # both signs
            case "normal":
                floats = np.float32(values.center) + np.float32(values.spread) * self._normals
            case "uniform":
                floats = np.float32(values.center) + np.float32(values.spread) * self._uniforms
        return narrow(floats, DTYPES[dtype])
