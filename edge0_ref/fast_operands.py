"""The `numba` backend's operands: the arrays of files and slots, as its kernels take them.

Kernels take flat 16-bit words, a number that says what the words are patterns of, and int64 tables of places: one
compiled form for every dtype, and no copy where the memory is ours to hand on.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import numpy as np

from edge0_ref.bits import widen
from edge0_ref.contract import Array, ExpertLayout, Lora, QuantizedMatrix
from edge0_ref.errors import ShapeError
from edge0_ref.fast_dense import ROWS
from edge0_ref.lanes import BFLOAT16, FLOAT16, FLOAT32, WIDTH

Layer = tuple[QuantizedMatrix | Array, Lora | None]

WORD_KINDS = {np.dtype(np.uint16): BFLOAT16, np.dtype(np.float16): FLOAT16, np.dtype(np.float32): FLOAT32}
NOTHING = np.empty(0, np.uint16)
MANY_TOKENS, MANY_ROWS = 64, 128  # a prompt's activations come from memory again for every task: let there be few


def as_words(values: Array) -> tuple[Array, int]:
    """Numbers as flat 16-bit words and the kind of number they are; the memory is shared where it can be."""
    if not values.flags.writeable:
        values = values.copy()  # compiled code has one type for arrays, and it may write to them
    return np.ascontiguousarray(values).reshape(-1).view(np.uint16), WORD_KINDS[values.dtype]


def activations(x: Array, cols: int, rows: int) -> Array:
    """x as kernels take it. Raises ShapeError."""
    if x.ndim != 2 or x.shape[1] != cols:
        raise ShapeError(f"linear: activations {x.shape} against a weight of [{rows}, {cols}]")
    x = np.ascontiguousarray(x, np.float32)
    return x if x.flags.writeable else x.copy()


def aligned(numbers: int) -> Array:
    """Scratch memory that starts with a cache line: sixteen lanes that straddle two cost two reads."""
    raw = np.empty(numbers + WIDTH, np.float32)
    start = -(raw.ctypes.data // raw.itemsize) % WIDTH
    return raw[start : start + numbers]


def operands(matrix: QuantizedMatrix) -> tuple[Array, Array, Array, Array]:
    """Codes as bytes, scales and biases as words, and what kernels call the form of a matrix."""
    packed = (matrix.codes if matrix.codes.flags.writeable else matrix.codes.copy()).reshape(-1)
    (scales, kind), (biases, _) = as_words(matrix.scales), as_words(matrix.biases)
    return packed, scales, biases, np.array([kind, matrix.bits, matrix.group_size])


class Stacked:
    """Quantised layers of one form and of the same input, as one matrix: their rows, one below the other.

    places: each layer's columns of the result.
    """

    def __init__(self, layers: Sequence[tuple[QuantizedMatrix, Lora | None]]) -> None:
        matrices, rows = [matrix for matrix, _ in layers], [matrix.rows for matrix, _ in layers]
        ends = [0, *accumulate(rows)]
        self.cols, self.rows, self.group_size = matrices[0].cols, ends[-1], matrices[0].group_size
        self.places = [slice(first, end) for first, end in pairwise(ends)]
        self.rank = sum(lora.down.shape[0] for _, lora in layers if lora)
        packed, scales, biases, form = zip(*(operands(matrix) for matrix in matrices), strict=True)
        self._weights = joined(packed), joined(scales), joined(biases), form[0]
        self._tasks, self._large_tasks = tasks_of(rows, ROWS), tasks_of(rows, MANY_ROWS)
        self._loras = lora_operands([lora for _, lora in layers], rows)

    def operands(self, tokens: int) -> tuple[Any, ...]:
        """What `fast_linear.linear_quantized` takes between x and `work`."""
        return *self._weights, self._tasks if tokens < MANY_TOKENS else self._large_tasks, *self._loras


def can_be_stacked(layers: Sequence[Layer]) -> TypeGuard[Sequence[tuple[QuantizedMatrix, Lora | None]]]:
    """Whether all are quantised, and in one way."""
    matrices = [matrix for matrix, _ in layers if isinstance(matrix, QuantizedMatrix)]
    forms = {(matrix.bits, matrix.group_size, matrix.scales.dtype, matrix.cols) for matrix in matrices}
    return len(matrices) == len(layers) and len(forms) == 1


def joined(arrays: Sequence[Array]) -> Array:
    """One below the other; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def tasks_of(rows: Sequence[int], most: int) -> Array:
    """Which rows a thread takes at a time: int64 [tasks, 3] of part, first row, last row + 1. None are of two parts."""
    parts = enumerate(pairwise(accumulate(rows, initial=0)))
    return np.array([(part, r, min(r + most, end)) for part, (top, end) in parts for r in range(top, end, most)])


def lora_operands(loras: Sequence[Lora | None], rows: Sequence[int]) -> tuple[Array, Array, Array, int, Array]:
    """Table of parts, `down` row by row, `up` column by column, their kind, and factors: see `linear_quantized`."""
    given = [lora for lora in loras if lora]
    if len({part.dtype for lora in given for part in (lora.down, lora.up)}) > 1:
        given = [Lora(widen(lora.down), widen(lora.up), lora.scale) for lora in given]
    down, up = ([as_words(part) for part in parts] for parts in ([a.down for a in given], [a.up.T for a in given]))
    ranks = [lora.down.shape[0] if lora else 0 for lora in loras]
    sizes = [count * rank for count, rank in zip(rows, ranks, strict=True)]
    before, begins, firsts = (accumulate(counts, initial=0) for counts in (ranks, sizes, rows))
    starts = [begin - first for begin, first in zip(begins, firsts, strict=True)]
    parts = np.array([*zip(ranks, before, starts, rows, strict=False)])
    factors = np.array([lora.scale if lora else 0 for lora in loras], np.float32)
    if not given:
        return parts, NOTHING, NOTHING, FLOAT32, factors
    return parts, joined([words for words, _ in down]), joined([words for words, _ in up]), down[0][1], factors


def form_of(layout: ExpertLayout) -> Array:
    return np.array([WORD_KINDS[layout.numpy_coefficient], layout.bits, layout.group_size])


def places_of(layout: ExpertLayout) -> Array:
    """Where gate, up and down lie in a slot: codes in bytes, scales and biases in numbers; last, the slot's size."""
    size = layout.numpy_coefficient.itemsize
    offsets = {(name, part): offset for name, part, _, offset, _ in layout.pieces()}
    places = [
        (offsets[name, "weight"], offsets[name, "scales"] // size, offsets[name, "biases"] // size)
        for name, _, _ in layout.matrix_shapes
    ]
    return np.array([*places, (layout.nbytes, layout.nbytes // size, 0)])
