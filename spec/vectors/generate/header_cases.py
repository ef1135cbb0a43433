"""Chapter 5: safetensors files as bytes, each right or wrong in one way; all by hand."""

# ruff: noqa: E501 (a case is a row of a table)

import json
import struct
from typing import Any

from values import Json, case, error


def cases() -> list[Json]:
    return [*accepted(), *refused_headers(), *refused_extents()]


def file_of(header: Any, data: int = 0, length: int | None = None) -> str:
    """A whole file in hexadecimal: length, header, and so many bytes of data. length: what the first 8 bytes say instead."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return (struct.pack("<Q", len(text) if length is None else length) + text + bytes(range(1, data + 1))).hex()


def entry(first: int, last: int, shape: tuple[int, ...] = (1,), dtype: str = "F32") -> Json:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def place(dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> Json:
    return {"dtype": dtype, "axes": list(shape), "offset": offset, "nbytes": nbytes}


def accepted() -> list[Json]:
    """offset: from the start of the file."""
    one = {"a": entry(0, 4)}
    size = len(json.dumps(one, separators=(",", ":")))
    padded = json.dumps(one, separators=(",", ":")).encode().ljust(64)
    two = {"b": entry(4, 8), "a": entry(0, 4)}
    start = 8 + len(json.dumps(two, separators=(",", ":")))
    kinds = {word: entry(first, last, (last - first,) if nbytes == 1 else ((last - first) // nbytes,), word)
             for word, first, last, nbytes in (("F16", 0, 2, 2), ("BF16", 2, 4, 2), ("U8", 4, 7, 1), ("I64", 7, 15, 8))}  # fmt: skip
    begin = 8 + len(json.dumps(kinds, separators=(",", ":")))
    empty = {"none": entry(0, 0, (0, 3))}
    scalar = {"s": entry(0, 4, ())}
    told = {"__metadata__": {"format": "mlx"}, "a": entry(0, 4)}
    rows: list[tuple[str, str, str, str, dict[str, Json], dict[str, str]]] = [
        ("one", "offset-from-data", "One float32.", file_of(one, 4), {"a": place("F32", (1,), 8 + size, 4)}, {}),
        ("padded", "length-ignored", "A header padded with spaces.", file_of(padded, 4), {"a": place("F32", (1,), 72, 4)}, {}),
        ("any-order", "order-of-names", "Data need not lie in the order of names.", file_of(two, 8),
         {"b": place("F32", (1,), start + 4, 4), "a": place("F32", (1,), start, 4)}, {}),
        ("dtypes", "item-sizes", "Items of 2, 1 and 8 bytes, at odd offsets.", file_of(kinds, 15),
         {"F16": place("F16", (1,), begin, 2), "BF16": place("BF16", (1,), begin + 2, 2),
          "U8": place("U8", (3,), begin + 4, 3), "I64": place("I64", (1,), begin + 7, 8)}, {}),
        ("no-elements", "empty-refused", "A tensor of no elements has no bytes.", file_of(empty),
         {"none": place("F32", (0, 3), 8 + len(json.dumps(empty, separators=(",", ":"))), 0)}, {}),
        ("scalar", "scalar-refused", "No axes: one element.", file_of(scalar, 4),
         {"s": place("F32", (), 8 + len(json.dumps(scalar, separators=(",", ":"))), 4)}, {}),
        ("metadata", "metadata-as-tensor", "The table of strings is no tensor.", file_of(told, 4),
         {"a": place("F32", (1,), 8 + len(json.dumps(told, separators=(",", ":"))), 4)}, {"format": "mlx"}),
        ("nothing", "empty-file-refused", "No tensors at all.", file_of({}), {}, {}),
    ]  # fmt: skip
    return [
        case(f"headers/{name}", "STO-001 STO-002", "header", flags, comment, "hand", {"file": file},
             expected={"tensors": tensors, "metadata": metadata})
        for name, flags, comment, file, tensors, metadata in rows
    ]  # fmt: skip


def refused(name: str, ids: str, flags: str, comment: str, file: str, *mentions: str) -> Json:
    return case(f"headers/refuses-{name}", ids, "header", flags, comment, "hand", {"file": file},
                error=error("CheckpointError", *mentions))  # fmt: skip


def refused_headers() -> list[Json]:
    one = {"a": entry(0, 4)}
    rows = [
        ("no-bytes", "short-file", "An empty file.", "", ["0 bytes"]),
        ("seven-bytes", "short-file", "Not even a length.", "00" * 7, ["7 bytes"]),
        ("length-beyond", "length-unchecked", "A length beyond the end of the file.", file_of(one, 4, length=2**20), []),
        ("length-huge", "length-overflows", "A length of 2**64 - 1.", file_of(one, 4, length=2**64 - 1), []),
        ("no-json", "garbage-header", "A header that is no JSON.", file_of(b"{abc}"), ["JSON"]),
        ("list", "header-is-any-json", "A header that is a list.", file_of([1]), ["object"]),
        ("no-utf8", "garbage-header", "A header that is no UTF-8.", file_of(b'{"\xff": 1}'), ["JSON"]),
        ("name-twice", "last-one-wins", "A name twice.", file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1), ["'a'"]),
        ("number-for-entry", "entry-unchecked", "An entry that is a number.", file_of({"a": 5}), ["a"]),
        ("no-dtype", "entry-unchecked", "An entry without dtype.", file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4), ["a"]),
        ("unknown-dtype", "dtype-guessed", "A dtype of no known size.", file_of({"a": entry(0, 1, (1,), "F8_E4M3")}, 1), ["a", "F8_E4M3"]),
        ("negative-axis", "shape-unchecked", "A shape with -1.", file_of({"a": entry(0, 4, (-1,))}, 4), ["a"]),
        ("fraction", "shape-unchecked", "A shape with 1.5.", file_of({"a": {"dtype": "U8", "shape": [1.5], "data_offsets": [0, 1]}}, 1), ["a"]),
        ("true-for-one", "shape-unchecked", "A shape with true.", file_of({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1), ["a"]),
        ("metadata-number", "metadata-unchecked", "Metadata that is no string.", file_of({"__metadata__": {"k": 1}, "a": entry(0, 4)}, 4), ["__metadata__"]),
        ("control-name", "name-unchecked", "A name with a line break.", file_of({"a\nb": entry(0, 4)}, 4), ["a"]),
        ("size-mismatch", "extent-unchecked", "Two float32 in four bytes.", file_of({"a": entry(0, 4, (2,))}, 4), ["a", "8", "4"]),
        ("backwards", "extent-unchecked", "An extent that ends before it begins.", file_of({"a": entry(4, 0)}, 4), ["a"]),
    ]  # fmt: skip
    return [refused(name, "STO-001", flags, comment, file, *mentions) for name, flags, comment, file, mentions in rows]


def refused_extents() -> list[Json]:
    rows = [
        ("truncated", "zeros-for-missing", "The last byte is missing.", file_of({"a": entry(0, 4)}, 3), ["a"]),
        ("trailing", "trailing-ignored", "A byte that belongs to nothing.", file_of({"a": entry(0, 4)}, 5), ["a"]),
        ("hole", "holes-ignored", "Four bytes between two tensors.", file_of({"a": entry(0, 4), "b": entry(8, 12)}, 12), ["b"]),
        ("leading-hole", "holes-ignored", "Data that does not begin at 0.", file_of({"a": entry(4, 8)}, 8), ["a"]),
        ("overlap", "overlap-ignored", "Two tensors share two bytes.", file_of({"a": entry(0, 4), "b": entry(2, 6)}, 6), ["b"]),
        ("same-bytes", "overlap-ignored", "Two tensors are the same bytes.", file_of({"a": entry(0, 4), "b": entry(0, 4)}, 4), ["b"]),
        ("far", "extent-beyond-end", "An extent of 2**40.", file_of({"a": entry(2**40, 2**40 + 4)}, 4), ["a"]),
    ]  # fmt: skip
    return [refused(name, "STO-002", flags, comment, file, *mentions) for name, flags, comment, file, mentions in rows]
