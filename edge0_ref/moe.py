"""A Mixture-of-Experts layer: router, routed experts through an executor, and the shared expert."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float32

from edge0_ref.config import MoeConfig
from edge0_ref.contract import Routing, RouterSpec
from edge0_ref.errors import NonFiniteError
from edge0_ref.experts import gated_mlp
from edge0_ref.functions import sigmoid
from edge0_ref.router import route
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]


class Moe:
    """[DEC-030] One layer's router and shared expert; the routed experts belong to the executor."""

    def __init__(self, weights: Weights, layer: int, path: str, config: MoeConfig, top_k: int) -> None:
        self.layer, self.num_experts = layer, config.num_experts
        self.spec: RouterSpec = replace(config.router, top_k=top_k)
        self.router = weights.linear(f"{path}.gate")
        self.shared_gate = weights.linear(f"{path}.shared_expert_gate") if config.shared_gate else None
        self.shared = [weights.linear(f"{path}.shared_expert.{name}_proj") for name in ("gate", "up", "down")]

    def router_logits(self, x: Activations) -> Float32[np.ndarray, "tokens experts"]:
        return self.router(x)

    def route(self, logits: Float32[np.ndarray, "tokens experts"]) -> Routing:
        """Raises NonFiniteError, naming the layer."""
        try:
            return route(logits, self.spec)
        except NonFiniteError as error:
            raise NonFiniteError(f"layer {self.layer}: {error}") from None

    def shared_output(self, x: Activations) -> Activations:
        """[DEC-031] sigmoid(shared_expert_gate x) * shared(x); computed once, whatever the routing."""
        gate, up, down = self.shared
        y = gated_mlp(x, gate.weight, up.weight, down.weight, (gate.lora, up.lora, down.lora))
        return y if self.shared_gate is None else sigmoid(self.shared_gate(x)) * y
