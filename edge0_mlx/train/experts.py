"""Routed experts for a batch of tokens. Gradients reach activations and routing weights; experts stay as they are.

On a CPU the tokens of an expert are laid together and each expert is one product; on a GPU one gather runs them all.
"""

from functools import partial

import mlx.core as mx
import numpy as np
from jaxtyping import Float32

from edge0_mlx.train.elementwise import logistic, on_host, swiglu, swiglu_gradients
from edge0_mlx.train.floats import ExpertWeights
from edge0_ref.contract import Array


def routed_experts(
    x: Float32[mx.array, "tokens hidden"],
    experts: Array,
    weights: Float32[mx.array, "tokens k"],
    held: ExpertWeights,
) -> Float32[mx.array, "tokens hidden"]:
    """[EXE-002] y[t] = sum over j of weights[t, j] * expert[experts[t, j]](x[t]); experts [tokens, k] on the host."""
    call = SortedCall(experts, held)
    return on_host(call.forward, call.backward, partial(gathered_experts, experts, held))(x, weights)


def gathered_experts(experts: Array, held: ExpertWeights, x: mx.array, weights: mx.array) -> mx.array:
    """The same where MLX runs on a GPU."""
    chosen, rows = mx.array(experts), x[:, None, None]
    gate, up = (mx.gather_mm(rows, part, rhs_indices=chosen) for part in (held.gate, held.up))
    y = mx.gather_mm(swiglu(gate, up), held.down, rhs_indices=chosen)
    return (weights[..., None] * y[:, :, 0]).sum(axis=1)


class SortedCall:
    """One call's tokens, sorted by expert: every use of an expert is a row, an expert's rows are a span."""

    def __init__(self, experts: Array, held: ExpertWeights) -> None:
        self.shape = experts.shape
        flat = experts.reshape(-1)
        self.order = np.argsort(flat, kind="stable")
        self.inverse = np.argsort(self.order, kind="stable")
        self.token = self.order // experts.shape[1]
        counts = np.bincount(flat)
        ends = np.cumsum(counts).tolist()
        self.spans = [(e, slice(end - int(n), end)) for e, (n, end) in enumerate(zip(counts, ends, strict=True)) if n]
        self.gate, self.up, self.down = (np.array(part, copy=False) for part in held)

    def multiply(self, rows: Array, weights: Array) -> Array:
        """rows @ weights[expert], span by span."""
        y = np.empty((rows.shape[0], weights.shape[2]), np.float32)
        for expert, span in self.spans:
            np.matmul(rows[span], weights[expert], out=y[span])
        return y

    def forward(self, x: Array, weights: Array) -> Array:
        rows = x[self.token]
        self.gated, self.upped = self.multiply(rows, self.gate), self.multiply(rows, self.up)
        self.outputs = self.multiply(self.gated * logistic(self.gated) * self.upped, self.down)
        y: Array = np.einsum("tkh,tk->th", self.outputs[self.inverse].reshape(*self.shape, -1), weights)
        return y

    def backward(self, g: Array, y: Array, x: Array, weights: Array) -> tuple[Array, Array]:
        """Gradients of x and weights; `forward` came before."""
        g_rows = g[self.token]
        g_weights = np.einsum("mh,mh->m", g_rows, self.outputs)[self.inverse].reshape(self.shape)
        g_rows *= weights.reshape(-1)[self.order][:, None]
        g_inner = self.multiply(g_rows, self.down.swapaxes(1, 2))
        g_gate, g_up = swiglu_gradients(g_inner, self.gated, self.upped)
        g_x = self.multiply(g_gate, self.gate.swapaxes(1, 2)) + self.multiply(g_up, self.up.swapaxes(1, 2))
        return g_x[self.inverse].reshape(*self.shape, -1).sum(axis=1), g_weights
