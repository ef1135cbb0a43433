"""Memory that readers write and graphs read: slot banks, and the one place where graphs are evaluated.

A reader thread sees a bank as bytes and never touches MLX. A graph sees the same memory as arrays, and reads it when
it is evaluated, not when it is built: before a slot gets new bytes, every graph that may read it must have run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
import numpy as np

from edge0_mlx.arrays import DeviceMatrix, layout_dtype
from edge0_mlx.device import Device
from edge0_mlx.experts import Matrices, Places, run_experts
from edge0_ref.bits import widen
from edge0_ref.contract import Array, ChecksApart, Counters, ExpertLayout, ExpertStore
from edge0_ref.errors import BackendError

ALIGNMENT = 128  # bytes; a slot starts on a cache line


class Evaluations:
    """Evaluates, counts, and knows which graphs over slots have been built and not run.

    seconds: that the calling thread has waited for graphs.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters, self.seconds = counters, 0.0
        self._open: dict[int, list[mx.array]] = {}

    def run(self, *arrays: Any) -> None:
        """Evaluate arrays, or trees of them, and every open graph. Raises BackendError, out of memory say."""
        self._counters.evaluations += 1
        opened, self._open = self._open, {}
        start = time.perf_counter()
        with named_errors():
            mx.eval(arrays, list(opened.values()))
        self.seconds += time.perf_counter() - start

    def submit(self, array: mx.array) -> None:
        """Let a GPU begin with this. What it needs is allocated at once, which may fail as in `run`.

        Nobody waits, unless the GPU is too far behind for MLX to hand it more: until then this thread sleeps.
        """
        begin: Callable[[mx.array], None] = mx.async_eval
        start, worked = time.perf_counter(), time.thread_time()
        with named_errors():
            begin(array)
        self.seconds += max(0.0, time.perf_counter() - start - (time.thread_time() - worked))

    def reads_slots_of(self, owner: object, result: mx.array) -> None:
        """`result` belongs to a graph over the slots of `owner`."""
        self._open.setdefault(id(owner), []).append(result)

    def settle(self, owner: object) -> None:
        """Slots of `owner` are about to be written, or to go: run the graphs that read them."""
        if id(owner) in self._open:
            self.run()

    def forget(self) -> None:
        """What was built will never be used. On a GPU parts of it may run already: wait for those, however they end."""
        self._open.clear()
        with suppress(RuntimeError):
            mx.synchronize()


