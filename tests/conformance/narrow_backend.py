"""The reference with narrow activations: rounded on the way into every linear layer, summed in float32."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from conformance.oracles import rounded
from conformance.profiles import FLOAT32, PROFILES, Profile
from edge0_ref.arithmetic import Arithmetic
from edge0_ref.backend import OwningExecutor, ReferenceBackend
from edge0_ref.bits import widen
from edge0_ref.contract import Array, Expert, Lora, QuantizedMatrix
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.dequant import dequantize
from edge0_ref.errors import ShapeError
from edge0_ref.executors.bank import Bank, Uses
from edge0_ref.functions import swiglu
from edge0_ref.prerouter import predict


class NarrowArithmetic(Arithmetic):
    """Linear layers of one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def multiply(self, x: Array, weight: QuantizedMatrix | Array) -> Array:
        dense = dequantize(weight) if isinstance(weight, QuantizedMatrix) else widen(weight)
        if x.shape[1] != dense.shape[1]:
            raise ShapeError(f"linear: activations {x.shape} against a weight of {dense.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(rounded(np.asarray(x, np.float32), self.profile) @ dense.T)

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        base = self.multiply(x, weight)
        if lora is None:
            return base
        update = self.multiply(self.multiply(x, lora.down), lora.up)
        return base + np.float32(lora.scale) * update

    def run_experts(self, outputs: Array, x: Array, group: Iterable[tuple[Uses, int]], bank: Bank) -> None:
        for (tokens, ranks), slot in group:
            outputs[tokens, ranks] = self.run_expert(x[tokens], bank.expert(slot))

    def run_expert(self, x: Array, expert: Expert) -> Array:
        return self.multiply(swiglu(self.multiply(x, expert.gate), self.multiply(x, expert.up)), expert.down)


class NarrowBackend(ReferenceBackend):
    """Says what it does: bits are not among its promises."""

    claims = ReferenceBackend.claims - {"bits"}

    def __init__(self, activations: str, told: str) -> None:
        self.name, self.activations = f"reference in {activations}", told
        self.arithmetic = NarrowArithmetic(PROFILES[activations])

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        return self.arithmetic.linear(x, weight, lora)

    def predict(self, head: Any, features: Array) -> Array:
        return predict(head, features, self.arithmetic.multiply)

    def executor(self, kind: Any, store: Any, slots: int) -> Any:
        return OwningExecutor(kind, store, slots, self.arithmetic.run_experts)

    def decoder(self, checkpoint: Any, plan: Any, adapters: Any = None, observe: Any = None) -> Any:
        return ReferenceDecoder(checkpoint, plan, adapters, observe, self.arithmetic)


def bfloat16() -> NarrowBackend:
    return NarrowBackend("bfloat16", "bfloat16")


def float16() -> NarrowBackend:
    return NarrowBackend("float16", "float16")


def bfloat16_unsaid() -> NarrowBackend:
    """Computes in bfloat16 and lets float32 be believed."""
    return NarrowBackend("bfloat16", FLOAT32.name)
