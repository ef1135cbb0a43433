"""Activations: one dtype for a whole run, chosen by the device or by the caller, said aloud when it rounds."""

import os
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest

from edge0_mlx.backend import MlxBackend
from edge0_mlx.device import ActivationName
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Plan

IN_FLOAT32 = {"router_logits", "prediction_logits", "logits"}  # what decides, and what the contract returns


@pytest.mark.spec("NUM-008", "BCK-006")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_operation_changes_the_dtype_of_activations(
    small: Checkpoint, adapters: Adapters, dtype: ActivationName
) -> None:
    backend, seen = MlxBackend(dtype), dict[str, set[Any]]()

    def observe(point: str, layer: int, value: Any) -> None:
        if isinstance(value, mx.array):
            seen.setdefault(point, set()).add(value.dtype)

    decoder = backend.decoder(small, Plan(top_k=2, slots=4), adapters, observe)
    decoder.prefill([1, 2, 3])
    decoder.step(4)
    decoder.close()
    wanted = {point: {mx.float32 if point in IN_FLOAT32 else backend.device.activations} for point in seen}
    assert seen == wanted
    assert seen.keys() > IN_FLOAT32


@pytest.mark.spec("BCK-011", "NUM-011")
def test_the_notice_says_what_is_slow_and_what_is_rounded() -> None:
    plain, rounded = MlxBackend("float32"), MlxBackend("bfloat16")
    assert "bfloat16" in (rounded.notice() or "")
    assert "bfloat16" not in (plain.notice() or "")
    assert ("numba" in (plain.notice() or "")) != plain.device.gpu


@pytest.mark.spec("NUM-011", "BCK-012")
@pytest.mark.parametrize("before", [{}, {"MLX_ENABLE_TF32": "1"}], ids=["unset", "set"])
def test_products_of_float32_are_not_rounded_to_fewer_bits_on_a_gpu(before: dict[str, str]) -> None:
    """What MLX reads, in C, before it chooses a kernel: whatever the shell says."""
    code = "import ctypes, edge0_mlx; get = ctypes.CDLL(None).getenv; get.restype = ctypes.c_char_p"
    command = [sys.executable, "-c", f"{code}; print(get(b'MLX_ENABLE_TF32').decode())"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | before)
    assert run.stdout.strip() == "0"
