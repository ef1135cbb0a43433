"""The work that costs time, in one place: a backend with faster kernels brings its own, and shares all the rest."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32

from edge0_ref import kernels
from edge0_ref.bits import widen
from edge0_ref.contract import Array, Lora, PrerouterHead, QuantizedMatrix, RouterSpec, Routing
from edge0_ref.executors.bank import RunExperts
from edge0_ref.executors.exact import run_each
from edge0_ref.functions import silu, swiglu
from edge0_ref.lora import linear
from edge0_ref.prerouter import predict
from edge0_ref.router import route

Product = Callable[[Array], list[Array]]  # activations [tokens, cols] -> of each layer [tokens, its rows]
Heads = Float32[np.ndarray, "tokens heads size"]


class Arithmetic:
    """The reference's: each method is the function or kernel of its name."""

    run_experts: RunExperts = staticmethod(run_each)

    def stored(self, weight: QuantizedMatrix | Array) -> QuantizedMatrix | Array:
        """A resident weight in the form that is kept: numbers are widened once, instead of at every use."""
        if not isinstance(weight, QuantizedMatrix):
            return widen(weight)
        scales, biases = widen(weight.scales), widen(weight.biases)
        return QuantizedMatrix(weight.packed, scales, biases, weight.bits, weight.group_size)

    def product(self, layers: Sequence[tuple[QuantizedMatrix | Array, Lora | None]]) -> Product:
        """Linear layers of the same input, made ready: weights as `stored`, each with its LoRA or None."""
        return lambda x: [self.linear(x, weight, lora) for weight, lora in layers]

    def linear(
        self, x: Float32[np.ndarray, "tokens cols"], weight: QuantizedMatrix | Array, lora: Lora | None = None
    ) -> Float32[np.ndarray, "tokens rows"]:
        return linear(x, weight, lora)

    def route(self, logits: Float32[np.ndarray, "tokens experts"], spec: RouterSpec) -> Routing:
        """[RTR-001] Raises NonFiniteError and ShapeError."""
        return route(logits, spec)

    def predict(
        self, head: PrerouterHead, features: Float32[np.ndarray, "tokens features"]
    ) -> Float32[np.ndarray, "tokens experts"]:
        """[PRE-001] A head's logits."""
        return predict(head, features, self.linear)

    def swiglu(self, gate: Float32[np.ndarray, "..."], up: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        """[EXE-003] silu(gate) * up."""
        return swiglu(gate, up)

    def silu(self, x: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        """[DEC-020] x * sigmoid(x)."""
        return silu(x)

    def causal_conv(
        self,
        x: Float32[np.ndarray, "tokens channels"],
        taps: Float32[np.ndarray, "kernel channels"],
        state: Float32[np.ndarray, "history channels"],
    ) -> Float32[np.ndarray, "tokens channels"]:
        """[DEC-020] The convolution of x; `state` is advanced past it."""
        y = np.empty_like(x)
        kernels.causal_conv(x, taps, state, y)
        return y

    def delta_rule(
        self,
        q: Float32[np.ndarray, "tokens key_heads key_size"],
        k: Float32[np.ndarray, "tokens key_heads key_size"],
        v: Float32[np.ndarray, "tokens heads value_size"],
        beta: Float32[np.ndarray, "tokens heads"],
        decay: Float32[np.ndarray, "tokens heads key_size"],
        state: Float32[np.ndarray, "heads value_size key_size"],
    ) -> Float32[np.ndarray, "tokens heads value_size"]:
        """[DEC-021] What the heads read from their memories; `state` is advanced."""
        y = np.empty_like(v)
        kernels.delta_rule(q, k, v, beta, decay, state, y)
        return y

    def causal_attention(
        self,
        q: Heads,
        keys: Float32[np.ndarray, "positions kv_heads size"],
        values: Float32[np.ndarray, "positions kv_heads _"],
        first: int,
        scale: float,
        value_size: int,
    ) -> Float32[np.ndarray, "tokens heads value_size"]:
        """[DEC-010] Attention of tokens from position `first` on; of wider values the first `value_size` dims count."""
        y = np.empty((q.shape[0], q.shape[1], value_size), np.float32)
        kernels.causal_attention(q, keys, values, first, scale, y)
        return y
