"""Single operations of the MLX backend, with the shapes of one expert and one delta net of a 35b model.

pytest tests/mlx/bench_kernels.py --benchmark-only
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_mlx import kernels
from edge0_mlx.arrays import DeviceMatrix
from edge0_mlx.device import default_device
from edge0_mlx.experts import Matrices, Places, run_experts

HIDDEN, INNER, SLOTS = 2048, 512, 16
DTYPE = default_device().activations


@pytest.fixture(scope="module")
def bank() -> Matrices:
    def matrix(rows: int, cols: int) -> DeviceMatrix:
        weights = mx.random.normal((SLOTS, rows, cols)).astype(DTYPE)
        packed, scales, biases = mx.quantize(weights, group_size=64, bits=4)
        mx.eval(packed, scales, biases)
        return DeviceMatrix(packed, scales, biases, 4, 64)

    return matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER)


@pytest.mark.parametrize("in_order", [False, True], ids=["as they come", "expert by expert"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 128])
def test_experts_of_a_call(benchmark: Any, bank: Matrices, tokens: int, in_order: bool) -> None:
    """Four experts a token, as a prompt has them and as `executors.exact` runs them."""
    slots = np.random.default_rng(0).integers(0, SLOTS, 4 * tokens).astype(np.uint32)
    chosen = mx.array(np.sort(slots) if in_order else slots)
    places = Places.of(np.arange(4 * tokens) // 4)
    x = mx.random.normal((tokens, 1, HIDDEN)).astype(DTYPE)
    mx.eval(chosen, places, x)
    benchmark.pedantic(lambda: mx.eval(run_experts(x, bank, chosen, places)), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("tokens", [1, 16])
def test_delta_rule(benchmark: Any, tokens: int) -> None:
    q, k = (mx.random.normal((tokens, 16, 1, 1, 128)) for _ in range(2))
    v, beta = mx.random.normal((tokens, 16, 2, 128, 1)), mx.random.uniform(shape=(tokens, 16, 2, 1, 1))
    state = mx.random.normal((1, 16, 2, 128, 128))
    mx.eval(q, k, v, beta, state)
    benchmark.pedantic(lambda: mx.eval(kernels.delta_rule(q, k, v, beta, beta, state)), rounds=5, warmup_rounds=1)
