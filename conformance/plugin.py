"""What a run knows, as a pytest plugin: which tests concern the backend, and what came out of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis.errors import Flaky

from conformance.compare import ConformanceError
from conformance.failures import Keeper
from conformance.report import Recorder
from conformance.requirements import Requirement
from conformance.watchdog import Hang
from conformance.watched import Limit, Memory, unlimited

PLUGIN = "conformance-run"
SOMETIMES = "  note    not every time: the same call did otherwise when it was made again"
MARKERS = (
    "spec(*ids): the requirements of spec/ that a test holds",
    "claim(*claims): what a backend must claim for this test to concern it",
)


@dataclass(eq=False)
class RunPlugin:
    """The pytest hooks that select by requirement and claim and record what comes out.

    keeper: writes failures into a folder, if they are to be kept; limit: how long a call of the backend may take;
    interrupted: somebody pressed Ctrl-C.
    """

    backend: Any
    requirements: dict[str, Requirement]
    only: frozenset[str] = frozenset()
    again: str = "python -m conformance"
    keeper: Keeper | None = None
    limit: Limit = unlimited
    recorder: Recorder = field(default_factory=Recorder)
    interrupted: bool = field(default=False, init=False)

    @property
    def memory(self) -> Memory:
        return self.keeper.memory if self.keeper else Memory()

    def pytest_configure(self, config: pytest.Config) -> None:
        for marker in MARKERS:
            config.addinivalue_line("markers", marker)
        if not config.pluginmanager.hasplugin("terminal"):
            config.option.tbstyle = "native"  # nobody reads pytest's own, which take longer to write than most tests

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left_out = [], []
        for item in items:
            ids = cited(item)
            if self.only and not self.only & set(ids):
                left_out.append(item)
            elif not claimed(item) <= self.backend.claims:
                self.recorder.outcome(ids, "unclaimed")
                left_out.append(item)
            else:
                kept.append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest interrupts itself where tests cannot be collected
        self.interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if report.failed:
            assert call.excinfo is not None
            ids = cited(item)
            message = self.message_of(ids, call.excinfo)
            kept = self.keeper.keep(item.nodeid, ids, cause_of(call.excinfo.value)) if self.keeper else ""
            self.recorder.failures.append((item.nodeid, f"{message}\n{kept}".rstrip()))
            self.recorder.outcome(ids or (item.nodeid,), "FAIL")
        elif report.when == "call" and report.passed:
            self.recorder.outcome(cited(item), "passed")
        if report.when == "call" and report.capstdout.strip():
            self.recorder.printed.append((item.nodeid, report.capstdout.strip().splitlines()[0]))
        return report

    def message_of(self, ids: tuple[str, ...], failure: pytest.ExceptionInfo[BaseException]) -> str:
        """A disagreement in its own words; of anything else what happened and where. Then Hypothesis's example."""
        error = cause_of(failure.value)
        notes = "\n".join(getattr(error, "__notes__", ()))
        if error is not failure.value:
            notes = f"{SOMETIMES}\n{notes}"
        if isinstance(error, ConformanceError) and error.requirement:
            return f"{error}\n{notes}".rstrip()
        happened = str(error)
        if not isinstance(error, ConformanceError | Hang):
            trace = pytest.ExceptionInfo.from_exception(error).traceback
            way = [f"{e.path}:{e.lineno + 1} {e.name}" for e in trace if "site-packages" not in str(e.path)]
            happened = f"{type(error).__name__}: {error}; it came from {way[-1] if way else 'nowhere'}"
        stated = self.requirements.get(ids[0]) if ids else None
        head = f"{stated.id} {stated.exactness}, {stated.place}" if stated else "no requirement"
        only = f" --only {stated.id}" if stated else ""
        return f"{head}: no result\n  got     {happened}\n  again   {self.again}{only}\n{notes}".rstrip()


def cause_of(error: BaseException) -> BaseException:
    """What happened first, where Hypothesis says only that it did not happen twice."""
    while isinstance(error, Flaky):
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def cited(item: pytest.Item) -> tuple[str, ...]:
    """Every requirement a test cites."""
    return tuple(dict.fromkeys(id_ for mark in item.iter_markers("spec") for id_ in mark.args))


def claimed(item: pytest.Item) -> set[str]:
    return {claim for mark in item.iter_markers("claim") for claim in mark.args}
