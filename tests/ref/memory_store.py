"""Routed experts in memory: reads are logged, and can be made to fail or to wait."""

import threading

import numpy as np

from edge0_ref.contract import ExpertLayout
from edge0_ref.errors import CheckpointError, ReadError

LAYOUT = ExpertLayout(hidden=64, inner=32, bits=4, group_size=32, coefficient_dtype="float32")


def random_expert(rng: np.random.Generator, layout: ExpertLayout = LAYOUT) -> np.ndarray:
    """A slot's bytes: any codes, coefficients of both signs."""
    slot = np.empty(layout.nbytes, np.uint8)
    for _, part, shape, offset, length in layout.pieces():
        if part == "weight":
            values = rng.integers(0, 256, length, np.uint8)
        else:
            values = rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint8).ravel()
        slot[offset : offset + length] = values
    return slot


class MemoryStore:
    """log: experts in the order in which reads began; failing: experts whose next reads fail, how often.

    checked: experts in the order in which they were found to be whole; mistaken: checks that met other bytes.
    While `gate` is clear, reads wait in the middle, with half of their bytes written.
    """

    def __init__(self, num_experts: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.slots = [random_expert(rng) for _ in range(num_experts)]
        self.log: list[int] = []
        self.checked: list[int] = []
        self.mistaken = 0
        self.failing: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.writers: dict[int, int] = {}  # address of a slot -> threads inside it now
        self.most_writers = 0
        self._lock = threading.Lock()

    @property
    def num_experts(self) -> int:
        return len(self.slots)

    @property
    def layout(self) -> ExpertLayout:
        return LAYOUT

    def read_into(self, expert: int, slot: np.ndarray) -> None:
        self.read_unchecked(expert, slot)
        self.check(expert, slot)

    def check(self, expert: int, slot: np.ndarray) -> None:
        content = self.slots[expert]
        if slot[: len(content)].tobytes() != content.tobytes():
            self.mistaken += 1
            raise CheckpointError(f"expert {expert}: other bytes")
        self.checked.append(expert)

    def read_unchecked(self, expert: int, slot: np.ndarray) -> None:
        address = slot.ctypes.data
        with self._lock:
            self.log.append(expert)
            self.writers[address] = self.writers.get(address, 0) + 1
            self.most_writers = max(self.most_writers, self.writers[address])
            failing = self.failing.get(expert, 0)
            self.failing[expert] = failing - 1
        content = self.slots[expert]
        half = len(content) // 2
        slot[:half] = content[:half]
        self.begun.release()
        self.gate.wait()
        if failing <= 0:
            slot[half : len(content)] = content[half:]
        with self._lock:
            self.writers[address] -= 1
        if failing > 0:
            raise ReadError(f"expert {expert}: the disk failed")
