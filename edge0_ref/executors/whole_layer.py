"""Whole layer: every expert of the layer in memory, for prompts long enough to use most of them."""

from collections.abc import Sequence

import numpy as np

from edge0_ref.contract import Array, Counters, ExpertStore, Routing
from edge0_ref.executors.bank import Bank, RunExperts, SpareBank, empty_bank
from edge0_ref.executors.exact import run_each
from edge0_ref.experts import combine
from edge0_ref.prefetch import Prefetcher, Read


class WholeLayerExecutor:
    """[EXE-040] The first hint or call reads all experts in ascending order; `close` gives the memory back.

    spare: to whom it is given, if not to the system.
    """

    def __init__(
        self,
        store: ExpertStore,
        prefetcher: Prefetcher,
        counters: Counters,
        run: RunExperts = run_each,
        spare: SpareBank | None = None,
    ) -> None:
        self._store, self._prefetcher, self.counters, self._run = store, prefetcher, counters, run
        self._spare = spare
        self._bank: Bank | None = None
        self._reads: list[Read] = []
        self._used: set[int] = set()

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(range(self._store.num_experts)) if self._bank is not None else frozenset()

    def prepare(self, experts: Sequence[int]) -> None:
        self._load()

    def _load(self) -> Bank:
        if self._bank is None:
            try:
                take = empty_bank if self._spare is None else self._spare.take
                self._bank = take(self._store.layout, self._store.num_experts)
                for expert, slot in enumerate(self._bank.memory):
                    self._reads.append(Read(self._store, expert, slot))
                    self._prefetcher.submit(self._reads[-1], "ahead")
            except BaseException:
                self.close()
                raise
            self.counters.reads += len(self._reads)
            self.counters.bytes_read += self._bank.memory.nbytes
        return self._bank

    def __call__(self, x: Array, routing: Routing) -> Array:
        outputs = np.empty((routing.tokens, routing.experts.shape[1], x.shape[1]), np.float32)
        bank = self._load()
        in_order_of_reads = sorted(routing.uses().items())
        self._run(outputs, x, ((uses, self._wait(expert)) for expert, uses in in_order_of_reads), bank)
        return combine(outputs, routing.weights)

    def _wait(self, expert: int) -> int:
        """The slot of an expert, once its bytes are there."""
        try:
            self.counters.wait_seconds += self._prefetcher.wait(self._reads[expert])
        except BaseException:
            self.close()
            raise
        if expert in self._used:
            self.counters.hits += 1
        else:
            self._used.add(expert)
            self.counters.read_ahead += 1
        return expert

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        for read in self._reads:
            read.abandon()
        bank, self._bank, self._reads, self._used = self._bank, None, [], set()
        if bank is not None and self._spare is not None:
            self._spare.give_back(bank)
