"""The traces of failed calls find executors that count calls or uses otherwise."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import conformance
from conformance.replay import replay
from conformance.report import Recorder
from conformance.residency_model import model_of
from conformance.vector_files import FOLDER, read_file
from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import Routing
from edge0_ref.errors import ReadError
from edge0_ref.executors.exact import ExactExecutor
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


class CountsWhatFailed(ExactExecutor):
    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        try:
            return super().__call__(x, routing)
        except ReadError:
            self.counters.reads += 1
            raise


@pytest.mark.spec("EXE-015")
def test_a_failed_call_that_counts_otherwise_is_blamed_on_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge0_ref.executors.ExactExecutor", CountsWhatFailed)
    report = conformance.run(ReferenceBackend(), ["EXE-015"], "no-shrink")
    told = [message for _, message in report.recorder.failures]
    assert told
    assert all(message.startswith("EXE-015 state, spec/06-executors.md") for message in told)
    assert any("reads counted by call(" in message for message in told)


@pytest.mark.spec("EXE-016", "EXE-040")
@pytest.mark.parametrize("needed", [[1, 4], [4, 1]])
def test_which_of_two_reads_fails_a_whole_layer_is_nobodys_promise(needed: list[int]) -> None:
    model = model_of("whole_layer", 1, 6)
    step = model.call(needed, {1, 4})
    assert (sorted(step.doomed), step.certain, model.resident) == ([1, 4], [], set())
    assert model.call(needed, {4}).certain == [4]
