"""Who did what when: reads as their stores saw them, layers as the decoder's observer saw them.

Nothing inside the decoder is changed for it: each layer's store is wrapped, and `observe` tells where a layer is.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from edge0_ref.contract import Array, ChecksApart, ExpertLayout, ExpertStore

DECODER = "decoder"
ITSELF = "decoder, reading itself"

# observe point -> what the time since the point before it was spent on
PHASES = {
    "embedding": "embedding",
    "mixer_output": "mixer",
    "routing": "router",
    "experts_output": "experts",
    "shared_output": "shared expert",
    "dense_output": "dense",
    "prediction_logits": "prediction",
    "layer_output": "end of layer",
    "logits": "logits",
}


@dataclass(frozen=True)
class Span:
    """A stretch of time, in nanoseconds of one clock. lane: the thread; kind: token, layer, compute, wait or read."""

    lane: str
    kind: str
    name: str
    start: int
    end: int
    layer: int | None = None
    token: int | None = None
    expert: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class TimedStore:
    """A store that notes when each read began and ended, and in which thread."""

    layer: int
    store: ExpertStore
    note: Callable[[Span], None]

    @property
    def num_experts(self) -> int:
        return self.store.num_experts

    @property
    def layout(self) -> ExpertLayout:
        return self.store.layout

    def read_into(self, expert: int, slot: Array) -> None:
        self._timed(self.store.read_into, expert, slot)

    def _timed(self, read: Callable[[int, Array], None], expert: int, slot: Array) -> None:
        start = time.perf_counter_ns()
        read(expert, slot)
        end, thread = time.perf_counter_ns(), threading.current_thread()
        lane = ITSELF if thread is threading.main_thread() else thread.name
        name = f"layer {self.layer} expert {expert}"
        self.note(Span(lane, "read", name, start, end, self.layer, expert=expert, nbytes=slot.nbytes))


@dataclass(frozen=True)
class TimedChecksApart(TimedStore):
    """One that reads now and checks later: what is timed is the read."""

    store: ChecksApart

    def read_unchecked(self, expert: int, slot: Array) -> None:
        self._timed(self.store.read_unchecked, expert, slot)

    def check(self, expert: int, slot: Array) -> None:
        self.store.check(expert, slot)


@dataclass(eq=False)
class Recorder:
    """[ENG-076] waited: seconds the decoder has waited so far, as it counts them itself."""

    waited: Callable[[], float] = lambda: 0.0
    spans: list[Span] = field(default_factory=list)
    tokens: int = 0
    start: int = 0
    _reads: list[Span] = field(default_factory=list)  # appended to by all threads
    _mark: int | None = None  # where the running phase began; None while nothing is recorded
    _layer_mark: int = 0
    _waited: float = 0.0

    def wrap(self, layer: int, store: ExpertStore) -> ExpertStore:
        if isinstance(store, ChecksApart):
            return TimedChecksApart(layer, store, self._reads.append)
        return TimedStore(layer, store, self._reads.append)

    def observe(self, point: str, layer: int, value: Any) -> None:
        """An `Observe`."""
        if self._mark is None or point not in PHASES:
            return
        now, waited = time.perf_counter_ns(), self.waited()
        begun = min(now, self._mark + round((waited - self._waited) * 1e9))
        layer -= point == "prediction_logits"  # that point names the layer predicted for, not the one at work
        at = None if layer < 0 else layer
        if begun > self._mark:
            # what is computed between two waits of one layer is drawn behind both
            self._note("wait", "wait", self._mark, begun, at)
        self._note("compute", PHASES[point], begun, now, at)
        if point == "layer_output":
            self._note("layer", f"layer {layer}", self._layer_mark, now, at)
        if point in ("embedding", "layer_output"):
            self._layer_mark = now
        self._mark, self._waited = now, waited

    def _note(self, kind: str, name: str, start: int, end: int, layer: int | None) -> None:
        self.spans.append(Span(DECODER, kind, name, start, end, layer, self.tokens))

    def step(self, run: Callable[[], Any]) -> Any:
        """One decoded token, recorded."""
        start = time.perf_counter_ns()
        self.start = self.start or start
        self._mark, self._waited = start, self.waited()
        result = run()
        self._note("token", f"token {self.tokens}", start, time.perf_counter_ns(), None)
        self._mark, self.tokens = None, self.tokens + 1
        return result

    def finish(self) -> list[Span]:
        """Everything that began with the first recorded token or later, in order; only once all reads have ended."""
        found = [*self.spans, *(read for read in self._reads if read.start >= self.start)]
        return sorted(found, key=lambda span: (span.start, -span.end))


def covered(spans: Iterable[Span], until: int) -> int:
    """Nanoseconds before `until` in which at least one of the spans was under way.

    >>> covered([Span("a", "read", "", 0, 5), Span("b", "read", "", 3, 7), Span("a", "read", "", 9, 20)], until=12)
    10
    """
    total, reached = 0, 0
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, until)
        total += max(0, end - start)
        reached = max(reached, end)
    return total
