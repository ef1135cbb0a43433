"""Mutants of chapter 6: slots, reads, counters."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from edge0_ref.contract import Routing
from edge0_ref.executors.exact import ExactExecutor
from edge0_ref.executors.hot import HotExecutor
from edge0_ref.executors.staged import StagedExecutor
from edge0_ref.executors.whole_layer import WholeLayerExecutor
from edge0_ref.prefetch import Read
from edge0_ref.residency import SlotTable


def a_missing_expert_is_dropped(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.begin_call

    def begin_call(table: SlotTable, needed: Any) -> Any:
        ready, missing = original(table, needed)
        return (ready, []) if ready else (ready, missing)

    patch.setattr(SlotTable, "begin_call", begin_call)
    patch.setattr(np, "empty", np.zeros)  # what was dropped adds nothing


def a_sticky_slot_is_not_rewritten(patch: pytest.MonkeyPatch) -> None:
    original = StagedExecutor._read

    def read(executor: StagedExecutor, placement: Any, urgency: Any) -> None:
        first = placement.slot not in executor._reads
        kept = executor._reads.get(placement.slot)
        original(executor, placement, urgency)
        if not first and kept is not None:
            executor._reads[placement.slot].abandon()
            executor._reads[placement.slot] = kept

    patch.setattr(StagedExecutor, "_read", read)


def a_slot_is_given_away_while_it_is_needed(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.place
    patch.setattr(SlotTable, "place", lambda table, experts, pinned: original(table, experts, ()))


def a_hint_reads_what_is_there(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.hint

    def hint(table: SlotTable, experts: Any) -> Any:
        for expert in [e for e in experts if e in table.slot_of][:1]:
            table.forget(expert)
        return original(table, experts)

    patch.setattr(SlotTable, "hint", hint)


def most_recent_given_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "_rank", lambda table, e: (0, -table.last_use.get(e, -1), table.slot_of[e]))


def hot_is_least_recent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HotExecutor, "policy", "least_recent")


def uses_forgotten_at_eviction(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.forget

    def forget(table: SlotTable, expert: int) -> int:
        table.uses.pop(expert, None)
        return original(table, expert)

    patch.setattr(SlotTable, "forget", forget)


def uses_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "use", lambda table, expert: None)


def calls_not_numbered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "finish_call", lambda table: None)


def hints_survive_a_new_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedExecutor, "release_hints", lambda executor: None)


def a_new_turn_empties_the_slots(patch: pytest.MonkeyPatch) -> None:
    def release_hints(executor: StagedExecutor) -> None:
        executor._table.release_hints()
        executor._table.slot_of.clear()

    patch.setattr(StagedExecutor, "release_hints", release_hints)


def hinted_experts_may_be_evicted(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.place

    def place(table: SlotTable, experts: Any, pinned: Any) -> Any:
        kept, table.following = table.following, frozenset()
        placements = original(table, experts, pinned)
        table.following = kept
        return placements

    patch.setattr(SlotTable, "place", place)


def a_call_keeps_the_last_hint_pinned(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.begin_call

    def begin_call(table: SlotTable, needed: Any) -> Any:
        current = table.current
        result = original(table, needed)
        table.current = current
        return result

    patch.setattr(SlotTable, "begin_call", begin_call)


def a_hit_is_counted_as_a_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "was_resident", lambda table, expert: False)


def a_hit_adds_to_reads(patch: pytest.MonkeyPatch) -> None:
    original = StagedExecutor._wait

    def wait(executor: StagedExecutor, expert: int) -> int:
        hits = executor.counters.hits
        slot = original(executor, expert)
        executor.counters.reads += executor.counters.hits - hits
        return slot

    patch.setattr(StagedExecutor, "_wait", wait)


def a_failed_read_is_used(patch: pytest.MonkeyPatch) -> None:
    original = Read.wait

    def wait(read: Read) -> None:
        with suppress(OSError):
            original(read)

    patch.setattr(Read, "wait", wait)


def an_expert_that_failed_stays_resident(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "forget", lambda table, expert: table.slot_of[expert])


def two_writers_in_a_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Read, "abandon", lambda read: None)


def close_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Read, "abandon", lambda read: None)
    patch.setattr("edge0_ref.prefetch.Prefetcher.close", lambda prefetcher: None)


def a_closed_executor_keeps_its_slots(patch: pytest.MonkeyPatch) -> None:
    def close(executor: StagedExecutor) -> None:
        for read in executor._reads.values():
            read.abandon()

    patch.setattr(StagedExecutor, "close", close)


def a_sticky_slot_read_one_step_late(patch: pytest.MonkeyPatch) -> None:
    """An expert that takes the slot of another runs once on what the slot held before."""
    original = StagedExecutor._read

    def read(executor: StagedExecutor, placement: Any, urgency: Any) -> None:
        used = placement.slot in executor._reads
        before = executor._bank[placement.slot].copy() if used and executor._bank is not None else None
        original(executor, placement, urgency)
        if before is not None and executor._bank is not None:
            late = executor._bank.layout.view(before)
            executor._bank._views[placement.slot] = late

    def call(executor: StagedExecutor, x: Any, routing: Routing) -> Any:
        y = original_call(executor, x, routing)
        if executor._bank is not None:
            executor._bank._views.clear()
        return y

    original_call = StagedExecutor.__call__
    patch.setattr(StagedExecutor, "_read", read)
    patch.setattr(StagedExecutor, "__call__", call)


def whole_layer_waits_for_a_name(patch: pytest.MonkeyPatch) -> None:
    original = WholeLayerExecutor.prepare

    def prepare(executor: WholeLayerExecutor, experts: Sequence[int]) -> None:
        if experts:
            original(executor, experts)

    patch.setattr(WholeLayerExecutor, "prepare", prepare)


def whole_layer_reads_again(patch: pytest.MonkeyPatch) -> None:
    original = WholeLayerExecutor.__call__

    def call(executor: WholeLayerExecutor, x: Any, routing: Routing) -> Any:
        y = original(executor, x, routing)
        executor.close()
        return y

    patch.setattr(WholeLayerExecutor, "__call__", call)


def exact_reads_once_for_each_token(patch: pytest.MonkeyPatch) -> None:
    original = ExactExecutor.__call__

    def call(executor: ExactExecutor, x: Any, routing: Routing) -> Any:
        rows = range(routing.tokens)
        parts = [Routing(routing.experts[t : t + 1], routing.weights[t : t + 1]) for t in rows]
        return np.concatenate([original(executor, x[t : t + 1], parts[t]) for t in rows])

    patch.setattr(ExactExecutor, "__call__", call)


def staged_ignores_hints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedExecutor, "prepare", lambda executor, experts: None)


def on_demand_not_counted(patch: pytest.MonkeyPatch) -> None:
    original = StagedExecutor.__call__

    def call(executor: StagedExecutor, x: Any, routing: Routing) -> Any:
        before = executor.counters.on_demand
        y = original(executor, x, routing)
        executor.counters.on_demand = before
        return y

    patch.setattr(StagedExecutor, "__call__", call)


def more_resident_than_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedExecutor, "resident", property(lambda executor: frozenset(executor._table.last_use)))


def a_hint_spoils_a_slot(patch: pytest.MonkeyPatch) -> None:
    original = StagedExecutor.prepare

    def prepare(executor: StagedExecutor, experts: Any) -> None:
        original(executor, experts)
        if executor._bank is not None and len(experts):
            executor._store.read_into(experts[0], executor._bank[-1])

    patch.setattr(StagedExecutor, "prepare", prepare)


def a_slot_without_bytes_is_kept_after_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "filling", lambda table: nullcontext())


MUTANTS = {
    a_missing_expert_is_dropped: "EXE-014",
    a_sticky_slot_is_not_rewritten: "NUM-006",
    a_slot_is_given_away_while_it_is_needed: "EXE-022",
    a_hint_reads_what_is_there: "EXE-021",
    most_recent_given_away: "EXE-020",
    hot_is_least_recent: "EXE-030",
    uses_forgotten_at_eviction: "EXE-027",
    uses_not_counted: "EXE-023",
    calls_not_numbered: "EXE-024",
    hints_survive_a_new_turn: "EXE-025",
    a_new_turn_empties_the_slots: "EXE-025",
    hinted_experts_may_be_evicted: "EXE-026",
    a_call_keeps_the_last_hint_pinned: "EXE-022",
    a_hit_is_counted_as_a_read: "EXE-015",
    a_hit_adds_to_reads: "EXE-015",
    a_failed_read_is_used: "EXE-016",
    an_expert_that_failed_stays_resident: "EXE-016",
    two_writers_in_a_slot: "EXE-012",
    close_does_not_wait: "STO-032",
    a_closed_executor_keeps_its_slots: "EXE-018",
    a_sticky_slot_read_one_step_late: "EXE-020",
    whole_layer_reads_again: "EXE-040",
    whole_layer_waits_for_a_name: "EXE-040",
    exact_reads_once_for_each_token: "EXE-001",
    staged_ignores_hints: "EXE-011",
    on_demand_not_counted: "EXE-013",
    more_resident_than_slots: "EXE-018",
    a_hint_spoils_a_slot: "EXE-010",
    a_slot_without_bytes_is_kept_after_an_interrupt: "EXE-028",
}
