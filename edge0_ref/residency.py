"""Which expert sits in which slot: integers only, no bytes, no arrays, no threads.

A *hint* names the experts a layer will need next. At most two sets matter at a time: `current`, about to be executed,
and `following`, predicted for the next token. Neither is ever evicted, so with 2K slots a token's experts and the next
token's fit side by side, and an expert that is in both is not read again (a *sticky* slot).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["least_recent", "least_frequent"]


@dataclass(frozen=True)
class Placement:
    """Read `expert` into `slot`."""

    expert: int
    slot: int


@dataclass
class SlotTable:
    """[EXE-020] The slots of one layer.

    least_recent (staged) gives away the slot whose expert was used longest ago; least_frequent (hot) the one used
    least often, then longest ago. Empty slots come first, lower slot numbers before higher ones.
    asked: experts with a slot whose bytes were asked for; whoever asks adds to it.
    """

    slots: int
    policy: Policy = "least_recent"
    current: frozenset[int] = frozenset()
    following: frozenset[int] = frozenset()
    slot_of: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    last_use: dict[int, int] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    ready_at_call: frozenset[int] = frozenset()
    clock: int = 0

    def hint(self, experts: Sequence[int]) -> list[Placement]:
        """[EXE-021] `experts` are needed after the current ones: what to read now, and into which slots.

        Only what fits beside the pinned slots is placed; the rest will be read on demand.
        """
        self.current, self.following = self.following, frozenset(experts)
        return self.place([e for e in dict.fromkeys(experts) if e not in self.slot_of], pinned=())

    def begin_call(self, needed: Sequence[int]) -> tuple[list[int], list[int]]:
        """[EXE-022] A call needs these: (resident, missing). From now on the call itself pins what it needs."""
        ready = [expert for expert in needed if expert in self.slot_of]
        self.current, self.ready_at_call = frozenset(), frozenset(ready)
        return ready, [expert for expert in needed if expert not in self.slot_of]

    def place(self, experts: Sequence[int], pinned: Collection[int]) -> list[Placement]:
        """Give each expert a slot, evicting by policy; stops when every slot left is pinned or hinted at."""
        protected = {*self.current, *self.following, *pinned}
        placements = []
        for expert in experts:
            slot = self._free_slot(protected)
            if slot is None:
                break
            self.slot_of[expert] = slot
            self.last_use.setdefault(expert, -1)
            protected.add(expert)
            placements.append(Placement(expert, slot))
        return placements

    def _free_slot(self, protected: Collection[int]) -> int | None:
        taken = set(self.slot_of.values())
        for slot in range(self.slots):
            if slot not in taken:
                return slot
        candidates = [expert for expert in self.slot_of if expert not in protected]
        if not candidates:
            return None
        return self.forget(min(candidates, key=self._rank))

    def _rank(self, expert: int) -> tuple[int, int, int]:
        frequency = self.uses.get(expert, 0) if self.policy == "least_frequent" else 0
        return frequency, self.last_use.get(expert, -1), self.slot_of[expert]

    def use(self, expert: int) -> None:
        """[EXE-023] Note that an expert is executed by this call."""
        self.use_all((expert,))

    def use_all(self, experts: Sequence[int]) -> None:
        """[EXE-023] `use` of each; how often matters to one policy only."""
        self.last_use.update(dict.fromkeys(experts, self.clock))
        if self.policy == "least_frequent":
            for expert in experts:
                self.uses[expert] = self.uses.get(expert, 0) + 1

    def call_resident(self, experts: Sequence[int]) -> None:
        """A whole call that needs only experts which have a slot: begun, all used, finished."""
        self.current = frozenset()
        self.use_all(experts)
        self.finish_call()

    def was_resident(self, expert: int) -> bool:
        """Whether the running call found this expert in a slot."""
        return expert in self.ready_at_call

    def finish_call(self) -> None:
        """[EXE-024] The call is over; what was hinted at for the next one stays pinned."""
        self.clock += 1

    def forget(self, expert: int) -> int:
        """Empty an expert's slot (evicted, or its read failed) and return the slot."""
        self.asked.discard(expert)
        return self.slot_of.pop(expert)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """[EXE-028] While slots are handed out: if that ends early, nobody keeps one whose bytes were not asked for."""
        try:
            yield
        except BaseException:
            for expert in self.slot_of.keys() - self.asked:
                self.forget(expert)
            raise

    def release_hints(self) -> None:
        """[EXE-025] A new turn: predictions no longer pin anything, bytes stay."""
        self.current = self.following = frozenset()


def lru_after(slots: int, uses: Sequence[int]) -> list[int]:
    """The experts resident after on-demand uses, by slot.

    >>> lru_after(slots=2, uses=[5, 9, 5, 7])
    [5, 7]
    """
    table = SlotTable(slots)
    for expert in uses:
        if expert not in table.slot_of:
            table.place([expert], pinned=())
        table.use(expert)
        table.finish_call()
    return sorted(table.slot_of, key=lambda expert: table.slot_of[expert])
