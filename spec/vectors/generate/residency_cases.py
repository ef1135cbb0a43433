"""Chapter 6: traces of hints and calls with every read they cause, worked out by hand, or drawn and simulated."""

# ruff: noqa: E501 (a case is a row of a table)

from typing import Any

import numpy as np
from slots import Slots
from values import Json, case


def cases() -> list[Json]:
    return [*staged(), *hot(), *others(), *failing(), *drawn()]


def hint(*experts: int, **more: Any) -> Json:
    return {"hint": list(experts), **more}


def call(*rows: list[int], **more: Any) -> Json:
    return {"call": [list(row) for row in rows], **more}


RELEASE, CLOSE = {"release": True}, {"close": True}


def trace(
    kind: str,
    slots: int,
    name: str,
    ids: str,
    flags: str,
    comment: str,
    steps: list[tuple[Json, list[int], list[int]]],
    counters: str,
    experts: int = 10,
    source: str = "hand",
) -> Json:
    """steps: (event, experts read, experts resident after); counters: "name=value ..."."""
    # ruff: noqa: E501 (a case is a row of a table)
    return case(
        f"residency/{kind.replace('_', '-')}-{name}",
        ids,
        "residency",
        flags,
        comment,
        source,
        {"kind": kind, "slots": slots, "num_experts": experts, "events": [event for event, _, _ in steps]},
        expected={
            "events": [{"reads": sorted(reads), "resident": sorted(resident)} for _, reads, resident in steps],
            "counters": {name: int(value) for name, value in (pair.split("=") for pair in counters.split())},
        },
    )


