"""Exponentials and what is made of them, with gradients: by NumPy where MLX runs on a CPU, by MLX on a GPU.

MLX's CPU kernels take 20 ns for an exponential, NumPy's vector code 1 ns; a training step is mostly exponentials.
"""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np

from edge0_mlx import functions
from edge0_ref.contract import Array


def on_host(
    forward: Callable[..., Array], backward: Callable[..., tuple[Array, ...]], device: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    """A function of arrays with its gradient: forward(*inputs), backward(gradient, output, *inputs), in NumPy.

    device: the same in MLX, for a GPU.
    """

    @mx.custom_function
    def function(*inputs: mx.array) -> mx.array:
        return mx.array(forward(*map(seen, inputs)))

    @function.vjp
    def function_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        inputs = primals if isinstance(primals, tuple) else (primals,)
        gradients = [mx.array(part) for part in backward(*map(seen, (cotangent, output, *inputs)))]
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    def chosen(*inputs: mx.array) -> mx.array:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        result: Any = function(*inputs) if on_cpu else device(*inputs)
        return cast(mx.array, result)

    return chosen


def seen(x: mx.array) -> Array:
    """What MLX computed, without a copy."""
    return np.array(x, copy=False)


def logistic(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) may be infinite: its inverse is the 0 that is wanted
        return (1.0 / (1.0 + np.exp(-x))).astype(np.float32, copy=False)


def swiglu_gradients(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    s = logistic(gate)
    return g * up * s * (1.0 + gate * (1.0 - s)), g * gate * s


def _silu_backward(g: Array, y: Array, x: Array) -> tuple[Array]:
    s = logistic(x)
    return (g * s * (1.0 + x * (1.0 - s)),)


def _softmax(x: Array) -> Array:
    powers: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def _log_softmax(x: Array) -> Array:
    shifted: Array = x - x.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


exp = on_host(np.exp, lambda g, y, x: (g * y,), mx.exp)
sigmoid = on_host(logistic, lambda g, y, x: (g * y * (1.0 - y),), functions.sigmoid)
silu = on_host(lambda x: x * logistic(x), _silu_backward, functions.silu)
swiglu = on_host(
    lambda gate, up: gate * logistic(gate) * up,
    lambda g, y, gate, up: swiglu_gradients(g, gate, up),
    functions.swiglu,
)
softmax = on_host(
    _softmax, lambda g, y, x: (y * (g - (g * y).sum(axis=-1, keepdims=True)),), lambda x: mx.softmax(x, axis=-1)
)
log_softmax = on_host(
    _log_softmax,
    lambda g, y, x: (g - np.exp(y) * g.sum(axis=-1, keepdims=True),),
    lambda x: x - mx.logsumexp(x, axis=-1, keepdims=True),
)
