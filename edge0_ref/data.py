"""The frozen data that passes between a backend and edge0, checked once, when it is built.

NumPy has no bfloat16, so throughout edge0 an array of dtype uint16 in a coefficient's place *is* bfloat16 bit
patterns; float16 and float32 arrays are themselves.

Axis names: tokens hidden inner experts k rows cols words groups rank vocab.
"""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge0_ref.errors import ShapeError

E = TypeVar("E")  # a backend's executors
Array = NDArray[Any]
ExecutorKind = Literal["exact", "staged", "hot", "whole_layer"]
EXECUTOR_KINDS: tuple[ExecutorKind, ...] = ("exact", "staged", "hot", "whole_layer")
ReadMode = Literal["mmap", "pread", "direct"]
READER_THREADS = 4  # reads under way at once: one or two leave a disk idle while their threads wait for a core
READ_MODES: tuple[ReadMode, ...] = ("mmap", "pread", "direct")
COEFFICIENT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16))
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """[DEQ-001] An affine-quantised matrix as checkpoints store it: `w[r, c] = scale * code + bias`, per group.

    packed: uint32 [rows, words], `32 / bits` codes a word, lowest bits first.
    scales, biases: [rows, groups], float32, float16 or uint16 (bfloat16 bit patterns).
    Raises ShapeError when the three shapes, `bits` and `group_size` do not describe one matrix.
    """

    packed: Array
    scales: Array
    biases: Array
    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ShapeError(f"bits: got {self.bits}, wanted 4 or 8")
        if self.group_size not in GROUP_SIZES:
            raise ShapeError(f"group size: got {self.group_size}, wanted one of {GROUP_SIZES}")
        if self.packed.dtype != np.uint32 or self.packed.ndim != 2:
            raise ShapeError(f"codes: got {self.packed.dtype} {self.packed.shape}, wanted uint32 [rows, words]")
        if self.cols % self.group_size:
            raise ShapeError(f"a row of {self.cols} codes is not a whole number of groups of {self.group_size}")
        wanted = (self.rows, self.cols // self.group_size)
        for name, array in (("scales", self.scales), ("biases", self.biases)):
            if array.shape != wanted:
                raise ShapeError(f"{name}: got shape {array.shape}, wanted {wanted}")
            if array.dtype not in COEFFICIENT_DTYPES:
                raise ShapeError(f"{name}: got {array.dtype}, wanted float32, float16 or uint16")
        if self.scales.dtype != self.biases.dtype:
            raise ShapeError(f"scales are {self.scales.dtype}, biases {self.biases.dtype}")

    @cached_property
    def rows(self) -> int:
        return int(self.packed.shape[0])

    @cached_property
    def cols(self) -> int:
        return int(self.packed.shape[1]) * 32 // self.bits

    @cached_property
    def codes(self) -> Array:
        """The packed words as little-endian bytes, uint8 [rows, cols * bits / 8], without copying where possible."""
        return np.ascontiguousarray(self.packed).view(np.uint8)


@dataclass(frozen=True, eq=False)
class Expert:
    """One routed expert: `down(silu(gate x) * (up x))`. gate, up: [inner, hidden]; down: [hidden, inner]."""

    gate: QuantizedMatrix
    up: QuantizedMatrix
    down: QuantizedMatrix

    def __post_init__(self) -> None:
        inner, hidden = self.gate.rows, self.gate.cols
        for name, matrix, wanted in (("up_proj", self.up, (inner, hidden)), ("down_proj", self.down, (hidden, inner))):
            if (matrix.rows, matrix.cols) != wanted:
                raise ShapeError(f"expert {name}: got [{matrix.rows}, {matrix.cols}], wanted {[*wanted]}")


@dataclass(frozen=True)
class SoftmaxTopK:
    """[RTR-010] Choose the `top_k` largest logits; weights are the softmax over the chosen ones."""

    top_k: int

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ShapeError(f"top_k: got {self.top_k}, wanted at least 1")


@dataclass(frozen=True, eq=False)
class SigmoidGroup:
    """[RTR-020] Sigmoid scores, a bias for choice only, groups of experts of which the best `top_groups` stay."""

    top_k: int
    num_groups: int
    top_groups: int
    scale: float
    expert_bias: Array | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ShapeError(f"top_k: got {self.top_k}, wanted at least 1")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ShapeError(f"top_groups: got {self.top_groups} of {self.num_groups} groups")


RouterSpec = SoftmaxTopK | SigmoidGroup


@dataclass(frozen=True, eq=False)
class Routing:
    """Who computes what: experts int64 [tokens, k], best first; weights float32 [tokens, k]."""

    experts: Array
    weights: Array

    def __post_init__(self) -> None:
        if self.experts.ndim != 2 or self.experts.shape != self.weights.shape:
            raise ShapeError(f"routing: experts {self.experts.shape}, weights {self.weights.shape}; wanted [tokens, k]")

    @property
    def tokens(self) -> int:
        return int(self.experts.shape[0])

    def distinct(self) -> list[int]:
        """The experts of the whole call, each once, in order of first use: token by token, best first."""
        return list(dict.fromkeys(self.experts.ravel().tolist()))

    def uses(self) -> dict[int, tuple[list[int], list[int]]]:
        """Expert -> (tokens, ranks) at which the call uses it, in order of first use."""
        places: dict[int, tuple[list[int], list[int]]] = {}
        for token, chosen in enumerate(self.experts.tolist()):
            for rank, expert in enumerate(chosen):
                tokens, ranks = places.setdefault(expert, ([], []))
                tokens.append(token)
                ranks.append(rank)
        return places


@dataclass(frozen=True, eq=False)
class Lora:
    """[LOR-001] A low-rank update kept beside its base: down (`lora_A`) [rank, cols], up (`lora_B`) [rows, rank]."""

    down: Array
    up: Array
    scale: float

    def __post_init__(self) -> None:
        if self.down.shape[0] != self.up.shape[1]:
            raise ShapeError(f"lora: down has rank {self.down.shape[0]}, up has rank {self.up.shape[1]}")


@dataclass(frozen=True, eq=False)
class PrerouterHead:
    """[PRE-001] linear f + fc2 gelu(fc1 f); fc1 [width, features], fc2 [experts, width], linear [experts, features]."""

    fc1: Array
    fc2: Array
    linear: Array

    def __post_init__(self) -> None:
        width, features = self.fc1.shape
        experts = self.linear.shape[0]
        wanted = {"fc2": (experts, width), "linear": (experts, features)}
        for name, array in (("fc2", self.fc2), ("linear", self.linear)):
            if array.shape != wanted[name]:
                raise ShapeError(f"head {name}: got {array.shape}, wanted {wanted[name]}")


@dataclass(frozen=True)
class ExpertLayout:
    """[STO-010] How one expert lies in a slot: nine pieces, codes first, coefficients after, no gaps.

    gate, up, down codes as uint32, then gate scales, gate biases, up scales, up biases, down scales, down biases.
    """

    hidden: int
    inner: int
    bits: int
    group_size: int
    coefficient_dtype: Literal["float32", "float16", "bfloat16"]

    @property
    def matrix_shapes(self) -> tuple[tuple[str, int, int], ...]:
        """(projection, rows, cols) of the three matrices."""
        return (
            ("gate_proj", self.inner, self.hidden),
            ("up_proj", self.inner, self.hidden),
            ("down_proj", self.hidden, self.inner),
        )

    @property
    def numpy_coefficient(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.coefficient_dtype == "bfloat16" else self.coefficient_dtype)

    def pieces(self) -> list[tuple[str, str, tuple[int, int], int, int]]:
        """(projection, part, shape, offset, bytes) in slot order; part is "weight", "scales" or "biases"."""
        size = self.numpy_coefficient.itemsize
        parts = [
            (name, "weight", (rows, cols * self.bits // 32), rows * cols * self.bits // 8)
            for name, rows, cols in self.matrix_shapes
        ]
        for name, rows, cols in self.matrix_shapes:
            groups = cols // self.group_size
            parts += [(name, part, (rows, groups), rows * groups * size) for part in ("scales", "biases")]
        placed, offset = [], 0
        for name, part, shape, length in parts:
            placed.append((name, part, shape, offset, length))
            offset += length
        return placed

    @property
    def nbytes(self) -> int:
        *_, (_, _, _, offset, length) = self.pieces()
        return offset + length

    def view(self, slot: Array) -> Expert:
        """The expert in `slot` (uint8 [nbytes]) without copying a byte."""
        arrays = {}
        for name, part, shape, offset, length in self.pieces():
            dtype = np.dtype(np.uint32) if part == "weight" else self.numpy_coefficient
            arrays[name, part] = slot[offset : offset + length].view(dtype).reshape(shape)
        gate, up, down = (
            QuantizedMatrix(
                arrays[name, "weight"], arrays[name, "scales"], arrays[name, "biases"], self.bits, self.group_size
            )
            for name, _, _ in self.matrix_shapes
        )
        return Expert(gate, up, down)


@dataclass
class Counters:
    """What streaming did so far. `drops` is 0 by construction and is counted all the same.

    reads: experts asked for, also where a later hint made the read needless before it began, so that no counter but
    wait_seconds depends on threads; bytes_read: their bytes; hits: needed experts that were already in a slot;
    read_ahead: needed experts whose read had been asked for before the call that needed them; on_demand: needed experts
    read by that call itself; evaluations: times a backend that builds graphs had them run and waited, 0 where all is
    computed at once.
    """

    bytes_read: int = 0
    reads: int = 0
    hits: int = 0
    read_ahead: int = 0
    on_demand: int = 0
    drops: int = 0
    wait_seconds: float = 0.0
    evaluations: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything decided before anything is allocated; made by `edge0_ref.engine.plan`.

    top_k: experts a token; slots: of each layer; on_demand_slots: of each layer whose routing nobody predicts, if those
    have slots of their own number; prefill_chunk: tokens a call; prefill_from: tokens that a call of a prompt must have
    for prefill_executor, while a smaller one takes the executor; context: tokens the state may hold.
    """

    top_k: int
    executor: ExecutorKind = "staged"
    prefill_executor: ExecutorKind = "staged"
    slots: int = 8
    read_mode: ReadMode = "pread"
    reader_threads: int = READER_THREADS
    prefill_chunk: int = 256
    context: int = 4096
    on_demand_slots: int | None = None
    prefill_from: int = 1

    def of_layer(self, predicted: bool) -> tuple[ExecutorKind, int]:
        """[PRE-028] What runs a layer's experts while text is decoded, and its slots."""
        if predicted or self.on_demand_slots is None:
            return self.executor, self.slots
        return "hot", self.on_demand_slots

    def executors(
        self, layers: Collection[int], owners: Container[int], make: Callable[[int, ExecutorKind, int], E]
    ) -> tuple[dict[int, E], dict[int, E]]:
        """[PRE-028] [DEC-049] By layer: those of decode steps, and those of a prompt's large calls, if of another kind.

        owners: the layers that have heads; make(layer, kind, slots).
        """
        decode = {layer: make(layer, *self.of_layer(predicted=layer - 1 in owners)) for layer in layers}
        if self.prefill_executor == self.executor:
            return decode, decode
        return decode, {layer: make(layer, self.prefill_executor, self.slots) for layer in layers}
