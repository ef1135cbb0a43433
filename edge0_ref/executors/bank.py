"""The slots of one layer, and how the experts in them are run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edge0_ref.contract import Array, Expert, ExpertLayout
from edge0_ref.readers import page_rows

Uses = tuple[list[int], list[int]]


@dataclass(frozen=True, eq=False)
class Bank:
    """Memory for experts: uint8 [slots, nbytes]. An expert is a view of its slot and follows the bytes."""

    layout: ExpertLayout
    memory: Array
    _views: dict[int, Expert] = field(default_factory=dict)

    def __getitem__(self, slot: int) -> Array:
        """The bytes of one slot."""
        view: Array = self.memory[slot]
        return view

    def expert(self, slot: int) -> Expert:
        if slot not in self._views:
            self._views[slot] = self.layout.view(self.memory[slot])
        return self._views[slot]


def empty_bank(layout: ExpertLayout, slots: int) -> Bank:
    """Slots that direct reads can fill without a copy, where an expert is whole blocks long."""
    return Bank(layout, page_rows(slots, layout.nbytes))


class SpareBank:
    """A bank that executors of different layers have one after the other.

    Memory that is fresh from the system is zeroed, page by page, as it is read into: CPU time that compute lacks.
    """

    def __init__(self) -> None:
        self._bank: Bank | None = None

    def take(self, layout: ExpertLayout, slots: int) -> Bank:
        """The spare bank if it is such a one, whatever bytes are in it, or a new one. Nobody else has it."""
        bank, self._bank = self._bank, None
        if bank is not None and (bank.layout, len(bank.memory)) == (layout, slots):
            return bank
        return empty_bank(layout, slots)

    def give_back(self, bank: Bank) -> None:
        self._bank = bank

    def clear(self) -> None:
        """No further layer comes: the memory is the system's again."""
        self._bank = None


# outputs [tokens, k, hidden], x [tokens, hidden], (where an expert is used, its slot) one after the other, their bank.
# Taking the next one may mean waiting for its bytes.
RunExperts = Callable[[Array, Array, Iterable[tuple[Uses, int]], Bank], None]
