"""All prerouter heads of a model: what was to be predicted is collected during a step and predicted at its end.

A head sees what its own layer saw and changes nothing in this token, so heads wait for one another, and heads of equal
shape are one stacked product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from edge0_mlx.arrays import DeviceHead, device_head
from edge0_mlx.prerouter import build_features, predict, routing_from_prediction
from edge0_mlx.router import check_logits
from edge0_ref.contract import Array, PrerouterHead, RouterSpec, Routing, SigmoidGroup
from edge0_ref.errors import NonFiniteError


class Pending(NamedTuple):
    """[PRE-007] One layer's share of one position: x [1, hidden], and the experts [k] it executed here and before."""

    owner: int
    x: mx.array
    executed: Array
    executed_before: Array


class Predicted(NamedTuple):
    """[PRE-006] A consumer's routing, and its weights [1, k] where they were made."""

    routing: Routing
    weights: mx.array


class Predictions(NamedTuple):
    """Of layers in `owners`, in order: logits [heads, experts], experts and weights [heads, k]."""

    owners: Sequence[int]
    logits: mx.array
    experts: mx.array
    weights: mx.array

    def routings(self) -> dict[int, "Predicted"]:
        """Consumer -> routing, once evaluated. Raises NonFiniteError naming owner and consumer."""
        self._check(np.array(self.logits))
        experts, weights = np.array(self.experts).astype(np.int64), np.array(self.weights)
        rows = mx.split(self.weights, len(self.owners))
        return {
            owner + 1: Predicted(Routing(experts[i : i + 1], weights[i : i + 1]), rows[i])
            for i, owner in enumerate(self.owners)
        }

    def _check(self, logits: Array) -> None:
        if np.isfinite(logits).all():
            return
        for owner, row in zip(self.owners, logits, strict=True):
            try:
                check_logits(row[None], 1)
            except NonFiniteError as error:
                raise NonFiniteError(f"layer {owner} predicting for layer {owner + 1}: {error}") from None


class Heads:
    """Heads by owner; specs: consumer -> the rule that its predictions follow."""

    def __init__(self, heads: Mapping[int, PrerouterHead], specs: Mapping[int, RouterSpec]) -> None:
        self.owners = sorted(heads)
        self._specs = {owner: without_bias(specs[owner + 1]) for owner in self.owners}
        alone = {owner: device_head(heads[owner]) for owner in self.owners}
        shapes = {(head.fc1.shape, head.fc2.shape, head.linear.shape) for head in alone.values()}
        self.stacked = len(shapes) == 1 and len({repr(spec) for spec in self._specs.values()}) == 1
        if self.stacked:
            parts = [mx.stack([getattr(alone[o], name) for o in self.owners]) for name in ("fc1", "fc2", "linear")]
            mx.eval(parts)
            self._together = DeviceHead(*parts)
            alone = {o: DeviceHead(*(part[i] for part in parts)) for i, o in enumerate(self.owners)}
            mx.eval([[head.fc1, head.fc2, head.linear] for head in alone.values()])
        self._alone = alone
        self._run_all = mx.compile(self._run_stacked)

    def __contains__(self, owner: int) -> bool:
        return owner in self._alone

    def predict(self, pending: Sequence[Pending]) -> list[Predictions]:
        """[PRE-001] Not evaluated."""
        owners = [p.owner for p in pending]
        if self.stacked and owners == self.owners:
            executed, before = (stacked([getattr(p, n) for p in pending]) for n in ("executed", "executed_before"))
            return [Predictions(owners, *self._run_all([p.x for p in pending], executed, before))]
        return [self._predict_one(p) for p in pending]

    def logits(self, owner: int, x: mx.array, executed: mx.array, before: mx.array) -> mx.array:
        """Of every token, for observers."""
        head = self._alone[owner]
        return predict(head, build_features(x, executed, before, head.linear.shape[-1]))

    def _predict_one(self, pending: Pending) -> Predictions:
        executed, before = (mx.array(ids[None]) for ids in (pending.executed, pending.executed_before))
        logits = self.logits(pending.owner, pending.x, executed, before)
        return Predictions([pending.owner], logits, *routing_from_prediction(logits, self._specs[pending.owner]))

    def _run_stacked(self, x: list[mx.array], executed: mx.array, before: mx.array) -> tuple[mx.array, ...]:
        rows = mx.concatenate(x)[:, None]  # a stack of as many arrays would be as many nodes more
        features = build_features(rows, executed, before, self._together.linear.shape[-1])
        logits = predict(self._together, features)[:, 0]
        return logits, *routing_from_prediction(logits, self._specs[self.owners[0]])


def stacked(ids: Sequence[Array]) -> mx.array:
    """int32 [heads, 1, k]."""
    return mx.array(np.concatenate(ids).astype(np.int32).reshape(len(ids), 1, -1))


def without_bias(spec: RouterSpec) -> RouterSpec:
    return replace(spec, expert_bias=None) if isinstance(spec, SigmoidGroup) else spec
