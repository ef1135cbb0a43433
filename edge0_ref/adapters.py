"""Adapters: prerouter heads and recovery LoRA, read from files and checked against the model they are for."""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from edge0_ref.adapter_headers import (
    HEAD_KEY,
    LORA_KEY,
    SETTINGS,
    adapter_files,
    decode_metadata,
    number_of,
    read_adapter_header,
    top_k_of,
)
from edge0_ref.bits import widen
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import ModelConfig
from edge0_ref.contract import Array, Lora, PrerouterHead
from edge0_ref.errors import AdapterError, ReadError
from edge0_ref.packed import fingerprint
from edge0_ref.readers import open_for_reading, read_exactly
from edge0_ref.safetensors_header import TensorInfo

HEAD_PARTS = ("fc1", "fc2", "linear_init")
FINGERPRINT = re.compile("[0-9a-f]{64}")  # published files name their base in other words


@dataclass(frozen=True)
class Adapters:
    """[PRE-010] What an adapter folder holds, checked against the model it is for.

    heads: owner layer -> head, consumed by layer owner + 1; loras: module path -> update; top_k: experts a token the
    heads were trained for, or None when the metadata does not say; notes: what a user should be told.
    """

    heads: Mapping[int, PrerouterHead] = field(default_factory=dict)
    loras: Mapping[str, Lora] = field(default_factory=dict)
    top_k: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def arrays(self) -> list[Array]:
        """Every matrix, in its file's dtype."""
        heads = [part for head in self.heads.values() for part in (head.fc1, head.fc2, head.linear)]
        return heads + [part for lora in self.loras.values() for part in (lora.down, lora.up)]

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def lora_bytes(self) -> int:
        """Of these, the LoRAs'."""
        return sum(part.nbytes for lora in self.loras.values() for part in (lora.down, lora.up))

    @property
    def widened_bytes(self) -> int:
        """Memory of float32 copies of those that are none."""
        return sum(4 * array.size for array in self.arrays if array.dtype != np.float32)


def open_adapters(folder: Path | str, config: ModelConfig) -> Adapters:
    """Read and check a folder of adapters. Raises AdapterError naming file, key, what it is and what was wanted."""
    folder = Path(folder)
    files = adapter_files(folder)
    if not files:
        wanted = "*.safetensors, or beside a model lora_*.safetensors and prerouter_*.safetensors"
        raise AdapterError(f"{folder}: no adapter files ({wanted})")
    head_parts: dict[int, dict[str, Array]] = {}
    lora_parts: dict[str, dict[str, Array]] = {}
    metadata: dict[str, Any] = {}
    for path in files:
        tensors, told = read_adapter_header(path)
        for key in SETTINGS:
            if key in metadata and key in told and str(metadata[key]) != str(told[key]):
                raise AdapterError(f"{path}: {key} is {told[key]}, another file of the folder says {metadata[key]}")
        metadata |= told
        for name, info in tensors.items():
            if head := HEAD_KEY.fullmatch(name):
                _put(head_parts.setdefault(int(head[1]), {}), head[2], info)
            elif lora := LORA_KEY.fullmatch(name):
                _put(lora_parts.setdefault(_module(lora[1], config), {}), lora[2], info)
            else:
                raise AdapterError(f"{path}: {name} is neither a prerouter head nor a LoRA")
    top_k, notes = top_k_of(folder, metadata, config)
    heads = {owner: _head(owner, parts, config) for owner, parts in sorted(head_parts.items())}
    _check_owners(folder, metadata, heads)
    loras = {module: _lora(module, parts, metadata, config) for module, parts in sorted(lora_parts.items())}
    return Adapters(heads, loras, top_k, metadata, notes)


