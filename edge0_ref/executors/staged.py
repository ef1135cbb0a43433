"""Staged: a pool of slots filled ahead of time, where an expert that is wanted again is not read again."""

from collections.abc import Sequence

import numpy as np

from edge0_ref.contract import Array, ChecksApart, Counters, ExpertStore, Routing
from edge0_ref.errors import BudgetError
from edge0_ref.executors.bank import Bank, RunExperts, empty_bank
from edge0_ref.executors.exact import run_each
from edge0_ref.experts import combine
from edge0_ref.prefetch import Prefetcher, Read, Urgency
from edge0_ref.residency import Placement, Policy, SlotTable


class StagedExecutor:
    """[EXE-010] `prepare` reads ahead into slots nobody needs; a call waits for its own experts only.

    An expert nobody staged is read on demand, and counted: nothing is ever dropped or replaced by another.
    With at least 2K slots a token's experts and the next token's are resident side by side; with fewer the results
    are the same and more is read.
    """

    policy: Policy = "least_recent"

    def __init__(
        self,
        store: ExpertStore,
        slots: int,
        prefetcher: Prefetcher,
        counters: Counters,
        run: RunExperts = run_each,
    ) -> None:
        if slots < 1:
            raise BudgetError(f"an executor with {slots} slots, wanted at least 1")
        self._store, self._prefetcher, self.counters, self._slots = store, prefetcher, counters, slots
        self._run = run
        self._apart = store if isinstance(store, ChecksApart) else None
        self._start_empty()

    def _start_empty(self) -> None:
        self._table = SlotTable(self._slots, self.policy)
        self._bank: Bank | None = None  # allocated by the first read
        self._reads: dict[int, Read] = {}  # slot -> its last read
        self._ahead: set[int] = set()  # read ahead and not used since

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self._table.slot_of)

    def prepare(self, experts: Sequence[int]) -> None:
        with self._table.filling():
            for placement in self._table.hint(experts):
                self._read(placement, "ahead")
                self._ahead.add(placement.expert)

    def __call__(self, x: Array, routing: Routing) -> Array:
        """[EXE-011] Run resident experts, then missing ones, as many at a time as there are slots."""
        outputs = np.empty((routing.tokens, routing.experts.shape[1], x.shape[1]), np.float32)
        uses = routing.uses()
        ready, missing = self._table.begin_call(list(uses))
        try:
            with self._table.filling():
                while ready or missing:
                    placements = self._table.place(missing, pinned=ready)
                    if missing and not placements and not ready:
                        self._table.release_hints()  # a hint never stands in the way of a call
                    for placement in placements:
                        self._read(placement, "now")
                    if ready and self._bank is not None:
                        self._run(outputs, x, ((uses[expert], self._wait(expert)) for expert in ready), self._bank)
                    self.counters.on_demand += len(placements)
                    ready, missing = [p.expert for p in placements], missing[len(placements) :]
        finally:
            self._table.finish_call()
        return combine(outputs, routing.weights)

    def release_hints(self) -> None:
        """A new turn: what was predicted for the old one pins nothing."""
        self._table.release_hints()

    def close(self) -> None:
        for read in self._reads.values():
            read.abandon()
        self._start_empty()

    def _read(self, placement: Placement, urgency: Urgency) -> None:
        """[EXE-012] A slot has one writer: an unfinished read of an evicted expert ends before the next begins."""
        if placement.slot in self._reads:
            self._reads[placement.slot].abandon()
        self._ahead.discard(placement.expert)
        if self._bank is None:
            self._bank = empty_bank(self._store.layout, self._slots)
        slot = self._bank[placement.slot]
        apart = self._apart if urgency == "ahead" else None
        self._reads[placement.slot] = Read(self._store, placement.expert, slot, apart)
        self._table.asked.add(placement.expert)
        self._prefetcher.submit(self._reads[placement.slot], urgency)
        self.counters.reads += 1
        self.counters.bytes_read += slot.nbytes

    def _wait(self, expert: int) -> int:
        """The slot of an expert, once its bytes are there."""
        slot = self._table.slot_of[expert]
        try:
            self.counters.wait_seconds += self._prefetcher.wait(self._reads[slot])
        except BaseException:
            self._table.forget(expert)  # the slot holds no expert; the next call reads again
            self._ahead.discard(expert)
            raise
        if expert in self._ahead:
            self._ahead.remove(expert)
            self.counters.read_ahead += 1
        elif self._table.was_resident(expert):
            self.counters.hits += 1
        self._table.use(expert)
        return slot
