"""What makes a position: the state of a decoder, by value, and the same as named arrays that a file can hold."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge0_ref.contract import Array, Routing
from edge0_ref.mixers.attention import KeyValueCache
from edge0_ref.mixers.gated_delta import DeltaState
from edge0_ref.mixers.mla import LatentCache


@dataclass
class State:
    """Everything that makes a position: mixer states, and what the prerouter carries from token to token.

    executed: layer -> experts [k] it executed for the last token; predicted: layer -> routing of the next token.
    """

    mixers: list[Any]
    position: int = 0
    executed: dict[int, Array] = field(default_factory=dict)
    predicted: dict[int, Routing] = field(default_factory=dict)

    def copy(self) -> "State":
        return State([m.copy() for m in self.mixers], self.position, copy.deepcopy(self.executed), dict(self.predicted))


def arrays_of(state: State) -> dict[str, Array]:
    """[ENG-081] What `state_of` makes the same state from; of a cache, the positions that are filled."""
    named = {"position": np.array([state.position])}
    for layer, mixer in enumerate(state.mixers):
        named |= {f"mixers.{layer}.{name}": array for name, array in mixer_arrays(mixer).items()}
    named |= {f"executed.{layer}": experts for layer, experts in state.executed.items()}
    for layer, routing in state.predicted.items():
        named |= {f"predicted.{layer}.experts": routing.experts, f"predicted.{layer}.weights": routing.weights}
    return named


def mixer_arrays(mixer: Any) -> dict[str, Array]:
    match mixer:
        case KeyValueCache(keys=keys, values=values, length=length):
            return {"keys": keys[:length], "values": values[:length]}
        case LatentCache(rows=rows, length=length):
            return {"rows": rows[:length]}
        case DeltaState(conv=conv, memory=memory):
            return {"conv": conv, "memory": memory}
    raise AssertionError(f"a mixer state of type {type(mixer).__name__}")


def state_of(arrays: Mapping[str, Array], empty: Sequence[Any]) -> State:
    """[ENG-081] The way back. empty: a new state of each mixer, which is filled."""
    parts: dict[str, dict[int, dict[str, Array]]] = {"mixers": {}, "executed": {}, "predicted": {}}
    for name, array in arrays.items():
        if name != "position":
            kind, layer, part = f"{name}.".split(".")[:3]
            parts[kind].setdefault(int(layer), {})[part] = array
    return State(
        [mixer_state(new, parts["mixers"][layer]) for layer, new in enumerate(empty)],
        int(arrays["position"].item()),
        {layer: held[""] for layer, held in parts["executed"].items()},
        {layer: Routing(**held) for layer, held in parts["predicted"].items()},
    )


def mixer_state(new: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(new, DeltaState):
        return DeltaState(**arrays)
    new.append(**arrays)
    return new
