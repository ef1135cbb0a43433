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


# outputs [tokens, k, hidden], x [tokens, hidden], (where an expert is used, its slot) one after the other, their bank.
# Taking the next one may mean waiting for its bytes.
RunExperts = Callable[[Array, Array, Iterable[tuple[Uses, int]], Bank], None]
