"""What cases of the decoder's pieces share: drawn arrays, and outputs with their bounds."""

from typing import Any

import numpy as np
from values import Json, case, tensor


def judged(
    name: str, ids: str, operation: str, flags: str, comment: str, seed: int | None, inputs: Json, **results: Any
) -> Json:
    """results: output -> (values, bounds)."""
    source = "hand" if seed is None else f"float64 oracle, seed {seed}"
    expected = {output: tensor(values, "float64") for output, (values, _) in results.items()}
    bound = {output: tensor(bounds, "float64") for output, (_, bounds) in results.items()}
    return case(f"decoder/{name}", ids, operation, flags, comment, source, inputs, expected=expected, bound=bound)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)
