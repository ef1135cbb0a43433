"""The smallest backend that passes: two claims, NumPy only.

python -m conformance --backend conformance.examples.minimal_backend:MinimalBackend
"""

import numpy as np

from edge0_ref.contract import QuantizedMatrix, RouterSpec, Routing, SoftmaxTopK
from edge0_ref.errors import NonFiniteError, ShapeError


def widened(coefficients: np.ndarray) -> np.ndarray:
    """float32 of float32, float16, or bfloat16 patterns (uint16), which are the upper halves of float32 patterns."""
    if coefficients.dtype == np.uint16:
        return (coefficients.astype(np.uint32) << 16).view(np.float32)
    return coefficients.astype(np.float32)


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """[RTR-003] Ids of the k largest in each row, equal ones by ascending id: a stable sort keeps their order."""
    return np.argsort(-values, axis=1, kind="stable")[:, :k]


class MinimalBackend:
    """Its own arrays are NumPy's, so the way in and out is no way at all."""

    name = "minimal"
    claims = frozenset({"dequant", "router"})

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def dequantize(self, matrix: QuantizedMatrix) -> np.ndarray:
        shifts = np.arange(0, 32, matrix.bits, dtype=np.uint32)
        codes = (matrix.packed[:, :, None] >> shifts) & np.uint32(2**matrix.bits - 1)
        scales, biases = (np.repeat(widened(c), matrix.group_size, axis=1) for c in (matrix.scales, matrix.biases))
        return codes.reshape(matrix.rows, matrix.cols).astype(np.float32) * scales + biases

    def route(self, logits: np.ndarray, spec: RouterSpec) -> Routing:
        for token, expert in np.argwhere(~np.isfinite(logits)):
            raise NonFiniteError(f"token {token} expert {expert}: the logit is {logits[token, expert]}")
        softmax, experts = isinstance(spec, SoftmaxTopK), logits.shape[1]
        groups, top_groups = (1, 1) if softmax else (spec.num_groups, spec.top_groups)
        if experts % groups or spec.top_k > experts // groups * top_groups:
            raise ShapeError(f"top_k: got {spec.top_k} of {experts} experts in {groups} groups, {top_groups} kept")
        if softmax:
            experts = largest(logits, spec.top_k)
            powers = np.exp(np.take_along_axis(logits, experts, axis=1) - logits.max(axis=1, keepdims=True))
            return Routing(experts, powers / powers.sum(axis=1, keepdims=True))
        with np.errstate(over="ignore"):
            scores = 1 / (1 + np.exp(-logits))
        choice = scores if spec.expert_bias is None else scores + widened(spec.expert_bias)
        groups = choice.reshape(len(logits), spec.num_groups, -1)
        kept = largest(np.sort(groups, axis=2)[:, :, -2:].sum(axis=2), spec.top_groups)
        dropped = np.full(groups.shape, -np.inf, np.float32)
        np.put_along_axis(dropped, kept[:, :, None], 0, axis=1)
        experts = largest((groups + dropped).reshape(choice.shape), spec.top_k)
        chosen = np.take_along_axis(scores, experts, axis=1)
        return Routing(experts, (chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20) * spec.scale).astype(np.float32))
