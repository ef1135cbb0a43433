"""Vector files: read and checked against their schema, and written when a failure is kept."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from conformance.requirements import SPEC
from conformance.usable import faults
from conformance.vectors import Case

FOLDER = SPEC / "vectors"
VERSION = 1
DTYPES = {"float16": "float16", "uint16": "bfloat16", "float32": "float32", "float64": "float64", "uint32": "uint32"}


class VectorError(ValueError):
    """[BCK-033] A vector file that cannot be used: one line that says which, where in it, and what was wanted."""


@lru_cache(maxsize=1)
def validator() -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads((FOLDER / "schema.json").read_text("utf-8")))


def check(content: Any, name: str) -> None:
    """Raise VectorError if this is not the content of a vector file of this version."""
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise VectorError(f"{name}: version {version} of the vectors, this suite knows {VERSION}")
    errors = list(validator().iter_errors(content))
    if errors:
        plainest = min(errors, key=lambda error: len(error.instance_path))
        raise VectorError(f"{name}: {place_of(plainest.instance_path, content)}: {plainest.message[:160]}")
    for case in content["cases"]:
        for fault in faults(case, content.get("shared", {})):
            raise VectorError(f"{name}: case {case['id']}, {fault}")


def place_of(path: Sequence[str | int], content: Any) -> str:
    """Where in the file: the case by its id, then the path inside it."""
    place = list(path)
    if len(place) >= 2 and place[0] == "cases":
        case = content["cases"][place[1]]
        named = case.get("id") if isinstance(case, dict) else None
        place = [f"case {named or place[1]}", *place[2:]]
    return ", ".join(str(part) for part in place) or "the file"


def read_file(path: Path) -> list[Case]:
    """The cases of one file. Raises VectorError."""
    try:
        content = checked_content(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise VectorError(f"{path}: {error.strerror or error}") from None
    return [Case(case, content.get("shared", {})) for case in content["cases"]]


@lru_cache(maxsize=64)
def checked_content(path: Path, written: int) -> dict[str, Any]:
    """Checking takes longer than running: a file as it was is not checked again. Raises VectorError, OSError."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise VectorError(f"{path}: not JSON: {error}") from None
    check(content, str(path))
    return content


def read_files(paths: Sequence[Path]) -> tuple[list[Case], list[str]]:
    """The cases of all files that can be used, in order, and one line for each that cannot."""
    cases, problems = [], []
    for path in paths:
        try:
            cases += read_file(path)
        except VectorError as error:
            problems.append(str(error))
    return cases, problems


def files_in() -> list[Path]:
    return [path for path in sorted(FOLDER.glob("*.json")) if path.name != "schema.json"]


def encoded(value: Any) -> Any:
    """A value as vector files write it: arrays by the words of their elements, everything else as JSON has it."""
    if isinstance(value, np.ndarray):
        return encoded_array(value)
    if isinstance(value, Mapping):
        return {name: encoded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def encoded_array(array: np.ndarray) -> dict[str, Any]:
    shape, flat = list(array.shape), np.ascontiguousarray(array).ravel()
    if array.dtype == np.int64:
        return {"shape": shape, "int64": flat.tolist()}
    words = flat.view(f"u{array.dtype.itemsize}").tolist()
    return {"shape": shape, DTYPES[array.dtype.name]: [f"{word:0{2 * array.dtype.itemsize}x}" for word in words]}


def write_case(folder: Path, case: Mapping[str, Any]) -> Path:
    """A file of one case, named by what it fails and what it holds; the same failure has the same name."""
    text = json.dumps({"chapter": "failure", "version": VERSION, "cases": [case]}, indent=1)
    check(json.loads(text), case["id"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case['id'].partition('/')[2]}.json"
    path.write_text(text + "\n", "utf-8")
    return path


def digest_of(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
