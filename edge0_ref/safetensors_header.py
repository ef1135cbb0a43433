"""The header of a safetensors file: which bytes of it are which tensor.

Format: 8 bytes little-endian header length, JSON, data. mlx writes the header unpadded, so data may start at any byte
and tensors lie in any order. Source: the format description of huggingface/safetensors.
"""

import os
import reprlib
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge0_ref.errors import CheckpointError
from edge0_ref.json_files import parse_object

MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 16
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
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        size = status.st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: a file of {size} bytes is not a safetensors file, or it is truncated")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    entries = parse_object(text, f"{path}: the header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of strings")
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extents(path, list(tensors.values()), 8 + length, size)
    return tensors, metadata


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not name.isprintable():
        raise CheckpointError(f"{path}: the name {name!r} is not printable")
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and 0 <= number < 2**63 for number in (*shape, first, last))
        whole = whole and isinstance(dtype, str) and len(shape) <= MAX_AXES
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: tensor {name}: the header entry is not dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name}: dtype {reprlib.repr(dtype)}, wanted one of {', '.join(DTYPES)}")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if last - first != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name}: {dtype} {list(shape)} is {nbytes} bytes, its extent has {last - first}"
        )
    return TensorInfo(name, dtype, shape, path, data_start + first, nbytes)


def _check_extents(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """[STO-002] Extents tile the data exactly: no overlap, no hole, nothing beyond the end."""
    end, before = data_start, "the header"
    for tensor in tensors:
        if tensor.offset + tensor.nbytes > size:
            ends = tensor.offset + tensor.nbytes
            raise CheckpointError(f"{path}: tensor {tensor.name} ends at byte {ends}, the file at {size}: truncated?")
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {tensor.name} overlaps {before}")
        if tensor.offset > end:
            raise CheckpointError(f"{path}: {tensor.offset - end} bytes between {before} and {tensor.name} are unused")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes after {before} belong to no tensor")
