"""Who sits in which slot, from the text of spec/06-executors.md alone: lists and integers, nothing else.

Written against the chapter and not against any executor; the executors are compared with it read by read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge0_ref.contract import ExecutorKind


@dataclass
class Step:
    """What one prepare or call does.

    asked: experts it asks to be read; certain: reads that reach the store before the step is over; failed: the expert
    whose read failed again when it was needed, one of `doomed` where the order is nobody's promise. hits, read_ahead,
    on_demand: how needed experts were met.
    """

    asked: list[int] = field(default_factory=list)
    certain: list[int] = field(default_factory=list)
    hits: int = 0
    read_ahead: int = 0
    on_demand: int = 0
    failed: int | None = None
    doomed: list[int] = field(default_factory=list)


@dataclass
class SlotModel:
    """Staged and hot.

    holder: slot -> expert or None; ahead: read ahead and not used since; bad: their last read failed;
    owed: asked for by a call that failed before it needed them, and perhaps not read yet.
    """

    kind: ExecutorKind
    slots: int
    following: set[int] = field(default_factory=set)
    current: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)
    uses: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    calls: int = 0

    def __post_init__(self) -> None:
        self.holder: list[int | None] = [None] * self.slots

    @property
    def resident(self) -> set[int]:
        return {expert for expert in self.holder if expert is not None}

    def prepare(self, experts: Sequence[int], failing: set[int]) -> Step:
        self.current, self.following = self.following, set(experts)
        absent = [expert for expert in dict.fromkeys(experts) if expert not in self.holder]
        placed = self._place(absent, set())
        self.ahead |= set(placed)
        self.bad |= set(placed) & failing
        return Step(asked=placed, certain=placed)

    def release(self) -> None:
        self.current, self.following = set(), set()

    def call(self, needed: Sequence[int], failing: set[int]) -> Step:
        step = Step()
        self.current = set()
        running = [expert for expert in needed if expert in self.holder]
        waiting = [expert for expert in needed if expert not in self.holder]
        found, asked_now = set(running), set[int]()
        while running or waiting:
            placed = self._place(waiting, set(running))
            if waiting and not placed and not running:
                self.release()
            step.asked += placed
            asked_now |= set(placed)
            for expert in running:
                if expert in asked_now or expert in self.bad:
                    step.certain.append(expert)
                    if expert in failing:
                        return self._failed(expert, asked_now, step)
                elif expert in self.owed and expert in failing:
                    return self._failed(expert, asked_now, step)
                asked_now.discard(expert)
                self._execute(expert, expert in found, step)
            running, waiting = placed, waiting[len(placed) :]
        self.calls += 1
        return step

    def _failed(self, expert: int, asked_now: set[int], step: Step) -> Step:
        """The slot is empty, what was asked for after it is owed, and the call has ended all the same."""
        step.failed = expert
        self._vacate(expert)
        self.owed |= asked_now - {expert}
        self.calls += 1
        return step

    def _execute(self, expert: int, was_here: bool, step: Step) -> None:
        self.bad.discard(expert)
        self.owed.discard(expert)
        if expert in self.ahead:
            self.ahead.remove(expert)
            step.read_ahead += 1
        elif was_here:
            step.hits += 1
        else:
            step.on_demand += 1
        self.uses[expert] = self.uses.get(expert, 0) + 1
        self.last[expert] = self.calls

    def _place(self, experts: Sequence[int], pinned: set[int]) -> list[int]:
        placed: list[int] = []
        for expert in experts:
            safe = self.current | self.following | pinned | set(placed)
            if None in self.holder:
                slot = self.holder.index(None)
            else:
                free = [s for s, held in enumerate(self.holder) if held not in safe]
                if not free:
                    break
                slot = min(free, key=self._rank)
                self._vacate(self.holder[slot])
            self.holder[slot] = expert
            placed.append(expert)
        return placed

    def _vacate(self, expert: int | None) -> None:
        assert expert is not None
        self.holder[self.holder.index(expert)] = None
        for group in (self.bad, self.ahead, self.owed):
            group.discard(expert)

    def _rank(self, slot: int) -> tuple[int, int, int]:
        """Hot gives away the least used first; both then the one used longest ago, then the lowest slot."""
        expert = self.holder[slot]
        assert expert is not None
        return self.uses.get(expert, 0) if self.kind == "hot" else 0, self.last.get(expert, -1), slot


@dataclass
class ExactModel:
    """Reads what a call needs, in order of first use, and keeps nothing."""

    resident: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)

    def prepare(self, experts: Sequence[int], failing: set[int]) -> Step:
        return Step()

    def release(self) -> None:
        pass

    def call(self, needed: Sequence[int], failing: set[int]) -> Step:
        step = Step()
        for expert in needed:
            step.certain.append(expert)
            if expert in failing:
                step.failed = expert
                return step
            step.asked.append(expert)
            step.on_demand += 1
        return step


@dataclass
class WholeLayerModel:
    """Reads all experts at the first hint or call; a failed read that a call needs gives everything back."""

    experts: int
    resident: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)

    def prepare(self, experts: Sequence[int], failing: set[int]) -> Step:
        if self.resident:
            return Step()
        everyone = list(range(self.experts))
        self.resident, self.bad = set(everyone), set(failing)
        return Step(asked=everyone, certain=everyone.copy())

    def release(self) -> None:
        pass

    def call(self, needed: Sequence[int], failing: set[int]) -> Step:
        step = self.prepare((), failing)
        again = [expert for expert in needed if expert in self.bad]
        if doomed := [expert for expert in again if expert in failing]:
            return self._failed(doomed, again, step)
        step.certain += again
        self.bad -= set(again)
        step.hits = len(self.used & set(needed))
        step.read_ahead = len(needed) - step.hits
        self.used |= set(needed)
        return step

    def _failed(self, doomed: list[int], again: list[int], step: Step) -> Step:
        """Reads may be waited for in any order, and those that nobody waited for need not be made any more."""
        step.failed, step.doomed = doomed[0], doomed
        step.certain = doomed.copy() if len(doomed) == 1 else []
        self.owed = set(step.asked) | set(again)
        self.resident, self.used = set(), set()
        return step


Model = SlotModel | ExactModel | WholeLayerModel


def model_of(kind: ExecutorKind, slots: int, experts: int) -> Model:
    if kind == "exact":
        return ExactModel()
    return WholeLayerModel(experts) if kind == "whole_layer" else SlotModel(kind, slots)
