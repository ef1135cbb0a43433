"""The traces of failed calls find executors that count calls or uses otherwise."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from conformance.replay import replay
from conformance.report import Recorder
from conformance.vector_files import FOLDER, read_file
from edge0_ref.backend import ReferenceBackend
from edge0_ref.executors.staged import StagedExecutor
from edge0_ref.residency import SlotTable


def clock_stops_at_an_error(patch: pytest.MonkeyPatch) -> None:
    original = SlotTable.finish_call

    def finish_call(table: SlotTable) -> None:
        if sys.exc_info()[0] is None:
            original(table)

    patch.setattr(SlotTable, "finish_call", finish_call)


def a_failed_read_is_a_use(patch: pytest.MonkeyPatch) -> None:
    original = StagedExecutor._wait

    def wait(executor: StagedExecutor, expert: int) -> int:
        executor._table.last_use[expert] = executor._table.clock
        return original(executor, expert)

    patch.setattr(StagedExecutor, "_wait", wait)


def failed_traces(requirement: str) -> list[str]:
    recorder = Recorder()
    cases: list[Any] = [case for case in read_file(FOLDER / "residency.json") if requirement in case.requirements]
    replay(ReferenceBackend(), cases, "again", recorder)
    return [name for name, _ in recorder.failures]


@pytest.mark.spec("EXE-023", "EXE-024")
@pytest.mark.parametrize(
    ("mutant", "requirement", "trace"),
    [
        (clock_stops_at_an_error, "EXE-024", "residency/staged-clock-after-failure"),
        (a_failed_read_is_a_use, "EXE-023", "residency/staged-failed-is-not-used"),
    ],
)
def test_a_trace_of_a_failed_call_finds_who_counts_otherwise(
    mutant: Callable[[pytest.MonkeyPatch], None], requirement: str, trace: str
) -> None:
    assert failed_traces(requirement) == []
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        assert f"{trace} on staged" in failed_traces(requirement)
