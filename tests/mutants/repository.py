"""The second court: this repository's own tests that cite a requirement, run against a mutant."""

import os
import sys
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = "-x -p no:cacheprovider -p no:benchmark -p no:terminal -W error --strict-markers --assert=plain"
NOT_ASKED = {"test_conformance_catches_mutants.py", "test_spec_coverage.py", "mlx", "benchmarks"}
STARTERS = {"edge0", "refused", "start", "subprocess"}  # what a test calls to start a process


def starts_a_process(item: pytest.Item) -> bool:
    """Whether a test, or a function of its own file that it calls, starts one."""
    assert isinstance(item, pytest.Function)
    called = set(item.function.__code__.co_names)
    here = [value for name in called if isinstance(value := vars(item.module).get(name), FunctionType)]
    return bool(STARTERS & called.union(*(helper.__code__.co_names for helper in here)))


class Citing:
    """A pytest plugin: only the tests that cite a requirement, and how they failed."""

    def __init__(self, requirement: str) -> None:
        self.requirement = requirement
        self.failures: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "spec(*ids): the requirements of spec/ that a test holds")
        config.option.tbstyle = "native"  # quick to write

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        citing = [item for item in items if any(self.requirement in mark.args for mark in item.iter_markers("spec"))]
        items[:] = sorted(citing, key=starts_a_process)  # the quick ones first

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[object]) -> None:
        assert call.excinfo is not None
        where = call.excinfo.traceback[-1]
        says = call.excinfo.exconly().splitlines()[0]
        self.failures.append(f"{node.name}: {Path(where.path).name}:{where.lineno + 1}: {says}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise RuntimeError(f"{report.nodeid} cannot be imported: {report.longreprtext}")


def failures_in_tests(requirement: str) -> list[str]:
    """The first failure among the tests that cite a requirement, or none."""
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if not NOT_ASKED & set(path.parts)]
    paths = [path for path in paths if not path.name.startswith("test_mlx_")]  # not every machine has MLX
    citing = [str(path) for path in paths if f'"{requirement}"' in path.read_text("utf-8")]
    if not citing:
        return []
    court = Citing(requirement)
    options = [*OPTIONS.split(), "-c", os.devnull, "--rootdir", str(ROOT), "--hypothesis-profile", "no-shrink"]
    code = pytest.main([*citing, *options], plugins=[court])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"the tests of {requirement} did not run: pytest ended with {code!r}")
    return court.failures


def broken_command(patch: pytest.MonkeyPatch, mutant: str) -> None:
    """Commands that tests start are broken too: they run `tests.mutants.broken`, which breaks itself first."""
    import tests.app.command
    import tests.test_conformance_reports

    broken = [sys.executable, "-m", "tests.mutants.broken", mutant]
    patch.setattr(tests.app.command, "EDGE0", [*broken, "edge0_ref.app.cli"])
    patch.setattr(tests.test_conformance_reports, "CONFORMANCE", [*broken, "conformance.__main__"])