@contextmanager
def named_errors() -> Iterator[None]:
    """What MLX raises, as an error of edge0."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise BackendError(f"MLX could not evaluate: {error}") from error


def host_memory(array: mx.array) -> Array | None:
    """The memory of an evaluated array as bytes, or None where MLX does not give it away for writing."""
    view = np.asarray(array)
    return view.view(np.uint8) if view.flags.writeable else None


def run_one(matrices: Matrices, x: mx.array, slots: mx.array, weights: mx.array) -> mx.array:
    """One token through the experts in `slots`: the weighted sum is a product."""
    places = Places.of(np.zeros(slots.shape))  # a constant of a compiled function
    outputs = run_experts(x, matrices, slots, places)
    summed = mx.matmul(weights, outputs.reshape(slots.size, -1).astype(mx.float32))
    return summed.astype(x.dtype)


class Slot:
    """One slot as the store a reader thread is told to read from: the bytes, then what is made of them.

    bytes: uint8 [nbytes]; widened: float32, one for each coefficient, if they are widened.
    """

    def __init__(self, store: ExpertStore, bytes: Array, widened: Array | None) -> None:
        self.store, self.bytes, self._widened = store, bytes, widened

    @property
    def num_experts(self) -> int:
        return self.store.num_experts

    @property
    def layout(self) -> ExpertLayout:
        return self.store.layout

    def read_into(self, expert: int, slot: Array) -> None:
        self.store.read_into(expert, slot)
        self.widen()

    def widen(self) -> None:
        if self._widened is not None:
            dtype = self.layout.numpy_coefficient
            self._widened[:] = widen(self.bytes[-self._widened.size * dtype.itemsize :].view(dtype))


class SlotChecksApart(Slot):
    """[STO-033] One of a layer whose store can read now and check later."""

    store: Any  # ChecksApart as well

    def read_unchecked(self, expert: int, slot: Array) -> None:
        self.store.read_unchecked(expert, slot)
        self.widen()

    def check(self, expert: int, slot: Array) -> None:
        self.store.check(expert, slot)


class Bank:
    """[STO-010] `count` experts, each as `ExpertLayout` says, in memory of MLX.

    matrices: gate, up, down with a leading axis of slots, views of that memory. Coefficients that cannot stay in their
    stored dtype are widened beside it by the reader, once for each read. Where MLX gives no writable memory, readers
    fill memory of the host and `publish` copies a slot. Nothing in it refers back to it, compiled functions included:
    its memory is gone with whoever held it, and not when Python next looks for circles.
    """

    def __init__(
        self,
        store: ExpertStore,
        count: int,
        device: Device,
        memory: Callable[[mx.array], Array | None] = host_memory,
    ) -> None:
        self.store, self.layout = store, store.layout
        self._first = next(offset for _, part, _, offset, _ in self.layout.pieces() if part != "weight")
        stored = layout_dtype(self.layout)
        self._wanted = device.coefficients(stored)
        stride = -(-self.layout.nbytes // ALIGNMENT) * ALIGNMENT
        self._codes = mx.zeros((count, stride // 4), mx.uint32)
        wide = 0 if self._wanted == stored else (self.layout.nbytes - self._first) // stored.size
        self._wide = mx.zeros((count, wide), mx.float32) if wide else None
        with named_errors():
            mx.eval(self._codes, self._wide)
        codes, widened = memory(self._codes), None if self._wide is None else memory(self._wide)
        self.copies = codes is None
        self._bytes = np.zeros((count, stride), np.uint8) if codes is None else codes
        if wide and widened is None:
            widened = np.zeros((count, 4 * wide), np.uint8)
        self._widened = None if widened is None else widened.view(np.float32)
        kind = SlotChecksApart if isinstance(store, ChecksApart) else Slot
        self.slots = [
            kind(store, self._bytes[i, : self.layout.nbytes], None if self._widened is None else self._widened[i])
            for i in range(count)
        ]
        self.matrices = matrices = self._views()
        compiled = mx.compile(lambda x, slots, weights: run_one(matrices, x, slots, weights))
        self._compiled = None if self.copies else compiled

    def _views(self) -> Matrices:
        base = self._codes.view(self._wanted) if self._wide is None else self._wide
        start = 0 if self._wide is None else self._first
        itemsize = self.layout.numpy_coefficient.itemsize
        found: dict[tuple[str, str], mx.array] = {}
        for name, part, shape, offset, _ in self.layout.pieces():
            memory, first = (self._codes, offset // 4) if part == "weight" else (base, (offset - start) // itemsize)
            found[name, part] = mx.as_strided(memory, (memory.shape[0], *shape), (memory.shape[1], shape[1], 1), first)
        mx.eval(list(found.values()))
        form = self.layout.bits, self.layout.group_size
        gate, up, down = (
            DeviceMatrix(found[name, "weight"], found[name, "scales"], found[name, "biases"], *form)
            for name, _, _ in self.layout.matrix_shapes
        )
        return gate, up, down

    def run_one(self, x: mx.array, slots: mx.array, weights: mx.array) -> mx.array:
        """[EXE-004] One token, x [1, hidden]; slots [k]; weights [1, k]."""
        return run_one(self.matrices, x, slots, weights)

    def run_token(self, x: mx.array, slots: mx.array, weights: mx.array) -> mx.array:
        """`run_one`, compiled where slots stay where they are."""
        return self.run_one(x, slots, weights) if self._compiled is None else self._compiled(x, slots, weights)

    def publish(self, index: int) -> None:
        """The read into a slot has ended and graphs are to see it."""
        if self.copies:
            self._codes[index] = mx.array(self._bytes[index].view(np.uint32))
            if self._wide is not None and self._widened is not None:
                self._wide[index] = mx.array(self._widened[index])
            self.matrices = self._views()
