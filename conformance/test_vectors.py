"""Every case of spec/vectors, against the backend."""

from typing import Any

import pytest

from conformance.compare import Judge
from conformance.driven import Driven
from conformance.replay import hold
from conformance.vector_files import files_in, read_files
from conformance.vectors import Case
from edge0_ref.contract import EXECUTOR_KINDS

CASES, UNUSABLE = read_files(files_in())


def parameters() -> list[Any]:
    return [
        pytest.param(
            case, kind, id=f"{case.id}-{kind}".rstrip("-"),
            marks=[pytest.mark.spec(*case.requirements), pytest.mark.claim(*case.claims(kind))],
        )
        for case in CASES
        for kind in case.kinds(EXECUTOR_KINDS)
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "kind"), parameters())
def test_a_vector_gives_what_it_says(driven: Driven, judge: Judge, case: Case, kind: str) -> None:
    hold(driven, judge, case, kind)


@pytest.mark.spec("BCK-033")
def test_every_vector_file_can_be_used(judge: Judge) -> None:
    judge.state(UNUSABLE, [], "vector files left out")
