"""A Mixture-of-Experts layer: router, routed experts through an executor, and the shared expert."""

from dataclasses import replace

import mlx.core as mx
from jaxtyping import Float, Float32

from edge0_mlx.functions import sigmoid, swiglu
from edge0_mlx.router import Choice, check_logits, choose
from edge0_mlx.weights import Weights
from edge0_ref.config import MoeConfig
from edge0_ref.contract import Array, RouterSpec, SigmoidGroup
from edge0_ref.errors import NonFiniteError

Activations = Float[mx.array, "tokens hidden"]


class GatedMlp:
    """[DEC-055] down(silu(gate x) * (up x)) of resident weights: a shared expert, or the whole of a dense layer."""

    def __init__(self, weights: Weights, path: str) -> None:
        self.gate_up = weights.joined(f"{path}.gate_proj", f"{path}.up_proj")
        self.down = weights.linear(f"{path}.down_proj")

    def __call__(self, x: Activations) -> Activations:
        gate, up = self.gate_up(x)
        return self.down(swiglu(gate, up))


class Moe:
    """[DEC-030] One layer's router and shared expert; the routed experts belong to the executor."""

    def __init__(self, weights: Weights, layer: int, path: str, config: MoeConfig, top_k: int) -> None:
        self.layer, self.num_experts = layer, config.num_experts
        self.spec: RouterSpec = replace(config.router, top_k=top_k)
        if isinstance(self.spec, SigmoidGroup) and config.expert_bias:
            self.spec = replace(self.spec, expert_bias=weights.checkpoint.vector(f"{path}.gate.expert_bias"))
        self.router = weights.linear(f"{path}.gate")
        self.shared = GatedMlp(weights, f"{path}.{config.shared_name}")
        self.shared_gate = weights.linear(f"{path}.{config.shared_name}_gate") if config.shared_gate else None

    def router_logits(self, x: Activations) -> Float32[mx.array, "tokens experts"]:
        """Float32 on every device: bfloat16 logits tie at the edge of the choice for every tenth token."""
        return self.router(x.astype(mx.float32))

    def route(self, logits: Float32[mx.array, "tokens experts"]) -> Choice:
        """On the device, until an evaluation brings it back and `check` has seen the logits."""
        return choose(logits, self.spec)

    def check(self, logits: Array) -> None:
        """Raises NonFiniteError, naming the layer."""
        try:
            check_logits(logits, self.spec.top_k)
        except NonFiniteError as error:
            raise NonFiniteError(f"layer {self.layer}: {error}") from None

    def shared_output(self, x: Activations) -> Activations:
        """[DEC-031] sigmoid(shared_expert_gate x) * shared(x), or [DEC-055] without a gate; whatever the routing."""
        y = self.shared(x)
        return y if self.shared_gate is None else sigmoid(self.shared_gate(x)) * y
