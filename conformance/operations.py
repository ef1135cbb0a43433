"""The operations that vectors name: what each is given and gives, read from the tables of spec/README.md."""

import re
from dataclasses import dataclass
from functools import cache

from conformance.requirements import SPEC

ROW = re.compile(r"^\| (\w+) \| [^|]+ \| ([^|]*`[^|]*) \| ([^|]+) \|$", re.MULTILINE)
PARTS = re.compile(r"\{[^}]*\}")  # of a value, and of whoever says more about it
ASIDE = re.compile(r"\([^)]*\)")
OPTIONAL = re.compile(r"`\w+` \(may be absent\)")
NAME = re.compile(r"`(\w+)`")


@dataclass(frozen=True)
class Operation:
    """inputs: without those that may be absent."""

    inputs: frozenset[str]
    outputs: frozenset[str]


def names_in(cell: str) -> frozenset[str]:
    """The values that a cell names, without their parts.

    >>> sorted(names_in("`x` float32 [n], `lora` {`down`, `up`} (may be absent), `routing` (a list of {`experts`})"))
    ['routing', 'x']
    """
    whole = re.sub(" +", " ", PARTS.sub("", cell))
    return frozenset(NAME.findall(ASIDE.sub("", OPTIONAL.sub("", whole))))


@cache
def read_operations() -> dict[str, Operation]:
    """By name, in the order of the tables."""
    _, _, tables = (SPEC / "README.md").read_text("utf-8").partition("### Operations")
    return {name: Operation(names_in(inputs), names_in(outputs)) for name, inputs, outputs in ROW.findall(tables)}