def baked_adapters(checkpoint: Checkpoint) -> Adapters:
    """[DEC-063] The heads in a model's own files, with the metadata of those files. Raises AdapterError."""
    head_parts: dict[int, dict[str, Array]] = {}
    for name, info in checkpoint.heads.items():
        head = HEAD_KEY.search(name)
        if head is None or head.end() != len(name):
            raise AdapterError(f"{info.path}: {name} is no part of a prerouter head")
        _put(head_parts.setdefault(int(head[1]), {}), head[2], info)
    if not head_parts:
        return Adapters()
    config, folder = checkpoint.config, checkpoint.folder
    metadata = decode_metadata(folder, checkpoint.metadata)
    top_k, notes = top_k_of(folder, metadata, config)
    heads = {owner: _head(owner, parts, config) for owner, parts in sorted(head_parts.items())}
    _check_owners(folder, metadata, heads)
    return Adapters(heads, {}, top_k, metadata, (f"{len(heads)} prerouter heads came in the model's own files", *notes))


def adapters_of(checkpoint: Checkpoint, folder: Path | str | None) -> Adapters:
    """[DEC-063] A folder's adapters with the heads of the model's own files, unless the folder has heads itself."""
    baked = baked_adapters(checkpoint)
    if folder is None:
        return baked
    opened = open_adapters(folder, checkpoint.config)
    check_base(checkpoint, Path(folder), opened)
    if opened.heads:
        replaced = (f"the heads of {folder} replace those in the model's own files",) if baked.heads else ()
        return replace(opened, notes=(*opened.notes, *replaced))
    if None not in (opened.top_k, baked.top_k) and opened.top_k != baked.top_k:
        raise AdapterError(f"{folder}: K is {opened.top_k}, the heads in the model's own files say {baked.top_k}")
    return Adapters(
        baked.heads,
        opened.loras,
        opened.top_k or baked.top_k,
        {**baked.metadata, **opened.metadata},
        (*baked.notes, *opened.notes),
    )


def check_base(checkpoint: Checkpoint, folder: Path, adapters: Adapters) -> None:
    """[TRN-007] Adapters that say which weights they were trained on are refused beside others. Raises AdapterError."""
    base = adapters.metadata.get("base")
    if isinstance(base, str) and FINGERPRINT.fullmatch(base) and base != (here := fingerprint(checkpoint)):
        raise AdapterError(f"{folder}: trained on the base {base[:12]}..., {checkpoint.folder} is {here[:12]}...")


def _put(parts: dict[str, Array], part: str, info: TensorInfo) -> None:
    if info.dtype not in ("F32", "F16", "BF16"):
        raise AdapterError(f"{info.path}: {info.name}: dtype {info.dtype}, wanted F16, BF16 or F32")
    if len(info.shape) != 2 or 0 in info.shape:
        raise AdapterError(f"{info.path}: {info.name}: shape {list(info.shape)}, wanted a matrix")
    if part in parts:
        raise AdapterError(f"{info.path}: {info.name} occurs twice in the folder")
    data = np.empty(info.nbytes, np.uint8)
    try:
        with open_for_reading(info.path) as file:
            read_exactly(file, info.offset, data.data)
    except OSError as error:
        raise ReadError(f"{info.path}: reading {info.name} failed: {error}") from error
    values = data.view(info.numpy_dtype).reshape(info.shape)
    if not np.isfinite(widen(values)).all():
        raise AdapterError(f"{info.path}: {info.name}: holds NaN or infinity")
    parts[part] = values


def _module(name: str, config: ModelConfig) -> str:
    """[LOR-006] The model's own path for a LoRA target; published files leave out or keep the outermost prefix."""
    outer = config.outer_prefix
    for module in (name, f"{outer}{name}"):
        if module == config.embedding:
            raise AdapterError(f"LoRA target {name}: the embedding is looked up, not multiplied")
        if module in config.tensors.linears:
            return module
    experts = tuple(f"{path}." for paths in config.tensors.experts.values() for path in paths)
    if any(f"{prefix}{name}".startswith(experts) for prefix in ("", outer)):
        raise AdapterError(f"LoRA on the routed experts {name}: they stay int4; LoRA belongs beside resident layers")
    raise AdapterError(f"LoRA target {name}: this model has no such linear layer")


