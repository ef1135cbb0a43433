"""[BCK-020] Messages between the suite and a program: a line of JSON, then the safetensors file it announces."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WORDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I64": "<i8", "U8": "|u1"}
DTYPES = {np.dtype(dtype): word for word, dtype in WORDS.items()}
LINE_LIMIT, BLOB_LIMIT = 2**20, 2**30


class FramingError(ValueError):
    """Bytes that are no message; says what they are instead."""


@dataclass(frozen=True, eq=False)
class Message:
    """fields: the JSON line; tensors: the arrays behind it. A bfloat16 array is the uint16 array of its patterns."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encode(self) -> bytes:
        """[BCK-021] No white space in the line, so that a program may look for `"bits":` instead of parsing it."""
        blob = safetensors_of(self.tensors) if self.tensors else b""
        fields = dict(self.fields) | ({"bytes": len(blob)} if blob else {})
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n" + blob


def safetensors_of(tensors: Mapping[str, np.ndarray]) -> bytes:
    """8 bytes of header length, the header padded with spaces to a multiple of 8, the arrays in the order given."""
    header: dict[str, Any] = {}
    pieces, offset = [], 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        place = [offset, offset + len(raw)]
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": place}
        pieces.append(raw)
        offset += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(pieces)


def announced(line: bytes) -> tuple[dict[str, Any], int]:
    """The fields of a line, and how many bytes follow it."""
    try:
        fields = json.loads(line)
    except ValueError:
        raise FramingError(f"a line that is not JSON: {shown(line)}") from None
    if not isinstance(fields, dict):
        raise FramingError(f"a line that is not a JSON object: {shown(line)}")
    length = fields.get("bytes", 0)
    if type(length) is not int or not 0 <= length <= BLOB_LIMIT:
        raise FramingError(f"bytes: got {length!r}, wanted 0 to {BLOB_LIMIT}")
    return fields, length


def shown(data: bytes) -> str:
    """The beginning of bytes that should have been something else."""
    text = data[:60].decode("utf-8", "backslashreplace").rstrip("\n")
    return f"{text!r}" + ("..." if len(data) > 60 else "")


def tensors_in(blob: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file. Raises FramingError saying which tensor is wrong, and how."""
    if not blob:
        return {}
    length = struct.unpack_from("<Q", blob)[0] if len(blob) >= 8 else None
    if length is None or length > len(blob) - 8:
        raise FramingError(f"{len(blob)} bytes that are no safetensors file: their header has {length} bytes")
    try:
        header = dict(json.loads(blob[8 : 8 + length]))
    except (ValueError, TypeError):
        raise FramingError(f"a safetensors header that is not JSON: {shown(blob[8 : 8 + length])}") from None
    data = blob[8 + length :]
    header.pop("__metadata__", None)
    return {name: placed(name, entry, data) for name, entry in header.items()}


def placed(name: str, entry: Any, data: bytes) -> np.ndarray:
    """One array of a file's data."""
    try:
        word, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        dtype = np.dtype(WORDS[word])
        if not 0 <= start <= end <= len(data):
            raise FramingError(f"tensor {name}: bytes {start} to {end} of {len(data)}")
        return np.frombuffer(data[start:end], dtype).reshape(shape).copy()
    except FramingError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise FramingError(f"tensor {name}: {shown(json.dumps(entry).encode())} ({error})") from None
