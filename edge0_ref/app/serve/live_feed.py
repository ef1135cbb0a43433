"""What the page draws: after each token, each layer's slots, and where the experts that the token used came from.

Everything is learned from `observe` and from counters. While nobody listens, nothing is kept but a look at that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edge0_ref.app.serve.broadcast import Broadcast, LiveEvent
from edge0_ref.contract import Counters, Routing
from edge0_ref.engine.memory import resident_bytes
from edge0_ref.engine.session import Result, counters_between

EMPTY, IDLE, COMING = ".", "-", "n"  # no expert; one that this token did not use; one that no token has used yet
AHEAD, REUSED, WAITED = "a", "r", "w"  # used by this token: read ahead for it; in its slot before; read while it waited


@dataclass
class SlotPicture:
    """One layer's slots as columns: an expert keeps its column for as long as it is resident."""

    columns: list[int | None] = field(default_factory=list)
    used: set[int] = field(default_factory=set)  # resident, and some token used it

    def show(self, needed: list[int], resident: frozenset[int], on_demand: int) -> tuple[str, list[int]]:
        """[ENG-085] A letter for each column, and the experts in columns that are not empty, from left to right.

        needed: the experts of the token; on_demand: how many of them the call read itself.
        """
        before = {expert for expert in self.columns if expert is not None}
        unknown = [expert for expert in needed if expert not in before]
        origin = {expert: REUSED if expert in self.used else AHEAD for expert in needed}
        origin |= dict.fromkeys(unknown, AHEAD) | dict.fromkeys(unknown[len(unknown) - on_demand :], WAITED)
        self._place(resident)
        self.used = (self.used | set(needed)) & resident
        letters = [self._letter(expert, origin) for expert in self.columns]
        return "".join(letters), [expert for expert in self.columns if expert is not None]

    def _place(self, resident: frozenset[int]) -> None:
        self.columns = [expert if expert in resident else None for expert in self.columns]
        new = sorted(resident - set(self.columns))
        free = [column for column, expert in enumerate(self.columns) if expert is None]
        for column, expert in zip(free, new, strict=False):
            self.columns[column] = expert
        self.columns += new[len(free) :]

    def _letter(self, expert: int | None, origin: dict[int, str]) -> str:
        if expert is None:
            return EMPTY
        return origin.get(expert) or (IDLE if expert in self.used else COMING)


class LiveFeed:
    """[ENG-085] `begin` is told of texts, `observe` sees layers, `watch` is told after each token; in one thread."""

    def __init__(self, live: Broadcast) -> None:
        self._live = live
        self._counters: Callable[[], Counters] = Counters
        self._forget()

    def attach(self, counters: Callable[[], Counters]) -> None:
        """Those of the model, once it is open."""
        self._counters = counters

    def _forget(self) -> None:
        self._pictures: dict[int, SlotPicture] = {}
        self._layers: list[list[Any]] = []
        self._routing: Routing | None = None
        self._before = self._at_layer = Counters()
        self._prompt_tokens = 0  # of the prompt that is being read
        self._watching = False

    def begin(self) -> None:
        """A text begins: nothing of the one before, which may have been left in its midst, is told of it."""
        self._before, self._prompt_tokens, self._layers = self._counters(), 0, []

    def observe(self, point: str, layer: int, value: Any) -> None:
        """An `Observe`."""
        if not self._live:
            if self._watching:
                self._forget()
            return
        match point:
            case "embedding":
                self._begin_call(int(value.shape[0]))
            case "routing":
                self._routing, self._at_layer = value, self._counters()
            case "resident" if self._routing is not None:
                self._end_layer(layer, self._routing, value)

    def _begin_call(self, tokens: int) -> None:
        if not self._watching:
            self._watching, self._before = True, self._counters()
        self._layers, self._routing = [], None
        self._prompt_tokens = self._prompt_tokens + tokens if tokens > 1 else 0

    def _end_layer(self, layer: int, routing: Routing, resident: frozenset[int]) -> None:
        spent = counters_between(self._at_layer, self._counters())
        picture = self._pictures.setdefault(layer, SlotPicture())
        letters, experts = picture.show(routing.distinct(), resident, spent.on_demand)
        if self._prompt_tokens:
            self._live.send({"prompt": self._prompt_tokens, "layer": layer})
        else:
            self._layers.append([layer, letters, experts, round(spent.wait_seconds * 1000, 3)])

    def watch(self, result: Result) -> None:
        """One token more; the first one's costs are the prompt's."""
        if not self._live or not self._watching:
            return
        now = self._counters()
        spent, self._before, self._prompt_tokens = counters_between(self._before, now), now, 0
        event: LiveEvent = {
            "token": len(result.token_ids),
            "tokens_per_second": result.tokens_per_second,
            "first_token_seconds": result.time_to_first_token,
            "bytes": spent.bytes_read,
            "wait_ms": round(spent.wait_seconds * 1000, 3),
            "reused": spent.hits,
            "read_ahead": spent.read_ahead,
            "on_demand": spent.on_demand,
            "rss_bytes": resident_bytes(),
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": result.cached_tokens,
            "layers": self._layers,
        }
        self._live.send(event)
