"""The baseline: read an expert, run it, forget it."""

import time
from collections.abc import Iterable, Sequence

import numpy as np

from edge0_ref.contract import Array, Counters, Expert, ExpertStore, Routing
from edge0_ref.executors.bank import Bank, RunExperts, Uses, empty_bank
from edge0_ref.experts import combine, run_expert


def run_into(outputs: Array, x: Array, uses: Uses, expert: Expert) -> None:
    """[EXE-002] Run one expert on the tokens that chose it; outputs [tokens, k, hidden] keeps each at its rank."""
    tokens, ranks = uses
    outputs[tokens, ranks] = run_expert(x[tokens], expert)


def run_each(outputs: Array, x: Array, group: Iterable[tuple[Uses, int]], bank: Bank) -> None:
    """Run experts in the order in which their bytes are asked for, the next while others are being read."""
    for uses, slot in group:
        run_into(outputs, x, uses, bank.expert(slot))


class ExactExecutor:
    """[EXE-001] One buffer, one read for every distinct expert of a call, in order of first use. Hints do nothing."""

    def __init__(self, store: ExpertStore, counters: Counters, run: RunExperts = run_each) -> None:
        self._store, self.counters, self._run = store, counters, run
        self._bank = empty_bank(store.layout, slots=1)

    @property
    def resident(self) -> frozenset[int]:
        return frozenset()

    def prepare(self, experts: Sequence[int]) -> None:
        pass

    def __call__(self, x: Array, routing: Routing) -> Array:
        outputs = np.empty((routing.tokens, routing.experts.shape[1], x.shape[1]), np.float32)
        for expert, uses in routing.uses().items():
            start = time.perf_counter()
            self._store.read_into(expert, self._bank[0])
            self.counters.wait_seconds += time.perf_counter() - start
            self.counters.reads += 1
            self.counters.bytes_read += self._bank[0].nbytes
            self.counters.on_demand += 1
            self._run(outputs, x, [(uses, 0)], self._bank)
        return combine(outputs, routing.weights)

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        pass
