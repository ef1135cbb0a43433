"""An expert store in memory that sees every read, and that can be slow, fail, or finish reads in another order."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance.cases import ExpertsRecipe, slot_bytes
from edge0_ref.contract import Expert, ExpertLayout
from edge0_ref.errors import ReadError

PATIENCE_SECONDS = 10.0  # how long a read that was asked for may take to reach the store; only failures wait so long


@dataclass(repr=False)
class RecordingStore:
    """One layer's experts.

    reads: experts asked for, in order; failing: experts whose reads raise, leaving garbage in the slot;
    slow: seconds that a read of an expert takes; overlaps: reads that began while another wrote the same slot.
    """

    recipe: ExpertsRecipe
    experts: list[Expert] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    slow: dict[int, float] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    overlaps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.experts = self.experts or self.recipe.build()
        self._bytes = [slot_bytes(expert) for expert in self.experts]
        self._writing: dict[int, int] = {}
        self._finished: list[int] = []
        self._changed = threading.Condition()

    @classmethod
    def of(cls, experts: list[Expert]) -> "RecordingStore":
        """A store of given experts."""
        gate = experts[0].gate
        coefficient = "bfloat16" if gate.scales.dtype == np.uint16 else str(gate.scales.dtype)
        recipe = ExpertsRecipe(len(experts), gate.cols, gate.rows, gate.bits, gate.group_size, coefficient)
        return cls(recipe, experts)

    @property
    def num_experts(self) -> int:
        return self.recipe.num_experts

    @property
    def layout(self) -> ExpertLayout:
        return self.recipe.layout

    def read_into(self, expert: int, slot: np.ndarray) -> None:
        where = int(slot.__array_interface__["data"][0])
        with self._changed:
            self.reads.append(expert)
            if where in self._writing:
                self.overlaps.append((self._writing[where], expert))
            self._writing[where] = expert
            fails, seconds = expert in self.failing, self.slow.get(expert, 0.0)
            self._changed.notify_all()
        try:
            self._write(expert, slot, fails, seconds)
        finally:
            with self._changed:
                self._writing.pop(where, None)
                self._finished.append(expert)
                self._changed.notify_all()

    def _write(self, expert: int, slot: np.ndarray, fails: bool, seconds: float) -> None:
        data, half = self._bytes[expert], self.layout.nbytes // 2
        slot[:half] = data[:half]
        slot[half:] = 0x5A
        if seconds:
            time.sleep(seconds)
        if fails:
            raise ReadError(f"expert {expert}: the disk failed, as it was told to")
        slot[half:] = data[half:]

    @property
    def unfinished(self) -> int:
        with self._changed:
            return len(self._writing)

    def settle(self, since: int, required: Sequence[int]) -> list[int]:
        """Wait until `required` were read after the first `since` reads and nobody writes; all reads after those."""

        def settled() -> bool:
            return not self._writing and not Counter(required) - Counter(self._finished[since:])

        with self._changed:
            self._changed.wait_for(settled, PATIENCE_SECONDS)
            return self.reads[since:]

    def begin(self) -> None:
        """Wait until a read has begun."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.reads), PATIENCE_SECONDS)

    def settle_count(self, reads: int) -> list[int]:
        """Wait until `reads` reads were asked for in all and nobody writes; all reads so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing and len(self.reads) >= reads, PATIENCE_SECONDS)
            return list(self.reads)
