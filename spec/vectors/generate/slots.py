"""Chapter 6 in lists and integers, for traces that are drawn instead of worked out: a program of its own."""

from dataclasses import dataclass, field


@dataclass
class Slots:
    """Staged and hot. table: expert or None by slot; pins: the two newest hints, the newest last."""

    hot: bool
    table: list[int | None]
    pins: list[set[int]] = field(default_factory=lambda: [set(), set()])
    calls_of: dict[int, list[int]] = field(default_factory=dict)
    calls: int = 0
    fresh: set[int] = field(default_factory=set)
    counters: dict[str, int] = field(
        default_factory=lambda: {"reads": 0, "hits": 0, "read_ahead": 0, "on_demand": 0, "drops": 0}
    )

    def order(self, slot: int) -> tuple[int, int, int]:
        """The lowest goes first."""
        used = self.calls_of.get(self.table[slot], [])  # type: ignore[arg-type]
        return (len(used) if self.hot else 0, used[-1] if used else -1, slot)

    def seat(self, expert: int, safe: set[int]) -> bool:
        """Give an expert a slot; False if every slot holds a safe one."""
        if None in self.table:
            slot = self.table.index(None)
        else:
            free = [s for s in range(len(self.table)) if self.table[s] not in safe]
            if not free:
                return False
            slot = min(free, key=self.order)
            self.fresh.discard(self.table[slot])  # type: ignore[arg-type]
        self.table[slot] = expert
        self.counters["reads"] += 1
        return True

    def hint(self, experts: list[int]) -> list[int]:
        self.pins = [self.pins[1], set(experts)]
        read: list[int] = []
        for expert in experts:
            if expert not in self.table:
                if not self.seat(expert, self.pins[0] | self.pins[1] | set(read)):
                    break
                read.append(expert)
                self.fresh.add(expert)
        return read

    def call(self, needed: list[int]) -> list[int]:
        self.pins[0] = set()
        ready = [e for e in needed if e in self.table]
        waiting = [e for e in needed if e not in self.table]
        read: list[int] = []
        for expert in ready:
            self.counters["read_ahead" if expert in self.fresh else "hits"] += 1
        self.counters["on_demand"] += len(waiting)
        while ready or waiting:
            seated: list[int] = []
            for expert in waiting:
                if not self.seat(expert, self.pins[0] | self.pins[1] | set(ready) | set(seated)):
                    break
                seated.append(expert)
            if waiting and not seated and not ready:
                self.pins = [set(), set()]
            for expert in ready:
                self.fresh.discard(expert)
                self.calls_of.setdefault(expert, []).append(self.calls)
            read += seated
            ready, waiting = seated, waiting[len(seated) :]
        self.calls += 1
        return read

    def release(self) -> None:
        self.pins = [set(), set()]
