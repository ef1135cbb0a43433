"""A Mixture-of-Experts layer: router, routed experts through an executor, and the shared expert."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float32

from edge0_ref.config import MoeConfig
from edge0_ref.contract import RouterSpec, Routing, SigmoidGroup
from edge0_ref.errors import NonFiniteError
from edge0_ref.functions import sigmoid
from edge0_ref.weights import Weights

Activations = Float32[np.ndarray, "tokens hidden"]


class GatedMlp:
    """[DEC-055] down(silu(gate x) * (up x)) of resident weights: a shared expert, or the whole of a dense layer."""

    def __init__(self, weights: Weights, path: str) -> None:
        self.arithmetic = weights.arithmetic
        self.gate_up = weights.joined(f"{path}.gate_proj", f"{path}.up_proj")
        self.down = weights.linear(f"{path}.down_proj")

    def __call__(self, x: Activations) -> Activations:
        gate, up = self.gate_up(x)
        return self.down(self.arithmetic.swiglu(gate, up))


class Moe:
    """[DEC-030] One layer's router and shared expert; the routed experts belong to the executor."""

    def __init__(self, weights: Weights, layer: int, path: str, config: MoeConfig, top_k: int) -> None:
        self.layer, self.num_experts, self.arithmetic = layer, config.num_experts, weights.arithmetic
        self.spec: RouterSpec = replace(config.router, top_k=top_k)
        if isinstance(self.spec, SigmoidGroup) and config.expert_bias:
            self.spec = replace(self.spec, expert_bias=weights.vector(f"{path}.gate.expert_bias"))
        self.router = weights.linear(f"{path}.gate")
        self.shared = GatedMlp(weights, f"{path}.{config.shared_name}")
        self.shared_gate = weights.linear(f"{path}.{config.shared_name}_gate") if config.shared_gate else None

    def router_logits(self, x: Activations) -> Float32[np.ndarray, "tokens experts"]:
        return self.router(x)

    def route(self, logits: Float32[np.ndarray, "tokens experts"]) -> Routing:
        """Raises NonFiniteError, naming the layer."""
        try:
            return self.arithmetic.route(logits, self.spec)
        except NonFiniteError as error:
            raise NonFiniteError(f"layer {self.layer}: {error}") from None

    def shared_output(self, x: Activations) -> Activations:
        """[DEC-031] sigmoid(shared_expert_gate x) * shared(x), or [DEC-055] without a gate; whatever the routing."""
        y = self.shared(x)
        return y if self.shared_gate is None else sigmoid(self.shared_gate(x)) * y
