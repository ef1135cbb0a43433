"""The `numba` backend: the reference's own decoder, with the arithmetic of the fast kernels in place of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice

import numba
import numpy as np
from numba.np.ufunc.parallel import get_thread_count

from edge0_ref import fast_dense, fast_experts, fast_kernels, fast_linear, kernels
from edge0_ref.adapters import Adapters
from edge0_ref.arithmetic import Arithmetic
from edge0_ref.backend import OwningExecutor, ReferenceBackend
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import (
    Array,
    Executor,
    ExecutorKind,
    ExpertLayout,
    ExpertStore,
    Lora,
    Observe,
    Plan,
    PrerouterHead,
    QuantizedMatrix,
)
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.errors import ShapeError
from edge0_ref.executors.bank import Bank, Uses
from edge0_ref.lanes import BFLOAT16, FLOAT16, FLOAT32, WIDTH
from edge0_ref.prerouter import predict

WORD_KINDS = {np.dtype(np.uint16): BFLOAT16, np.dtype(np.float16): FLOAT16, np.dtype(np.float32): FLOAT32}
SMALL_WORK = 2**19  # multiplications; sharing out fewer takes longer than doing them
JOBS = 32  # experts of one kernel call: a decoded token's all, a part of a prompt's
NOTHING = np.empty(0, np.uint16)
KERNELS = (
    fast_linear.linear_quantized,
    fast_dense.linear_dense,
    fast_experts.run_experts,
    fast_kernels.causal_conv,
    fast_kernels.delta_rule,
    fast_kernels.causal_attention,
)


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
    packed = matrix.codes if matrix.codes.flags.writeable else matrix.codes.copy()
    (scales, kind), (biases, _) = as_words(matrix.scales), as_words(matrix.biases)
    return packed, scales, biases, np.array([kind, matrix.bits, matrix.group_size])


@dataclass(frozen=True, eq=False)
class StoredMatrix(QuantizedMatrix):
    """A resident matrix, ready to be multiplied."""

    @cached_property
    def operands(self) -> tuple[Array, Array, Array, Array]:
        return operands(self)


class FastArithmetic(Arithmetic):
    """[BCK-001] Float32, over `threads` threads. Bits depend on neither their number nor how a prompt is cut.

    One thread at a time may use it: scratch memory is kept from call to call.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._work = np.empty(0, np.float32)
        self._sharing = 0  # how many threads the next kernel uses; not known yet
        self._layouts: dict[ExpertLayout, tuple[Array, Array]] = {}

    def _room(self, numbers: int) -> Array:
        if self._work.size < numbers:
            self._work = aligned(numbers)
        return self._work

    def _share(self, multiplications: int) -> None:
        """Let the next kernel use all threads, or this one alone where that is faster."""
        wanted = 1 if multiplications < SMALL_WORK else self.threads
        if wanted != self._sharing:  # asking Numba takes microseconds
            numba.set_num_threads(wanted)
            self._sharing = wanted

    def stored(self, weight: QuantizedMatrix | Array) -> QuantizedMatrix | Array:
        """As it is: kernels read numbers of every kind."""
        if not isinstance(weight, QuantizedMatrix):
            return weight
        return StoredMatrix(weight.packed, weight.scales, weight.biases, weight.bits, weight.group_size)

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        if not isinstance(weight, QuantizedMatrix):
            return self._dense(x, weight, lora)
        x = activations(x, weight.cols, weight.rows)
        matrix = weight.operands if isinstance(weight, StoredMatrix) else operands(weight)
        down = up = NOTHING
        kind, rank, scale = FLOAT32, 0, np.float32(0)
        if lora is not None:
            (down, kind), (up, _) = as_words(lora.down), as_words(lora.up)
            rank, scale = lora.down.shape[0], np.float32(lora.scale)
        work = self._room(fast_linear.linear_room(x.shape[0], x.shape[1], weight.group_size, rank))
        y = np.empty((x.shape[0], weight.rows), np.float32)
        self._share(x.size * weight.rows)
        fast_linear.linear_quantized(x, *matrix, down, up, kind, rank, scale, work, y)
        return y

    def _dense(self, x: Array, weight: Array, lora: Lora | None = None) -> Array:
        x = activations(x, weight.shape[1], weight.shape[0])
        words, kind = as_words(weight)
        y = np.empty((x.shape[0], weight.shape[0]), np.float32)
        self._share(x.size * weight.shape[0])
        fast_dense.linear_dense(x, words, kind, y)
        if lora is None:
            return y
        update: Array = np.float32(lora.scale) * self._dense(self._dense(x, lora.down), lora.up)
        return y + update

    def causal_conv(self, x: Array, taps: Array, state: Array) -> Array:
        y = np.empty_like(x)
        fast_kernels.causal_conv(np.ascontiguousarray(x), taps, state, y)
        return y

    def delta_rule(self, q: Array, k: Array, v: Array, beta: Array, decay: Array, state: Array) -> Array:
        y = np.empty_like(v)
        self._share(v.shape[0] * state.size)
        fast_kernels.delta_rule(q, k, v, beta, decay, state, y)
        return y

    def causal_attention(
        self, q: Array, keys: Array, values: Array, first: int, scale: float, value_size: int
    ) -> Array:
        y = np.empty((*q.shape[:2], value_size), np.float32)
        self._share((first + q.shape[0]) * q.size)
        fast_kernels.causal_attention(q, keys, values, first, np.float32(scale), y)
        return y

    def run_experts(self, outputs: Array, x: Array, group: Iterable[tuple[Uses, int]], bank: Bank) -> None:
        """[EXE-003] Experts where they lie, many at once: the next are read meanwhile."""
        waiting = iter(group)
        while jobs := list(islice(waiting, JOBS)):
            self._run_jobs(outputs, x, jobs, bank)

    def _run_jobs(self, outputs: Array, x: Array, jobs: list[tuple[Uses, int]], bank: Bank) -> None:
        tokens = [token for (chosen, _), _ in jobs for token in chosen]
        ranks = [rank for (_, chosen), _ in jobs for rank in chosen]
        slots = np.array([slot for _, slot in jobs])
        starts = np.array([0, *accumulate(len(chosen) for (chosen, _), _ in jobs)])
        layout, memory = bank.layout, bank.memory
        if layout not in self._layouts:
            self._layouts[layout] = places_of(layout), form_of(layout)
        places, form = self._layouts[layout]
        work = self._room(fast_experts.experts_room(len(tokens), layout.hidden, layout.inner, layout.group_size))
        y = np.empty((len(tokens), layout.hidden), np.float32)
        self._share(3 * y.size * layout.inner)
        words = memory.reshape(-1).view(np.uint16)
        x = activations(x, layout.hidden, layout.inner)
        fast_experts.run_experts(x, np.array(tokens), memory, words, slots, starts, places, form, work, layout.inner, y)
        outputs[tokens, ranks] = y


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


class NumbaBackend(ReferenceBackend):
    """[BCK-001] Everything the reference claims but its bits."""

    name = "numba"
    claims = ReferenceBackend.claims - {"bits"}
    reads_as_stored = True

    def __init__(self) -> None:
        self._arithmetic = FastArithmetic(get_thread_count())  # type: ignore[no-untyped-call]

    def notice(self) -> str | None:
        """[BCK-011] The first run on a machine compiles the kernels."""
        if kernels.compiled_before(KERNELS):
            return None
        return "compiling kernels, once on this machine: half a minute at most"

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        return self._arithmetic.linear(x, weight, lora)

    def predict(self, head: PrerouterHead, features: Array) -> Array:
        return predict(head, features, self._arithmetic.linear)

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> Executor[Array]:
        return OwningExecutor(kind, store, slots, FastArithmetic(self._arithmetic.threads).run_experts)

    def decoder(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
    ) -> ReferenceDecoder:
        arithmetic = FastArithmetic(self._arithmetic.threads)
        return ReferenceDecoder(checkpoint, plan, adapters, observe, arithmetic)


def create() -> NumbaBackend:
    """Entry point of the group `edge0.backends`."""
    return NumbaBackend()