def staged() -> list[Json]:
    rows = [
        (4, "sticky", "EXE-010 EXE-015 EXE-021", "sticky-slot-reread", "An expert wanted again is not read again.",
         [(hint(1, 2), [1, 2], [1, 2]), (call([1, 2]), [], [1, 2]), (hint(2, 3), [3], [1, 2, 3]),
          (call([3, 2]), [], [1, 2, 3])], "reads=3 hits=1 read_ahead=3 on_demand=0 drops=0"),
        (4, "unstaged", "EXE-013 EXE-014", "drop-instead-of-read", "An expert nobody staged is read by its call.",
         [(hint(1, 2), [1, 2], [1, 2]), (call([5, 1]), [5], [1, 2, 5])],
         "reads=3 hits=0 read_ahead=1 on_demand=1 drops=0"),
        (2, "least-recent", "EXE-020 EXE-023", "most-recent fifo", "The one used longest ago goes: first 2, then 1.",
         [(call([1]), [1], [1]), (call([2]), [2], [1, 2]), (call([1]), [], [1, 2]), (call([3]), [3], [1, 3]),
          (call([2]), [2], [2, 3])], "reads=4 hits=1 read_ahead=0 on_demand=4 drops=0"),
        (2, "tie-by-slot", "EXE-020", "tie-by-expert-id tie-by-order", "Used by the same call: the lower slot goes, which holds 7.",
         [(call([7, 4]), [4, 7], [4, 7]), (call([9]), [9], [4, 9])], "reads=3 on_demand=3 hits=0"),
        (2, "empty-slots-first", "EXE-020", "evicts-before-full", "A free slot is used before any is given away.",
         [(call([7]), [7], [7]), (hint(3), [3], [3, 7]), (call([7, 3]), [], [3, 7])], "reads=2 hits=1 read_ahead=1 on_demand=1"),
        (2, "more-than-slots", "EXE-011 EXE-014", "drop-instead-of-read", "Five experts through two slots, two at a time.",
         [(call([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], [4, 5]), (call([4, 5]), [], [4, 5])],
         "reads=5 hits=2 read_ahead=0 on_demand=5 drops=0"),
        (1, "resident-runs-first", "EXE-011 EXE-022", "evicted-before-run", "Expert 2 runs before its slot is given to 1.",
         [(call([1, 2]), [1, 2], [2]), (call([1, 2]), [1], [1])], "reads=3 hits=1 on_demand=3"),
        (4, "two-hints", "EXE-021 EXE-026", "current-evicted one-hint-only",
         "The next layer is hinted at for the coming token before it runs for this one: both sets stay.",
         [(hint(1, 2), [1, 2], [1, 2]), (hint(3, 4), [3, 4], [1, 2, 3, 4]), (call([1, 2]), [], [1, 2, 3, 4]),
          (hint(5, 6), [5, 6], [3, 4, 5, 6]), (call([3, 4]), [], [3, 4, 5, 6])],
         "reads=6 hits=0 read_ahead=4 on_demand=0 drops=0"),
        (4, "third-hint", "EXE-021", "hints-pile-up", "Only the newest two hints pin: 1 and 2 are given away.",
         [(hint(1, 2), [1, 2], [1, 2]), (hint(3, 4), [3, 4], [1, 2, 3, 4]), (hint(5, 6), [5, 6], [3, 4, 5, 6]),
          (call([1, 2]), [1, 2], [1, 2, 5, 6])], "reads=8 read_ahead=0 on_demand=2 hits=0"),
        (2, "hint-never-blocks", "EXE-026", "deadlock drop-instead-of-read", "Both slots are hinted at: the call takes one all the same.",
         [(hint(1, 2), [1, 2], [1, 2]), (call([3]), [3], [2, 3]), (call([2]), [], [2, 3]), (call([1]), [1], [1, 2])],
         "reads=4 read_ahead=1 on_demand=2 hits=0 drops=0"),
        (2, "long-hint", "EXE-021 EXE-026", "hint-evicts-itself", "Two of three fit; the third is read by the call.",
         [(hint(1, 2, 3), [1, 2], [1, 2]), (call([1, 2, 3]), [3], [2, 3])], "reads=3 read_ahead=2 on_demand=1 drops=0"),
        (2, "pinned-hint", "EXE-021", "current-evicted", "The second hint finds no slot; its call reads.",
         [(hint(1, 2), [1, 2], [1, 2]), (hint(3), [], [1, 2]), (call([3]), [3], [2, 3])], "reads=3 read_ahead=0 on_demand=1"),
        (2, "empty-hint", "EXE-021", "empty-hint-ignored", "An empty hint moves the sets on, so 1 and 2 are free.",
         [(hint(1, 2), [1, 2], [1, 2]), (hint(), [], [1, 2]), (hint(3), [3], [2, 3])], "reads=3"),
        (3, "repeated-in-hint", "EXE-021", "read-twice", "An expert named twice is read once.",
         [(hint(3, 3, 1), [1, 3], [1, 3]), (call([1, 3], [3, 1]), [], [1, 3])], "reads=2 read_ahead=2 on_demand=0"),
        (4, "tokens", "EXE-011 EXE-015", "counted-per-token", "Experts of a call count once, however many tokens use them.",
         [(call([2, 5], [5, 2], [2, 5]), [2, 5], [2, 5]), (call([2, 5], [2, 5]), [], [2, 5])], "reads=2 hits=2 on_demand=2"),
        (2, "release", "EXE-025", "old-turn-pins", "A new turn: the old hint pins nothing.",
         [(hint(1, 2), [1, 2], [1, 2]), (RELEASE, [], [1, 2]), (hint(3), [3], [2, 3])], "reads=3"),
        (2, "release-keeps-bytes", "EXE-025", "slots-emptied", "What was read for the old turn may still be used.",
         [(hint(1, 2), [1, 2], [1, 2]), (RELEASE, [], [1, 2]), (call([2, 1]), [], [1, 2])], "reads=2 read_ahead=2"),
        (3, "remembered-use", "EXE-027", "history-forgotten", "1 was used once, long ago; 9 never: 9 goes.",
         [(call([1]), [1], [1]), (call([2]), [2], [1, 2]), (call([3]), [3], [1, 2, 3]), (call([4]), [4], [2, 3, 4]),
          (hint(1), [1], [1, 3, 4]), (hint(9), [9], [1, 4, 9]), (RELEASE, [], [1, 4, 9]), (call([8]), [8], [1, 4, 8])],
         "reads=7 on_demand=5 hits=0"),
        (2, "close", "EXE-018 BCK-010", "slots-survive-close", "A closed executor holds nothing.",
         [(call([1, 2]), [1, 2], [1, 2]), (CLOSE, [], []), (CLOSE, [], [])], "reads=2 on_demand=2"),
    ]  # fmt: skip
    return [trace("staged", *row) for row in rows]


def hot() -> list[Json]:
    rows = [
        (2, "least-frequent", "EXE-030", "lru-for-hot", "1 was used twice, 2 once and later: 2 goes.",
         [(call([1]), [1], [1]), (call([1]), [], [1]), (call([2]), [2], [1, 2]), (call([3]), [3], [1, 3])],
         "reads=3 hits=1 on_demand=3"),
        (2, "frequency-remembered", "EXE-027 EXE-030", "history-forgotten", "2 comes back with its old use: 1 is older among equals.",
         [(call([1]), [1], [1]), (call([1]), [], [1]), (call([2]), [2], [1, 2]), (call([3]), [3], [1, 3]),
          (call([2]), [2], [1, 2]), (call([3]), [3], [2, 3])], "reads=5 hits=1 on_demand=5"),
        (2, "hinted-is-not-used", "EXE-023 EXE-030", "hint-counts-as-use", "A hint is no use: 2, never used, goes before 1.",
         [(call([1]), [1], [1]), (hint(2), [2], [1, 2]), (RELEASE, [], [1, 2]), (call([3]), [3], [1, 3])],
         "reads=3 read_ahead=0 on_demand=2"),
        (3, "once-a-call", "EXE-023", "counted-per-token", "Three tokens of one call are one use: 4 and 5 have two, so 6 goes.",
         [(call([6], [6], [6]), [6], [6]), (call([4, 5]), [4, 5], [4, 5, 6]), (call([4, 5]), [], [4, 5, 6]),
          (call([7]), [7], [4, 5, 7])], "reads=4 hits=2 on_demand=4"),
    ]  # fmt: skip
    return [trace("hot", *row) for row in rows]


def others() -> list[Json]:
    everything = [0, 1, 2, 3, 4]
    return [
        trace("exact", 1, "reads-each-once", "EXE-001 EXE-010", "read-per-token hint-reads", "Hints do nothing, nothing stays.",
              [(hint(1, 2), [], []), (call([2, 1], [1, 3]), [1, 2, 3], []), (call([1, 2]), [1, 2], [])],
              "reads=5 hits=0 read_ahead=0 on_demand=5 drops=0"),
        trace("whole_layer", 1, "hint", "EXE-040", "reads-what-is-needed", "The first hint reads everything, once.",
              [(hint(2), everything, everything), (call([1, 3]), [], everything), (call([1, 4]), [], everything),
               (hint(0), [], everything), (CLOSE, [], [])],
              "reads=5 hits=1 read_ahead=3 on_demand=0 drops=0", 5),
        trace("whole_layer", 1, "call", "EXE-040", "reads-what-is-needed", "So does the first call.",
              [(call([3]), everything, everything), (call([3]), [], everything)], "reads=5 hits=1 drops=0", 5),
    ]  # fmt: skip


def failing() -> list[Json]:
    fails = {"raises": "ReadError"}
    rows = [
        (2, "call-fails", "EXE-016 STO-031", "zeros-instead-of-error", "The call raises; the next one reads again.",
         [(call([7], fails=[7], **fails), [7], []), (call([7]), [7], [7])], "reads=2 drops=0"),
        (2, "hint-fails", "EXE-016 STO-031", "hint-raises zeros-instead-of-error", "A hint never raises; its call tries once more.",
         [(hint(3, 4, fails=[3]), [3, 4], [3, 4]), (call([3, 4]), [3], [3, 4])], "hits=0 drops=0"),
        (2, "hint-and-call-fail", "EXE-016", "poisoned-slot", "Both tries fail: an error; the next call reads again.",
         [(hint(3), [3], [3]), (call([4], fails=[4], **fails), [4], [3]), (call([3, 4]), [4], [3, 4])], "drops=0"),
        (3, "others-survive", "EXE-016", "slots-emptied", "Experts that were read before the failure stay.",
         [(call([1]), [1], [1]), (call([1, 5], fails=[5], **fails), [5], [1]), (call([1]), [], [1])], "drops=0"),
        (3, "clock-after-failure", "EXE-024", "clock-stops-at-error", "The call that failed had a number: 2 was used in it, 0 after it, so 2 goes.",
         [(call([1]), [1], [1]), (call([0]), [0], [0, 1]), (call([2]), [2], [0, 1, 2]), (call([2, 5], fails=[5], **fails), [5], [0, 2]),
          (call([0]), [], [0, 2]), (call([5]), [5], [0, 2, 5]), (call([4]), [4], [0, 4, 5])], "drops=0"),
        (2, "failed-is-not-used", "EXE-023", "read-counts-as-use", "5 was asked for twice and executed never: it goes before 0.",
         [(call([0]), [0], [0]), (call([5], fails=[5], **fails), [5], [0]), (hint(5), [5], [0, 5]), (hint(), [], [0, 5]),
          (hint(), [], [0, 5]), (call([1]), [1], [0, 1])], "drops=0"),
        (2, "unneeded-failure", "EXE-016", "hint-raises", "A read ahead that fails and is never needed is no error.",
         [(hint(3, fails=[3]), [3], [3]), (call([1]), [1], [1, 3]), (call([1]), [], [1, 3])], "hits=1 drops=0"),
    ]  # fmt: skip
    return [
        *(trace("staged", *row) for row in rows),
        trace("staged", 2, "placed-then-failed", "EXE-015 EXE-016", "slots-emptied", "4 has a slot when 5 fails, and keeps it although it did not run.",
              [(hint(5, 4, fails=[5]), [4, 5], [4, 5]), (call([5, 4], fails=[5], **fails), [5], [4]), (call([4]), [], [4])],
              "reads=2 drops=0"),
        trace("exact", 1, "call-fails", "EXE-015 EXE-016", "failed-read-counted", "2 was read, 7 was not.",
              [(call([2, 7], fails=[7], **fails), [2, 7], []), (call([7]), [7], [])], "reads=2 drops=0"),
        trace("whole_layer", 1, "call-fails", "EXE-015 EXE-016 EXE-040", "slots-survive-failure", "One read that fails for good gives everything back.",
              [(hint(fails=[3]), [0, 1, 2, 3], [0, 1, 2, 3]), (call([3], fails=[3], **fails), [3], [])], "reads=4 drops=0", 4),
    ]  # fmt: skip


def drawn() -> list[Json]:
    """Long lives of small slot tables, by `slots.py`: what no hand works out without a slip."""
    listed = []
    for seed in range(900, 932):
        rng = np.random.default_rng(seed)
        kind, slots, experts = ("staged", "hot")[seed % 2], int(rng.integers(1, 7)), int(rng.integers(4, 10))
        table, steps = Slots(kind == "hot", [None] * slots), []
        for _ in range(14):
            what, count = rng.random(), int(rng.integers(1, 4))
            if what < 0.4:
                named = rng.choice(experts, count, replace=False).tolist()
                steps.append((hint(*named), table.hint(named), seated(table)))
            elif what < 0.95:
                rows = [rng.choice(experts, count, replace=False).tolist() for _ in range(int(rng.integers(1, 3)))]
                needed = list(dict.fromkeys(expert for row in rows for expert in row))
                steps.append((call(*rows), table.call(needed), seated(table)))
            else:
                table.release()
                steps.append((RELEASE, [], seated(table)))
        counters = " ".join(f"{name}={value}" for name, value in table.counters.items())
        ids = "EXE-020 EXE-021 EXE-022 EXE-026" if kind == "staged" else "EXE-030 EXE-023 EXE-027"
        comment = f"Fourteen steps through {slots} slots."
        source = f"integer oracle, seed {seed}"
        listed.append(
            trace(
                kind,
                slots,
                f"drawn-{seed}",
                ids,
                "any-policy-but-the-stated",
                comment,
                steps,
                counters,
                experts,
                source,
            )
        )
    return listed


def seated(table: Slots) -> list[int]:
    return sorted(expert for expert in table.table if expert is not None)
