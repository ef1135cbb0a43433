"""Where MLX runs, and in which dtype activations travel there."""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from edge0_ref.errors import BackendError

ActivationName = Literal["float32", "bfloat16"]
ACTIVATIONS: dict[str, mx.Dtype] = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class Device:
    """The device and the dtype rule.

    activations: float32 on a CPU, where MLX sums a product in the activations' own dtype and bfloat16 would lose 5 %;
    bfloat16 on a GPU, whose kernels sum in float32.
    """

    gpu: bool
    activations: mx.Dtype

    def coefficients(self, stored: mx.Dtype) -> mx.Dtype:
        """Scales, biases and float weights keep their dtype if it is the activations'; otherwise they are float32.

        Two 16-bit dtypes in one product would be promoted to float32 by MLX anyway, silently.
        """
        return stored if stored == self.activations else mx.float32


def default_device(dtype: ActivationName | None = None) -> Device:
    """MLX's default device. Raises BackendError for a dtype that is no activation dtype."""
    if dtype is not None and dtype not in ACTIVATIONS:
        raise BackendError(f"activations in {dtype!r}; the mlx backend has {', '.join(ACTIVATIONS)}")
    gpu = mx.default_device().type == mx.DeviceType.gpu
    return Device(gpu, ACTIVATIONS[dtype or ("bfloat16" if gpu else "float32")])
