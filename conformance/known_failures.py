"""[BCK-031] The failures that a backend knows of: a file of its own, one requirement a line, each with a reason.

# fp16 accumulators, until the next driver
RTR-011  weights are off by 3e-4 for more than 64 experts
"""

import re
from collections.abc import Mapping
from pathlib import Path

LINE = re.compile(r"([A-Z]{3}-\d{3})\s+(\S.*)")


class KnownFailuresError(ValueError):
    """A file that cannot be read as one: says which line."""


def read_known_failures(path: Path) -> dict[str, str]:
    """Requirement -> reason, in the order of the file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KnownFailuresError(f"{path}: {error}") from None
    known: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = LINE.fullmatch(line.strip())
        if found is None:
            raise KnownFailuresError(f"{path}:{number}: got {line.strip()!r}, wanted an id and a reason")
        if found[1] in known:
            raise KnownFailuresError(f"{path}:{number}: {found[1]} is listed twice")
        known[found[1]] = found[2]
    return known


def stale_entries(known: Mapping[str, str], status: Mapping[str, str]) -> list[str]:
    """One line for each entry that describes no failure of this run. status: of every requirement that was judged."""
    stale = []
    for id_ in known:
        match status.get(id_):
            case "FAIL":
                continue
            case None:
                stale.append(f"{id_} is a known failure, but spec/ has no such requirement")
            case "passed":
                stale.append(f"{id_} is a known failure, but it passed: take it off the list")
            case other:
                stale.append(f"{id_} is a known failure, but it is {other}: take it off the list")
    return stale
