"""The baseline: read an expert, run it, forget it."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from edge0_mlx.device import Device
from edge0_mlx.experts import Places, combine, run_experts
from edge0_mlx.slots import Bank, Evaluations
from edge0_ref.contract import Array, Counters, ExpertStore, Routing


class Held(NamedTuple):
    """One token's experts, all in slots: slots uint32 [k] of a bank."""

    bank: Bank
    slots: mx.array


def bank_slots(slot_of: Mapping[int, int], routing: Routing) -> mx.array:
    """The slots of a single token's experts, best first."""
    return mx.array([slot_of[expert] for expert in routing.experts[0].tolist()], mx.uint32)


class CallGraph:
    """The graph of one call, built group by group: a group is experts that are in slots at the same time."""

    def __init__(self, x: mx.array, routing: Routing) -> None:
        self._x, self._routing = x, routing
        self._parts: list[mx.array] = []
        self._places: list[Array] = []
        self._token: mx.array | None = None

    def add(self, bank: Bank, slot_of: Mapping[int, int]) -> mx.array:
        """[EXE-002] Run a group at the places (token, rank) that use it."""
        experts = self._routing.experts
        if len(experts) == 1 and slot_of.keys() >= set(experts[0].tolist()):
            weights = mx.array(self._routing.weights)
            self._token = bank.run_token(self._x, bank_slots(slot_of, self._routing), weights)
            return self._token
        table = np.full(int(experts.max()) + 1, -1, np.int32)
        table[list(slot_of)] = list(slot_of.values())
        return self._add_places(bank, table[experts].ravel())

    def _add_places(self, bank: Bank, slots: Array) -> mx.array:
        places = np.flatnonzero(slots >= 0)
        places = places[np.argsort(slots[places], kind="stable")]  # an expert's weights are read while they are near
        rows = Places.of(places // self._routing.experts.shape[1])
        of_slots = mx.array(slots[places].astype(np.uint32))
        part = run_experts(self._x[:, None], bank.matrices, of_slots, rows)[:, 0]
        self._parts.append(part)
        self._places.append(places)
        return part

    def result(self) -> mx.array:
        if self._token is not None:
            return self._token
        back = mx.array(np.argsort(np.concatenate(self._places)))
        outputs = mx.concatenate(self._parts)[back].reshape(*self._routing.experts.shape, -1)
        return combine(outputs, mx.array(self._routing.weights))


class ExactExecutor:
    """[EXE-001] One slot, one read for every distinct expert of a call, in order of first use. Hints do nothing."""

    def __init__(self, store: ExpertStore, counters: Counters, device: Device, evaluations: Evaluations) -> None:
        self.counters, self._evaluations = counters, evaluations
        self._bank = Bank(store, 1, device)

    @property
    def resident(self) -> frozenset[int]:
        return frozenset()

    def prepare(self, experts: Sequence[int]) -> None:
        pass

    def __call__(self, x: mx.array, routing: Routing) -> mx.array:
        graph, slot = CallGraph(x, routing), self._bank.slots[0]
        for expert in routing.distinct():
            self._evaluations.settle(self)
            start = time.perf_counter()
            slot.read_into(expert, slot.bytes)
            self.counters.wait_seconds += time.perf_counter() - start
            self.counters.reads += 1
            self.counters.bytes_read += slot.bytes.nbytes
            self.counters.on_demand += 1
            self._bank.publish(0)
            self._evaluations.reads_slots_of(self, graph.add(self._bank, {expert: 0}))
        return graph.result()

    def hold(self, routing: Routing) -> Held | None:
        """Never: one slot holds one expert."""
        return None

    def release_hints(self) -> None:
        pass

    def close(self) -> None:
        self._evaluations.settle(self)
