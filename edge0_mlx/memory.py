"""How much memory MLX may take, and how much it took."""

import ctypes
from collections.abc import Mapping

import mlx.core as mx

from edge0_mlx.device import Device

CACHE_BYTES = 2**28  # of freed buffers that MLX keeps for later, at most
WITHOUT_BUDGET = mx.get_memory_limit()  # MLX's own limit, from the machine's memory

TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's, from which MLX has its memory on a Linux CPU


def give_back() -> None:
    """What was freed is the system's again: MLX keeps some buffers, and glibc what lies between others."""
    mx.clear_cache()
    if TRIM is not None:
        TRIM(0)


def limit_memory(budget: int | None, device: Device) -> None:
    """What the newest plan allows, for the whole process. budget: bytes of the process; None is no budget.

    Beyond `set_memory_limit` MLX waits for graphs that run, and gives freed buffers back, before it allocates more.
    Weights of a GPU are wired, so that a quiet second does not page them out.
    """
    mx.set_cache_limit(CACHE_BYTES if budget is None else min(CACHE_BYTES, budget // 16))
    mx.set_memory_limit(WITHOUT_BUDGET if budget is None else budget)
    if device.gpu and mx.metal.is_available():
        most = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(most if budget is None else min(budget, most))


def measured_memory() -> Mapping[str, float]:
    """Bytes of MLX's allocator: in use, freed and kept, and the most that were in use so far.

    On unified memory they are part of the process's own size; slots and weights are in them, Python is not.
    """
    return {
        "device_peak_bytes": mx.get_peak_memory(),
        "device_active_bytes": mx.get_active_memory(),
        "device_cache_bytes": mx.get_cache_memory(),
    }
