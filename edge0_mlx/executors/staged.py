"""Staged: a pool of slots filled ahead of time, where an expert that is wanted again is not read again."""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from edge0_mlx.device import Device
from edge0_mlx.executors.exact import CallGraph, Held, bank_slots
from edge0_mlx.slots import Bank, Evaluations, SlotChecksApart
from edge0_ref.contract import Counters, ExpertStore, Routing
from edge0_ref.errors import BudgetError
from edge0_ref.prefetch import Prefetcher, Read, Urgency
from edge0_ref.residency import Placement, Policy, SlotTable


class StagedExecutor:
    """[EXE-010] `prepare` reads ahead into slots nobody needs; a call waits for its own experts only.

    An expert nobody staged is read on demand, and counted: nothing is ever dropped or replaced by another.
    A call builds a graph and evaluates nothing, unless it needs more experts than there are slots.
    """

    policy: Policy = "least_recent"

    def __init__(
        self,
        store: ExpertStore,
        slots: int,
        prefetcher: Prefetcher,
        counters: Counters,
        device: Device,
        evaluations: Evaluations,
    ) -> None:
        if slots < 1:
            raise BudgetError(f"an executor with {slots} slots, wanted at least 1")
        self._store, self._prefetcher, self.counters, self._slots = store, prefetcher, counters, slots
        self._device, self._evaluations = device, evaluations
        self._start_empty()

    def _start_empty(self) -> None:
        self._table = SlotTable(self._slots, self.policy)
        self._bank: Bank | None = None  # allocated by the first read
        self._reads: dict[int, Read] = {}  # slot -> a read that nobody has waited for yet
        self._ahead: set[int] = set()  # read ahead and not used since

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self._table.slot_of)

    def prepare(self, experts: Sequence[int]) -> None:
        with self._table.filling():
            for placement in self._table.hint(experts):
                self._read(placement, "ahead")
                self._ahead.add(placement.expert)

    def __call__(self, x: mx.array, routing: Routing) -> mx.array:
        """[EXE-011] Run resident experts and missing ones together, or as many at a time as there are slots."""
        graph = CallGraph(x, routing)
        for bank, group in self._groups(routing):
            self._evaluations.reads_slots_of(self, graph.add(bank, group))
        return graph.result()

    def hold(self, routing: Routing) -> Held | None:
        """What a call would run, for a graph that reaches beyond its experts; None if that takes several groups.

        With 2K slots it takes one, whatever is resident: the same function then runs every token.
        """
        tokens, k = routing.experts.shape
        if tokens > 1 or 2 * k > self._slots or (self._bank and self._bank.copies):
            return None
        experts, slot_of = routing.experts[0].tolist(), self._table.slot_of
        slots = [slot_of.get(expert) for expert in experts]
        if None in slots or not self._reads.keys().isdisjoint(slots):
            ((bank, group),) = self._groups(routing)
            return Held(bank, bank_slots(group, routing))
        self._table.call_resident(experts)  # as `_groups` does, if nothing is to be read or waited for
        self._count_hits(self._ahead.intersection(experts) if self._ahead else self._ahead, k)
        return Held(self._allocated(), mx.array(slots, mx.uint32))

    def _groups(self, routing: Routing) -> Iterator[tuple[Bank, dict[int, int]]]:
        """Expert -> slot of all experts of a call, in groups that are in slots at the same time.

        A group's graph must be built before the next group is asked for: its slots may then be given away.
        """
        group = dict[int, int]()
        ready, missing = self._table.begin_call(routing.distinct())
        try:
            with self._table.filling():
                while ready or missing:
                    placements = self._table.place(missing, pinned=ready) if missing else []
                    if missing and not placements and not ready:
                        self._table.release_hints()  # a hint never stands in the way of a call
                    if placements and {placement.slot for placement in placements} & set(group.values()):
                        yield self._allocated(), group
                        group = {}
                    for placement in placements:
                        self._read(placement, "now")
                    self._wait_for(ready)
                    group |= {expert: self._table.slot_of[expert] for expert in ready}
                    self.counters.on_demand += len(placements)
                    ready, missing = [p.expert for p in placements], missing[len(placements) :]
        finally:
            self._table.finish_call()
        yield self._allocated(), group

    def _allocated(self) -> Bank:
        if self._bank is None:
            self._bank = Bank(self._store, self._slots, self._device)
        return self._bank

    def release_hints(self) -> None:
        """A new turn: what was predicted for the old one pins nothing."""
        self._table.release_hints()

    def close(self) -> None:
        for read in self._reads.values():
            read.abandon()
        self._evaluations.settle(self)
        self._start_empty()

    def _read(self, placement: Placement, urgency: Urgency) -> None:
        """[EXE-012] A slot has one writer: an unfinished read of an evicted expert ends before the next begins.

        And it has no reader: graphs that were built over it are run first.
        """
        if placement.slot in self._reads:
            self._reads[placement.slot].abandon()
        self._evaluations.settle(self)
        self._ahead.discard(placement.expert)
        slot = self._allocated().slots[placement.slot]
        apart = slot if urgency == "ahead" and isinstance(slot, SlotChecksApart) else None
        self._reads[placement.slot] = Read(slot, placement.expert, slot.bytes, apart)
        self._table.asked.add(placement.expert)
        self._prefetcher.submit(self._reads[placement.slot], urgency)
        self.counters.reads += 1
        self.counters.bytes_read += slot.bytes.nbytes

    def _wait_for(self, experts: Sequence[int]) -> None:
        """Until the bytes of all are there; those met before a read fails count as used."""
        table, reads, met = self._table, self._reads, len(experts)
        try:
            for place, expert in enumerate(experts):
                if table.slot_of[expert] in reads:
                    met = place
                    self._end_read(expert, table.slot_of[expert])
            met = len(experts)
        finally:
            used = experts[:met]
            table.use_all(used)
            ready = table.ready_at_call.intersection(used)
            self._count_hits(self._ahead & ready, len(ready))

    def _count_hits(self, ahead: set[int], ready: int) -> None:
        """Of `ready` experts that were in slots, those in `ahead` are there because they were read ahead."""
        if ahead:
            self._ahead -= ahead
            self.counters.read_ahead += len(ahead)
        self.counters.hits += ready - len(ahead)

    def _end_read(self, expert: int, slot: int) -> None:
        try:
            self.counters.wait_seconds += self._prefetcher.wait(self._reads[slot])
        except BaseException:
            self._table.forget(expert)  # the slot holds no expert; the next call reads again
            self._ahead.discard(expert)
            raise
        del self._reads[slot]
        self._allocated().publish(slot)
