"""Adapter files as their headers tell of them: which they are, what their tensors are called, how they were trained.

A folder holds any number of `.safetensors` files; a tensor's name says what it is:

    layers.<owner>.{fc1,fc2,linear_init}.weight            a head (also `layers.<owner>.mlp.prerouter.*`)
    <module path>.lora_A [rank, cols], .lora_B [rows, rank]

A published model has its adapters beside its weights; there a file's name says that it is one. A model's own files may
carry heads too, under `<mlp path of the owner>.prerouter.*`.

Metadata is one JSON string under the key `__metadata__` of the file's own metadata, as published adapters have it.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0_ref.config import ModelConfig
from edge0_ref.errors import AdapterError, CheckpointError
from edge0_ref.json_files import is_there, parse_object
from edge0_ref.safetensors_header import TensorInfo, read_header

HEAD_KEY = re.compile(r"layers\.([0-9]{1,6})\.(?:mlp\.prerouter\.)?(fc1|fc2|linear_init)\.weight")
LORA_KEY = re.compile(r"(.+)\.(lora_A|lora_B)")
BESIDE_A_MODEL = ("lora_*.safetensors", "prerouter_*.safetensors")
SETTINGS = ("K", "r", "alpha", "owners")


def adapter_files(folder: Path) -> list[Path]:
    """[PRE-019] Files of adapters; in a model's folder, those that are named as such. Raises AdapterError."""
    if not folder.is_dir():
        raise AdapterError(f"{folder}: {'not a folder' if is_there(folder) else 'no such folder'}")
    beside_a_model = (folder / "config.json").exists()
    patterns = BESIDE_A_MODEL if beside_a_model else ("*.safetensors",)
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def default_adapters(folder: Path) -> Path | None:
    """[PRE-019] Where a model's adapters are if nobody says: the folder `adapters` in its own, else its own."""
    held = folder / "adapters"
    if is_there(held):
        return held
    return folder if adapter_files(folder) else None


def read_adapter_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Tensors and metadata of a file of adapters. Raises AdapterError."""
    try:
        tensors, raw = read_header(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    return tensors, decode_metadata(path, raw)


def decode_metadata(path: Path, raw: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {key: value for key, value in raw.items() if key != "__metadata__"}
    if "__metadata__" in raw:
        try:
            values |= parse_object(raw["__metadata__"].encode(errors="replace"), f"{path}: the metadata")
        except CheckpointError as error:
            raise AdapterError(str(error)) from None
    return values


def number_of(metadata: Mapping[str, Any], name: str) -> float | None:
    value = metadata.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number <= 0 or isinstance(value, bool):
        raise AdapterError(f"adapter metadata: {name} is {reprlib.repr(value)}, wanted a number above 0")
    return number


def top_k_of(folder: Path, metadata: Mapping[str, Any], config: ModelConfig) -> tuple[int | None, tuple[str, ...]]:
    """[PRE-011] K comes from the metadata; where it differs from config.json, that is said aloud."""
    value = number_of(metadata, "K")
    if value is None:
        return None, ()
    experts = min(moe.num_experts for moe in config.moe_layers.values())
    if value != int(value) or not 1 <= value <= experts:
        raise AdapterError(f"{folder}: K is {value:g}, wanted 1 to {experts}")
    top_k = int(value)
    note = f"adapters run this model with K = {top_k} experts a token; its config.json says {config.top_k}"
    return top_k, () if top_k == config.top_k else (note,)


@dataclass(frozen=True)
class AdapterFacts:
    """Of adapters nobody has opened: K if they say it, the layers that own heads, and bytes of all their numbers."""

    top_k: int | None = None
    owners: frozenset[int] = frozenset()
    nbytes: int = 0


def adapter_facts(folder: Path, config: ModelConfig) -> AdapterFacts:
    """[PRE-011] From headers alone. Raises AdapterError."""
    metadata: dict[str, Any] = {}
    found: dict[str, TensorInfo] = {}
    for path in adapter_files(folder):
        tensors, told = read_adapter_header(path)
        metadata |= told
        found |= tensors
    return facts_of(folder, found, metadata, config)


def facts_of(
    folder: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], config: ModelConfig
) -> AdapterFacts:
    """Of all tensors and settings of a folder."""
    nbytes = sum(info.nbytes for info in tensors.values())
    return AdapterFacts(top_k_of(folder, metadata, config)[0], owners_of(tensors), nbytes)


def owners_of(names: Iterable[str]) -> frozenset[int]:
    """The layers whose heads are among tensors of these names."""
    return frozenset(int(head[1]) for name in names if (head := HEAD_KEY.search(name)))
