"""The header of a safetensors file: which bytes of it are which tensor.

Format: 8 bytes little-endian header length, JSON, data. mlx writes the header unpadded, so data may start at any byte
and tensors lie in any order. Source: the format description of huggingface/safetensors.
"""

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge0_ref.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U64": np.dtype("<u8"),
    "F64": np.dtype("<f8"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: `nbytes` bytes at `offset` of `path`. dtype is the file's own word ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """[STO-001] Tensors and metadata of a file, every extent checked. Raises CheckpointError, naming the tensor."""
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: a file of {size} bytes is not a safetensors file, or it is truncated")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of strings")
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extents(path, list(tensors.values()), 8 + length, size)
    return tensors, metadata


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: the name {twice!r} occurs twice in the header")
        return dict(pairs)

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return entries


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, first, last))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: tensor {name}: the header entry is not dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name}: dtype {dtype!r}, wanted one of {', '.join(DTYPES)}")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if last - first != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name}: {dtype} {list(shape)} is {nbytes} bytes, its extent has {last - first}"
        )
    return TensorInfo(name, dtype, shape, path, data_start + first, nbytes)


def _check_extents(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """[STO-002] Extents tile the data exactly: no overlap, no hole, nothing beyond the end."""
    end, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {tensor.name} overlaps {before}")
        if tensor.offset > end:
            raise CheckpointError(f"{path}: {tensor.offset - end} bytes between {before} and {tensor.name} are unused")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    if end != size:
        what = "truncated" if end > size else "followed by bytes that belong to no tensor"
        raise CheckpointError(f"{path}: {what}: the tensors end at byte {end}, the file at {size}")
