"""Chapter 6, step by step: any sequence of hints, calls, new turns, smaller budgets and bad disks, against integers.

After each step the outputs, the reads that reached the store, the resident set and the counters are compared.
"""

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from conformance import cases, oracles
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import examples, kinds
from conformance.recording_store import RecordingStore
from conformance.residency_model import Step, model_of
from edge0_ref.contract import ExecutorKind, Routing
from edge0_ref.errors import ReadError

EXPERTS = 6
EXPERT = st.integers(0, EXPERTS - 1)
PACES: tuple[dict[int, float], ...] = ({}, {0: 0.002}, {expert: (EXPERTS - expert) * 4e-4 for expert in range(EXPERTS)})


class ExecutorMachine(RuleBasedStateMachine):
    """Drives one executor and its model side by side."""

    driven: ClassVar[Driven]
    judge: ClassVar[Judge]
    kind: ClassVar[ExecutorKind]

    @initialize(slots=st.sampled_from((1, 2, 2, 3, 3, 4, 6, 8)))
    def open(self, slots: int) -> None:
        self.store = RecordingStore(cases.ExpertsRecipe(EXPERTS, coefficient="float16", seed=11))
        self.begin(slots)

    def begin(self, slots: int) -> None:
        """A new executor, and its model, over the same store."""
        self.slots = slots
        self.executor = self.driven.executor(self.kind, self.store, slots)
        self.model = model_of(self.kind, slots, EXPERTS)
        self.seen, self.asked = len(self.store.reads), 0
        self.owed: set[int] = set()

    def close(self) -> None:
        """Nothing is in flight afterwards, and nothing is resident."""
        self.executor.close()
        left = (self.store.unfinished, self.executor.resident)
        self.judge.state(left, (0, set()), f"reads in flight and residents after close, {self.slots} slots", "EXE-018")

    @rule(fewer=st.integers(1, 3))
    def shrink_the_budget(self, fewer: int) -> None:
        self.close()
        self.begin(max(1, self.slots - fewer))

    @rule()
    def start_over(self) -> None:
        self.close()
        self.begin(self.slots)

    @rule(experts=st.lists(EXPERT, max_size=4))
    def prepare(self, experts: list[int]) -> None:
        self.executor.prepare(experts)
        self.compare(self.model.prepare(experts, self.store.failing), f"prepare({experts})", "EXE-021")

    @rule(recipe=cases.routings(EXPERTS, st.sampled_from((1, 1, 2, 3)), most=4))
    def call(self, recipe: cases.RoutingRecipe) -> None:
        self.run(recipe.build())

    @rule(experts=st.lists(EXPERT, min_size=1, max_size=2, unique=True))
    def call_for_one_token(self, experts: list[int]) -> None:
        weights = np.full((1, len(experts)), 0.5, np.float32)
        self.run(Routing(np.array([experts], np.int64), weights))

    def run(self, routing: Routing) -> None:
        x = cases.DenseRecipe(routing.tokens, 32, seed=routing.tokens).build()
        needed = list(dict.fromkeys(routing.experts.ravel().tolist()))
        before = self.counted()
        step = self.model.call(needed, self.store.failing)
        what = f"call({routing.experts.tolist()})"
        if step.failed is not None:
            named = "expert " if len(step.doomed) > 1 else f"expert {step.failed}"
            self.judge.error(ReadError, lambda: self.executor(x, routing), what, named, "EXE-016")
        else:
            wanted = oracles.experts_output(x, routing, self.store.experts, self.judge.profile)
            self.judge.bound(self.executor(x, routing), *wanted, what, "EXE-020")
            grown = tuple(now - then for now, then in zip(self.counted(), before, strict=True))
            met = (step.hits, step.read_ahead, step.on_demand, 0)
            self.judge.state(grown, met, f"hits, read_ahead, on_demand, drops of {what}", "EXE-015")
        self.compare(step, what, "EXE-022" if step.failed is None else "EXE-016")

    @rule(failing=st.sampled_from((set[int](), set[int](), {0}, {1, 4})))
    def disk(self, failing: set[int]) -> None:
        """Fails the reads of some experts, or is well again."""
        self.store.failing = set(failing)

    @rule(slow=st.sampled_from(PACES))
    def pace(self, slow: dict[int, float]) -> None:
        """Reads of some experts take long, so that later ones end before them."""
        self.store.slow = slow

    @rule()
    def new_turn(self) -> None:
        self.executor.release_hints()
        self.model.release()
        self.compare(Step(), "release_hints()", "EXE-025")

    def counted(self) -> tuple[int, int, int, int]:
        counters = self.executor.counters
        return counters.hits, counters.read_ahead, counters.on_demand, counters.drops

    def compare(self, step: Step, what: str, blame: str) -> None:
        """Reads asked for, reads that arrived, residents. Reads of failing or owed experts may be more."""
        stays = "EXE-018" if step.failed is None else "EXE-016"
        reads = self.store.settle(self.seen, step.certain)
        self.seen += len(reads)
        tolerated, self.owed = self.store.failing | self.owed | self.model.owed, set(self.model.owed)
        more = Counter(reads) - Counter(step.certain)
        missing = Counter(step.certain) - Counter(reads)
        self.judge.state((set(more) - tolerated, missing), (set(), {}), f"reads too many, too few in {what}", blame)
        asked, self.asked = self.executor.counters.reads - self.asked, self.executor.counters.reads
        self.judge.state(asked, len(step.asked), f"reads counted by {what}", "EXE-015")
        if self.kind == "exact" and step.failed is None:
            self.judge.state(reads, step.certain, f"order of reads of {what}", "EXE-001")
        self.judge.state(self.executor.resident, self.model.resident, f"resident after {what}", stays)

    def teardown(self) -> None:
        self.driven.close()


def drive(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    """More examples where there is a policy to follow."""
    machine: Any = type("Machine", (ExecutorMachine,), {"driven": driven, "judge": judge, "kind": kind})
    share = examples(1.5 if kind in ("staged", "hot") else 0.25)
    run_state_machine_as_test(machine, settings=settings(max_examples=share.max_examples))


@kinds("exact")
@pytest.mark.spec("EXE-001", "EXE-018", "EXE-015", "EXE-016")
def test_every_call_reads_anew_and_nothing_is_kept(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    drive(driven, judge, kind)


@kinds("whole_layer")
@pytest.mark.spec("EXE-040", "EXE-018", "EXE-015", "EXE-016")
def test_a_layer_is_read_whole_and_once(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    drive(driven, judge, kind)


@kinds("staged")
@pytest.mark.spec(
    "EXE-020", "EXE-021", "EXE-022", "EXE-023", "EXE-024", "EXE-025", "EXE-026", "EXE-018", "EXE-015", "EXE-016"
)
def test_any_sequence_of_steps_reads_and_keeps_what_the_policy_says(
    driven: Driven, judge: Judge, kind: ExecutorKind
) -> None:
    drive(driven, judge, kind)


@kinds("hot")
@pytest.mark.spec("EXE-030", "EXE-015", "EXE-016", "EXE-023", "EXE-027")
def test_hot_gives_away_what_is_used_least(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    drive(driven, judge, kind)
