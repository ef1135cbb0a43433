"""What a model's folder says in JSON: objects held to types, errors that name the file, the field and the value."""

import json
import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, cast

from edge0_ref.errors import CheckpointError

LARGEST = 2**31 - 1  # of any size in a config: products of a few stay printable, nothing absurd is allocated


class Fields:
    """A JSON object whose fields are read with their type checked; errors name the file, the field and the value."""

    def __init__(self, values: dict[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def get(self, name: str, kind: type[Any], default: Any = ...) -> Any:
        """The field as `kind`; an int is accepted for float, a bool never for int, NaN and infinity never."""
        value = self.values.get(name, None)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.origin}: the field {name!r} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < LARGEST:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.origin}: {name} is {reprlib.repr(value)}, wanted {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{self.origin}: {name} is {value}, wanted a number")
        return value

    def positive(self, name: str, default: Any = ..., most: int = LARGEST) -> int:
        value = cast(int, self.get(name, int, default))
        if not 1 <= value <= most:
            raise CheckpointError(f"{self.origin}: {name} is {reprlib.repr(value)}, wanted 1 to {most}")
        return value

    def positive_float(self, name: str, default: float) -> float:
        value = cast(float, self.get(name, float, default))
        if value <= 0:
            raise CheckpointError(f"{self.origin}: {name} is {value}, wanted a number above 0")
        return value

    def section(self, name: str) -> "Fields":
        return Fields(self.get(name, dict), f"{self.origin}: {name}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError, naming the file, when it is missing or not an object."""
    return parse_object(read_file(path), str(path))


def read_file(path: Path) -> bytes:
    """All of a file. Raises CheckpointError, naming it; a pipe is not opened, where reading could wait for ever."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def is_there(path: Path) -> bool:
    """Whether a file that a model may lack is there, if only as a link to nothing, which its reader refuses."""
    return os.path.lexists(path)


def parse_object(text: bytes, origin: str) -> dict[str, Any]:
    """A JSON object in which no name occurs twice. Raises CheckpointError, naming `origin`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise CheckpointError(f"{origin}: the name {name!r} occurs twice")
            values[name] = value
        return values

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers or nesting beyond Python's limits
        raise CheckpointError(f"{origin}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: holds a {type(value).__name__}, wanted a JSON object")
    return value
