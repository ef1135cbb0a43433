"""The baseline: read an expert, run it, forget it."""

import time
from collections.abc import Sequence

import numpy as np

from edge0_ref.contract import Array, Counters, Expert, ExpertStore, Routing
from edge0_ref.experts import combine, run_expert

Uses = tuple[list[int], list[int]]


def run_into(outputs: Array, x: Array, uses: Uses, expert: Expert) -> None:
    """[EXE-002] Run one expert on the tokens that chose it; outputs [tokens, k, hidden] keeps each at its rank."""
    tokens, ranks = uses
    outputs[tokens, ranks] = run_expert(x[tokens], expert)


class ExactExecutor:
    """[EXE-001] One buffer, one read for every distinct expert of a call, in order of first use. Hints do nothing."""

    def __init__(self, store: ExpertStore, counters: Counters) -> None:
        self._store, self.counters = store, counters
        self._buffer = np.empty(store.layout.nbytes, np.uint8)
        self._expert = store.layout.view(self._buffer)

    @property
    def resident(self) -> frozenset[int]:
        return frozenset()

    def prepare(self, experts: Sequence[int]) -> None:
        pass

    def __call__(self, x: Array, routing: Routing) -> Array:
        outputs = np.empty((routing.tokens, routing.experts.shape[1], x.shape[1]), np.float32)
        for expert, uses in routing.uses().items():
            start = time.perf_counter()
            self._store.read_into(expert, self._buffer)
            self.counters.wait_seconds += time.perf_counter() - start
            self.counters.reads += 1
            self.counters.bytes_read += self._buffer.nbytes
            self.counters.on_demand += 1
            run_into(outputs, x, uses, self._expert)
        return combine(outputs, routing.weights)

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        pass