def _head(owner: int, parts: Mapping[str, Array], config: ModelConfig) -> PrerouterHead:
    """[PRE-012] A head's shapes are fixed by the model; its consumer, the next layer, must route."""
    moe = config.moe_layers
    missing = [part for part in HEAD_PARTS if part not in parts]
    if missing:
        raise AdapterError(f"head of layer {owner}: {', '.join(missing)} missing")
    if owner not in moe or owner + 1 not in moe:
        where = f"layer {owner + 1}" if owner in moe else f"its own layer {owner}"
        raise AdapterError(
            f"head of layer {owner}: {where} has no routed experts in this model of {len(config.layers)} layers"
        )
    features = config.hidden_size + 2 * moe[owner].num_experts
    experts = moe[owner + 1].num_experts
    width = parts["fc1"].shape[0]
    wanted = {"fc1": (width, features), "fc2": (experts, width), "linear_init": (experts, features)}
    for part, shape in wanted.items():
        if parts[part].shape != shape:
            raise AdapterError(
                f"head of layer {owner}: {part} is {list(parts[part].shape)}, this model needs {list(shape)}"
            )
    return PrerouterHead(parts["fc1"], parts["fc2"], parts["linear_init"])


def _check_owners(folder: Path, metadata: Mapping[str, Any], heads: Mapping[int, PrerouterHead]) -> None:
    owners = metadata.get("owners")
    if owners is None:
        return
    try:
        listed = json.loads(owners) if isinstance(owners, str) else owners
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(type(owner) is int and owner >= 0 for owner in listed):
        raise AdapterError(f"{folder}: owners is {reprlib.repr(owners)}, wanted a list of layers")
    if set(listed) != set(heads):
        raise AdapterError(
            f"{folder}: the metadata names the owners {sorted(listed)}, the files hold heads of {sorted(heads)}"
        )


def _lora(module: str, parts: Mapping[str, Array], metadata: Mapping[str, Any], config: ModelConfig) -> Lora:
    if set(parts) != {"lora_A", "lora_B"}:
        raise AdapterError(f"LoRA {module}: only {', '.join(parts)}; wanted lora_A and lora_B")
    rows, cols = config.tensors.linears[module]
    rank = parts["lora_A"].shape[0]
    for part, shape in (("lora_A", (rank, cols)), ("lora_B", (rows, rank))):
        if parts[part].shape != shape:
            raise AdapterError(f"LoRA {module}: {part} is {list(parts[part].shape)}, this model needs {list(shape)}")
    promised = number_of(metadata, "r")
    if promised is not None and promised != rank:
        raise AdapterError(f"LoRA {module}: rank {rank}, the metadata says r = {promised:g}")
    alpha = number_of(metadata, "alpha")
    if alpha is None:
        raise AdapterError(f"LoRA {module}: the metadata does not say alpha, so its scale alpha / r is unknown")
    return Lora(parts["lora_A"], parts["lora_B"], alpha / rank)


def write_adapters(
    path: Path, heads: Mapping[int, PrerouterHead], loras: Mapping[str, Lora], metadata: Mapping[str, Any]
) -> None:
    """[PRE-013] One file, float16, metadata as published; whole or not at all (written aside, then renamed).

    Raises AdapterError for values that float16 cannot hold.
    """
    tensors: dict[str, Array] = {}
    for owner, head in heads.items():
        for part, values in zip(HEAD_PARTS, (head.fc1, head.fc2, head.linear), strict=True):
            tensors[f"layers.{owner}.{part}.weight"] = values
    for module, lora in loras.items():
        tensors |= {f"{module}.lora_A": lora.down, f"{module}.lora_B": lora.up}
    with np.errstate(over="ignore"):
        halves = {name: np.ascontiguousarray(widen(values), np.float16) for name, values in tensors.items()}
    for name, half in halves.items():
        if not np.isfinite(half).all():
            raise AdapterError(f"{path}: {name} holds NaN, infinity, or a value beyond float16")
    aside = path.with_name(f"{path.name}.partial")
    try:
        save_file(halves, aside, {"__metadata__": json.dumps(dict(metadata), sort_keys=True)})
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
