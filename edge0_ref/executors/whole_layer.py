"""Whole layer: every expert of the layer in memory, for prompts long enough to use most of them."""

from collections.abc import Sequence

import numpy as np

from edge0_ref.contract import Array, Counters, ExpertStore, Routing
from edge0_ref.executors.exact import run_into
from edge0_ref.experts import combine
from edge0_ref.prefetch import Prefetcher, Read


class WholeLayerExecutor:
    """[EXE-040] The first hint or call reads all experts in ascending order; `close` gives the memory back."""

    def __init__(self, store: ExpertStore, prefetcher: Prefetcher, counters: Counters) -> None:
        self._store, self._prefetcher, self.counters = store, prefetcher, counters
        self._bank: Array | None = None
        self._reads: list[Read] = []
        self._used: set[int] = set()

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(range(self._store.num_experts)) if self._bank is not None else frozenset()

    def prepare(self, experts: Sequence[int]) -> None:
        self._load()

    def _load(self) -> Array:
        if self._bank is None:
            self._bank = np.empty((self._store.num_experts, self._store.layout.nbytes), np.uint8)
            self._reads = [
                self._prefetcher.submit(self._store, expert, slot, "ahead") for expert, slot in enumerate(self._bank)
            ]
            self.counters.reads += len(self._reads)
            self.counters.bytes_read += self._bank.nbytes
        return self._bank

    def __call__(self, x: Array, routing: Routing) -> Array:
        outputs = np.empty((routing.tokens, routing.experts.shape[1], x.shape[1]), np.float32)
        bank = self._load()
        for expert, uses in routing.uses().items():
            try:
                self.counters.wait_seconds += self._reads[expert].wait()
            except BaseException:
                self.close()
                raise
            run_into(outputs, x, uses, self._store.layout.view(bank[expert]))
            if expert in self._used:
                self.counters.hits += 1
            else:
                self._used.add(expert)
                self.counters.read_ahead += 1
        return combine(outputs, routing.weights)

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        for read in self._reads:
            read.abandon()
        self._bank, self._reads, self._used = None, [], set()
