"""What makes a position: the state of a decoder, by value, and the same as named arrays that a file can hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from edge0_mlx.arrays import from_numpy, to_numpy
from edge0_mlx.heads import Predicted
from edge0_mlx.mixers.attention import KeyValueCache
from edge0_mlx.mixers.gated_delta import DeltaState, rows_of
from edge0_mlx.mixers.mla import LatentCache
from edge0_ref.contract import Array, Routing


@dataclass
class State:
    """Everything that makes a position: mixer states, and what the prerouter carries from token to token.

    executed: layer -> experts [k] it executed for the last token; predicted: layer -> routing of the next token.
    """

    mixers: list[Any]
    position: int = 0
    executed: dict[int, Array] = field(default_factory=dict)
    predicted: dict[int, Predicted] = field(default_factory=dict)

    def copy(self) -> "State":
        """Its parts are never changed, only replaced, so they need no copies."""
        return State(list(self.mixers), self.position, dict(self.executed), dict(self.predicted))


def arrays_of(state: State) -> dict[str, Array]:
    """[ENG-081] What `state_of` makes the same state from; of a cache, the positions that are filled."""
    named = {"position": np.array([state.position])}
    for layer, mixer in enumerate(state.mixers):
        named |= {f"mixers.{layer}.{name}": array for name, array in mixer_arrays(mixer).items()}
    named |= {f"executed.{layer}": experts for layer, experts in state.executed.items()}
    for layer, (routing, _) in state.predicted.items():
        named |= {f"predicted.{layer}.experts": routing.experts, f"predicted.{layer}.weights": routing.weights}
    return named


def mixer_arrays(mixer: Any) -> dict[str, Array]:
    match mixer:
        case KeyValueCache(keys, values, length):
            arrays = {"keys": keys[:, :, :length], "values": values[:, :, :length]}
        case LatentCache(rows, length):
            arrays = {"rows": rows[:, :, :length]}
        case DeltaState(conv, memory):
            arrays = {"conv": mx.concatenate(list(conv)), "memory": memory}
        case _:
            raise AssertionError(f"a mixer state of type {type(mixer).__name__}")
    return {name: to_numpy(array) for name, array in arrays.items()}


def state_of(arrays: Mapping[str, Array], empty: Sequence[Any]) -> State:
    """[ENG-081] The way back. empty: a new state of each mixer, which tells dtypes."""
    parts: dict[str, dict[int, dict[str, Array]]] = {"mixers": {}, "executed": {}, "predicted": {}}
    for name, array in arrays.items():
        if name != "position":
            kind, layer, part = f"{name}.".split(".")[:3]
            parts[kind].setdefault(int(layer), {})[part] = array
    predicted = {layer: Routing(**held) for layer, held in parts["predicted"].items()}
    state = State(
        [mixer_state(new, parts["mixers"][layer]) for layer, new in enumerate(empty)],
        int(arrays["position"].item()),
        {layer: held[""] for layer, held in parts["executed"].items()},
        {layer: Predicted(routing, from_numpy(routing.weights)) for layer, routing in predicted.items()},
    )
    mx.eval([mixer.arrays for mixer in state.mixers])
    return state


def mixer_state(new: Any, arrays: Mapping[str, Array]) -> Any:
    dtype = new.arrays[0].dtype
    if isinstance(new, DeltaState):
        return DeltaState(rows_of(arrays["conv"]), from_numpy(arrays["memory"]))
    return new.append(**{name: from_numpy(array).astype(dtype) for name, array in arrays.items()})
