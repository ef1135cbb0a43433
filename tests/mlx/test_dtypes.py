"""Activations: one dtype for a whole run, chosen by the device or by the caller, said aloud when it rounds."""

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
