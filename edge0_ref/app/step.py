"""`edge0 step`: one decoded token's way through one layer, seen through `observe`."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge0_ref.app.api import Model, open_model
from edge0_ref.contract import Array, Counters, Routing
from edge0_ref.engine.memory import size_text
from edge0_ref.engine.prompts import Prompt
from edge0_ref.engine.session import counters_between
from edge0_ref.errors import UsageError


@dataclass(frozen=True)
class Event:
    """What `observe` told: a point of a layer, its value, and the counters at that moment."""

    point: str
    layer: int
    value: Any
    counters: Counters


@dataclass
class Recorder:
    """Keeps the events of the newest call of the decoder; a call begins with its embedding."""

    model: Model | None = None
    events: list[Event] = field(default_factory=list)
    resident_before: dict[int, frozenset[int]] = field(default_factory=dict)

    def __call__(self, point: str, layer: int, value: Any) -> None:
        if point == "embedding":
            self.resident_before = {event.layer: event.value for event in self.events if event.point == "resident"}
            self.events = []
        counters = replace(self.model.counters) if self.model else Counters()
        self.events.append(Event(point, layer, value, counters))


def run_step(prompt: Prompt, layer: int, **options: Any) -> None:
    """[ENG-064] Read a prompt, choose the most likely token, and show how that token passes through a layer."""
    recorder = Recorder()
    with open_model(observe=recorder, **options) as model:
        layers = len(model.config.layers)
        if not 0 <= layer < layers:
            raise UsageError(f"layer {layer}; this model has layers 0 to {layers - 1}")
        recorder.model = model
        token, position = decode_one(model, prompt)
        text = repr(model.tokenizer.decode([token])) if isinstance(prompt, str) else ""
        print(f"token {token} {text} at position {position}, layer {layer} of {layers}")
        show(recorder, layer, model.backend.to_numpy)


def decode_one(model: Model, prompt: Prompt) -> tuple[int, int]:
    """The first token after the prompt, and its position; the decoder has just stepped through it."""
    ids = model.token_ids(prompt)
    generation = model.generate(ids, max_tokens=2)
    first = next(generation, None)
    if first is None or first.token_id is None:
        raise UsageError("the model ends this text at once, so there is no token to follow")
    next(generation, None)  # chooses the second token from the step of the first
    return first.token_id, len(ids)


def show(recorder: Recorder, layer: int, to_numpy: Any) -> None:
    """The events of one layer, in the order in which they came; a prediction is told to the layer it is for."""
    before = recorder.events[0].counters
    for event in recorder.events:
        if event.point == "prediction_logits":
            if event.layer == layer + 1:
                print(f"  {'predicts':18} for layer {event.layer}, next token: {describe(event, recorder, to_numpy)}")
        elif event.layer == layer:
            print(f"  {event.point:18} {describe(event, recorder, to_numpy)}")
            if event.point == "resident":
                print(f"  {'reads':18} {reads_text(before, event.counters)}")
        if event.point == "layer_output":
            before = event.counters


def describe(event: Event, recorder: Recorder, to_numpy: Any) -> str:
    match event.value:
        case Routing(experts=experts, weights=weights):
            pairs = zip(experts[-1].tolist(), weights[-1].tolist(), strict=True)
            source = "router" if any_router(recorder, event.layer) else "predicted one token ago"
            return f"{', '.join(f'{expert}: {weight:.4f}' for expert, weight in pairs)}  ({source})"
        case frozenset() as resident:
            kept = resident & recorder.resident_before.get(event.layer, frozenset())
            return f"{len(resident)} experts in slots: {sorted(resident)}, of which {len(kept)} stayed from before"
        case _:
            return array_text(event.point, to_numpy(event.value))


def any_router(recorder: Recorder, layer: int) -> bool:
    return any(event.point == "router_logits" and event.layer == layer for event in recorder.events)


def array_text(point: str, values: Array) -> str:
    row = values[-1].astype(np.float64)
    text = f"{list(values.shape)!s:12} norm {np.sqrt(np.sum(row * row)):.6g}"
    if not point.endswith("_logits"):
        return f"{text}, first {np.array2string(values[-1, :4], precision=4)}"
    best = np.argsort(-row, kind="stable")[:8]
    return f"{text}, best {', '.join(f'{expert}: {row[expert]:.4f}' for expert in best)}"


def reads_text(before: Counters, after: Counters) -> str:
    spent = counters_between(before, after)
    return (
        f"{spent.reads} experts, {size_text(spent.bytes_read)}; {spent.hits} were in a slot, "
        f"{spent.read_ahead} read ahead, {spent.on_demand} on demand, {spent.drops} dropped"
    )
