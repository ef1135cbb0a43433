"""Which experts a measurement has executed: what the model chooses, or a simulation of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from edge0_ref.contract import Routing
from edge0_ref.errors import UsageError


@dataclass(frozen=True)
class RoutingRule:
    """[ENG-072] reuse: share of a token's experts that were the last token's; None: drawn without looking back.

    name: as asked for, "model" where nothing is simulated.
    """

    name: str
    simulated: bool = False
    reuse: float | None = None


def parse_routing(text: str) -> RoutingRule:
    """model, uniform or replay:reuse=0.45. Raises UsageError."""
    if text == "model":
        return RoutingRule(text)
    if text == "uniform":
        return RoutingRule(text, simulated=True)
    found = re.fullmatch(r"replay:reuse=(\d(?:\.\d+)?)", text)
    if found is None or float(found[1]) > 1:
        raise UsageError(f"routing {text!r}, wanted model, uniform or replay:reuse=0.45, from 0 to 1")
    return RoutingRule(text, simulated=True, reuse=float(found[1]))


class SimulatedRouting:
    """[ENG-072] A `RoutingSource`: experts by a rule, known for all positions; weights stay the model's.

    first: the position of the first simulated token; routing of earlier ones is kept. pool: layer -> experts below
    this number are drawn; in_turn: the first tokens take them one after the other, until each was used.
    """

    def __init__(self, rule: RoutingRule, pool: Mapping[int, int], first: int, seed: int, *, in_turn: bool) -> None:
        self.rule, self.pool, self.first, self.in_turn = rule, pool, first, in_turn
        self._chosen: dict[int, list[Int64[np.ndarray, " k"]]] = {}
        self._draws = {layer: np.random.default_rng([seed, layer]) for layer in pool}

    def __call__(self, layer: int, position: int, routing: Routing) -> Routing:
        if position < self.first:
            return routing
        chosen = self._chosen_in(layer, position - self.first + 1, routing.experts.shape[1])
        return Routing(chosen[position - self.first][None], routing.weights)

    def draw(self, tokens: int, k: int) -> None:
        """All that the next tokens will use, before any of them is timed."""
        for layer in self.pool:
            self._chosen_in(layer, tokens, k)

    def _chosen_in(self, layer: int, tokens: int, k: int) -> list[Int64[np.ndarray, " k"]]:
        """A layer's experts of the first tokens, of as many at least."""
        chosen = self._chosen.setdefault(layer, [])
        while len(chosen) < tokens:
            chosen.append(self._draw(layer, len(chosen), k, chosen[-1] if chosen else None))
        return chosen

    def _draw(self, layer: int, token: int, k: int, before: Int64[np.ndarray, " k"] | None) -> Int64[np.ndarray, " k"]:
        count = self.pool[layer]
        if k > count:
            raise UsageError(f"routing {self.rule.name}: K = {k} of {count} experts of layer {layer}")
        if self.in_turn and token * k < count:
            return (np.arange(k) + token * k) % count
        draws = self._draws[layer]
        if before is None or self.rule.reuse is None:
            return draws.permutation(count)[:k].astype(np.int64)
        kept = before[draws.random(k) < self.rule.reuse]
        others = np.setdiff1d(np.arange(count), before)
        kept = kept if len(others) >= k - len(kept) else before[: k - len(others)]  # nearly all experts are used
        fresh = draws.permutation(others)[: k - len(kept)]
        return draws.permutation(np.concatenate([kept, fresh])).astype(np.int64)
