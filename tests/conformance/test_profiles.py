"""Profiles of activations: what rounds to bfloat16 or float16 passes under its own bounds and fails under float32's."""

import pytest

import conformance
from tests.conformance.narrow_backend import bfloat16, bfloat16_unsaid, float16

OPERATIONS = ("DEQ-010", "NUM-011", "LOR-001", "EXE-003", "PRE-001", "DEC-010", "DEC-021", "DEC-042")


@pytest.mark.spec("NUM-011", "BCK-012")
@pytest.mark.parametrize("make", [bfloat16, float16])
def test_a_narrow_backend_passes_under_its_own_bounds(make) -> None:
    report = conformance.run(make(), [*OPERATIONS, "BCK-012"], profile="no-shrink")
    assert {id_: report.status(id_) for id_ in OPERATIONS} == dict.fromkeys(OPERATIONS, "passed")
    worst = max(figures.relative_l2 for (id_, _), figures in report.recorder.worst.items() if id_ == "EXE-003")
    assert 1e-4 < worst <= 0.01  # it does round, and stays inside the wall


@pytest.mark.spec("NUM-011", "NUM-005")
def test_the_same_backend_fails_where_float32_is_believed() -> None:
    report = conformance.run(bfloat16_unsaid(), OPERATIONS, profile="no-shrink")
    assert {id_: report.status(id_) for id_ in OPERATIONS} == dict.fromkeys(OPERATIONS, "FAIL")
