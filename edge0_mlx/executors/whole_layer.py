"""Whole layer: every expert of the layer in memory, for prompts long enough to use most of them."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from edge0_mlx.device import Device
from edge0_mlx.executors.exact import CallGraph, Held
from edge0_mlx.slots import Bank, Evaluations
from edge0_ref.contract import Counters, ExpertStore, Routing
from edge0_ref.prefetch import Prefetcher, Read


class WholeLayerExecutor:
    """[EXE-040] The first hint or call reads all experts in ascending order; `close` gives the memory back."""

    def __init__(
        self,
        store: ExpertStore,
        prefetcher: Prefetcher,
        counters: Counters,
        device: Device,
        evaluations: Evaluations,
    ) -> None:
        self._store, self._prefetcher, self.counters = store, prefetcher, counters
        self._device, self._evaluations = device, evaluations
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
                self._bank = Bank(self._store, self._store.num_experts, self._device)
                for expert, slot in enumerate(self._bank.slots):
                    self._reads.append(Read(slot, expert, slot.bytes))
                    self._prefetcher.submit(self._reads[-1], "ahead")
            except BaseException:
                self.close()
                raise
            self.counters.reads += len(self._reads)
            self.counters.bytes_read += len(self._reads) * self._store.layout.nbytes
        return self._bank

    def __call__(self, x: mx.array, routing: Routing) -> mx.array:
        graph, bank = CallGraph(x, routing), self._wait(routing)
        self._evaluations.reads_slots_of(self, graph.add(bank, {expert: expert for expert in routing.distinct()}))
        return graph.result()

    def hold(self, routing: Routing) -> Held | None:
        """[EXE-040] An expert's slot is its id."""
        if routing.tokens > 1 or self._load().copies:
            return None
        return Held(self._wait(routing), mx.array(routing.experts[0].astype(np.uint32)))

    def _wait(self, routing: Routing) -> Bank:
        bank = self._load()
        for expert in routing.distinct():
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
                bank.publish(expert)
        return bank

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        for read in self._reads:
            read.abandon()
        self._evaluations.settle(self)
        self._bank, self._reads, self._used = None, [], set()
