"""Ling checkpoints for tests: the fixtures' tensors as bytes, heads for them, configs with fields changed."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.ref.builders import Tensor, Tensors, tensor

DATA = Path(__file__).parents[1] / "data"
TOKENS = [7, 3, 500, 41, 3, 3, 99, 256]
CONFIG = json.loads((DATA / "ling_edge0" / "config.json").read_text("utf-8"))


def tensors_of(name: str) -> Tensors:
    """A fixture's tensors, as bytes."""
    raw = (DATA / name / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    entries = json.loads(raw[8:start])
    entries.pop("__metadata__", None)
    return {
        key: Tensor(entry["dtype"], tuple(entry["shape"]), raw[start + first : start + last])
        for key, entry in entries.items()
        for first, last in [entry["data_offsets"]]
    }


def floats(held: Tensor) -> np.ndarray:
    return np.frombuffer(held.data, np.float32).reshape(held.shape)


def head_tensors(prefix: str, owners: tuple[int, ...], seed: int = 0) -> Tensors:
    """Random heads: `prefix` has {} for the owner."""
    rng = np.random.default_rng(seed)
    shapes = {"fc1": (8, 160), "fc2": (16, 8), "linear_init": (16, 160)}
    return {
        f"{prefix.format(owner)}.{part}.weight": tensor(rng.normal(0, 2 * shape[1] ** -0.5, shape), "F16")
        for owner in owners
        for part, shape in shapes.items()
    }


def metadata(owners: tuple[int, ...], **more: Any) -> dict[str, str]:
    return {"__metadata__": json.dumps({"owners": list(owners), "r": 2, "alpha": 4, **more})}


def config_with(tmp_path: Path, **fields: Any) -> Path:
    values = {name: value for name, value in (CONFIG | fields).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path
