"""The prose of spec/ is the only list of requirements: what cites it, and what it leaves without a check."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import filter as matching
from pathlib import Path
from pkgutil import resolve_name

import pytest

from conformance.vector_files import check
from edge0_ref.contract import Plan
from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "spec").glob("[0-9]*.md"))
VECTORS = [path for path in sorted((ROOT / "spec" / "vectors").glob("*.json")) if path.name != "schema.json"]
REQUIREMENT = re.compile(r"\*\*\[([A-Z]{3}-\d{3})\] (\w+)\.\*\* ")
CITATION = re.compile(r"\b(?:NUM|DEQ|RTR|EXE|STO|PRE|LOR|DEC|ENG|BCK|TRN)-\d{3}\b")
CLASSES = {"bits", "either", "choice", "bound", "state", "error"}


def paragraphs(text: str) -> list[str]:
    return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def headings() -> Iterator[tuple[str, str, str, str]]:
    """(id, class, chapter, paragraph) of every requirement, in order."""
    for chapter in CHAPTERS:
        for paragraph in paragraphs(chapter.read_text("utf-8")):
            if found := REQUIREMENT.match(paragraph):
                yield found[1], found[2], chapter.stem, paragraph


IDS = [requirement for requirement, _, _, _ in headings()]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]


def spec_marks(path: Path) -> set[str]:
    """Ids in `pytest.mark.spec("...", ...)`, as decorators or in `pytestmark`."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    marks = (call for call in calls if ast.unparse(call.func).endswith("mark.spec"))
    return {arg.value for mark in marks for arg in mark.args if isinstance(arg, ast.Constant)}


def vector_cases() -> list[dict[str, list[str]]]:
    return [case for path in VECTORS for case in json.loads(path.read_text("utf-8"))["cases"]]


def vector_citations() -> set[str]:
    return {name for case in vector_cases() for name in case["requirements"]}


def test_the_chapters_are_there_and_hold_requirements() -> None:
    assert [chapter.name[:2] for chapter in CHAPTERS] == [f"{number:02}" for number in range(1, 13)]
    assert {chapter for _, _, chapter, _ in headings()} == {chapter.stem for chapter in CHAPTERS}


def test_no_id_is_used_twice() -> None:
    assert sorted(IDS) == sorted(set(IDS))


def test_every_requirement_has_a_class_and_a_must() -> None:
    broken = [(name, kind) for name, kind, _, text in headings() if kind not in CLASSES or "MUST" not in text]
    assert not broken


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_must_stands_in_requirements_only(chapter: Path) -> None:
    prose = [p for p in paragraphs(chapter.read_text("utf-8")) if not REQUIREMENT.match(p)]
    assert not [p for p in prose if re.search(r"\b(MUST|SHALL|SHOULD)\b", p)]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_ends_with_what_it_does_not_specify(chapter: Path) -> None:
    sections = re.findall(r"^## (.+)$", chapter.read_text("utf-8"), re.MULTILINE)
    assert sections
    assert sections[-1] == "Not specified"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_ids_named_in_prose_exist(chapter: Path) -> None:
    assert set(CITATION.findall(chapter.read_text("utf-8"))) <= set(IDS)


def test_ids_cited_in_code_exist() -> None:
    unknown = {
        (str(path.relative_to(ROOT)), name)
        for path in python_files("edge0_ref", "edge0_mlx", "conformance", "tests")
        for name in [*CITATION.findall(path.read_text("utf-8")), *spec_marks(path)]
        if name not in IDS
    }
    assert not unknown


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_names_of_the_reference_exist(chapter: Path) -> None:
    """`router.top_k`, below `edge0_ref`, or the path of a file."""
    named = re.findall(r"\*Reference\.\*(.*?)(?=\*Vectors|\n\n|\Z)", chapter.read_text("utf-8"), re.DOTALL)
    for name in re.findall(r"`([\w./]+)`", " ".join(named)):
        assert (ROOT / name).exists() or resolve_name(f"edge0_ref.{name}")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_vectors_named_in_prose_exist(chapter: Path) -> None:
    """`router/softmax-*`: at least one such case; `router`: a file of them."""
    known = [path.stem for path in VECTORS] + [str(case["id"]) for case in vector_cases()]
    named = re.findall(r"\*Vectors\.\*([^.]*)\.", chapter.read_text("utf-8"))
    assert not [name for names in named for name in re.split(r",\s+", names.strip()) if not matching(known, name)]


def test_the_fields_of_a_plan_are_told() -> None:
    """A program gets them by name, as fields of a request."""
    table = (ROOT / "spec" / "11-backend.md").read_text("utf-8").partition("A plan has")[2].partition("\n**")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(field.name for field in fields(Plan))


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vectors_obey_their_schema(path: Path) -> None:
    content = json.loads(path.read_text("utf-8"))
    check(content, path.name)
    assert content["chapter"] == path.stem


def test_vectors_are_there_and_no_two_share_an_id() -> None:
    names = [str(case["id"]) for case in vector_cases()]
    assert len(names) >= 400
    assert sorted(names) == sorted(set(names))


def test_ids_cited_in_vectors_exist() -> None:
    assert vector_citations() <= set(IDS)


def test_every_requirement_is_held_by_a_test_or_a_vector() -> None:
    held = vector_citations().union(*(spec_marks(path) for path in python_files("tests", "conformance")))
    assert not [name for name in IDS if name not in held]


def test_every_requirement_has_a_mutant() -> None:
    """That its own tests kill it is for test_conformance_catches_mutants to show."""
    broken = set(MUTANTS.values())
    assert broken <= set(IDS)
    assert not [name for name in IDS if name not in broken]
