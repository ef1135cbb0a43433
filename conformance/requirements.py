"""The requirements of `spec/`, read from its prose: there is no second list of ids.

A requirement is a paragraph that starts with `**[RTR-003] choice.**`: its id, its exactness class, its text.
"""

import re
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("bits", "either", "choice", "bound", "state", "error")
SPEC = Path(__file__).resolve().parent.parent / "spec"
STATEMENT = re.compile(r"^\*\*\[([A-Z]{3}-\d{3})\]\s+([a-z]+)\.?\*\*\s*(.*?)(?:\n\n|\n?\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Requirement:
    """One numbered sentence of the spec. place: `spec/03-router.md:41`."""

    id: str
    exactness: str
    text: str
    place: str


def parse(chapter: str, markdown: str) -> list[Requirement]:
    """The requirements of one chapter, in order.

    >>> parse("03-router.md", "# Router\\n\\n**[RTR-003] choice.** The largest MUST be chosen.")
    [Requirement(id='RTR-003', exactness='choice', text='The largest MUST be chosen.', place='spec/03-router.md:3')]
    """
    found = []
    for match in STATEMENT.finditer(markdown):
        line = markdown.count("\n", 0, match.start()) + 1
        found.append(Requirement(match[1], match[2], " ".join(match[3].split()), f"spec/{chapter}:{line}"))
    return found


def read_requirements() -> dict[str, Requirement]:
    """By id, in the order of the chapters. Raises ValueError for an id stated twice."""
    requirements: dict[str, Requirement] = {}
    for chapter in sorted(SPEC.glob("[0-9][0-9]-*.md")):
        for requirement in parse(chapter.name, chapter.read_text("utf-8")):
            if requirement.id in requirements:
                raise ValueError(
                    f"{requirement.id} is stated in {requirements[requirement.id].place} and again in "
                    f"{requirement.place}"
                )
            if requirement.exactness not in CLASSES:
                raise ValueError(f"{requirement.place}: class {requirement.exactness!r}, wanted one of {CLASSES}")
            requirements[requirement.id] = requirement
    return requirements
