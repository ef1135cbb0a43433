"""Backends that are hardly backends: each is a line that says what and where, and nobody else is hurt."""

from pathlib import Path

import pytest

import conformance
from conformance.__main__ import main
from tests.conformance import backends

HERE = "tests.conformance.backends"


@pytest.mark.spec("BCK-008", "BCK-034")
@pytest.mark.parametrize(
    ("name", "what"),
    {
        "nobody": "no backend 'nobody'; installed:",
        "no_such_module:create": "ModuleNotFoundError",
        f"{HERE}:no_such_factory": "AttributeError",
        f"{HERE}:failing_factory": "OSError: libcuda.so is not here",
        f"{HERE}:hanging_factory": "did not come back within 1 s",
        f"{HERE}:Bare": "Bare has no name, claims, from_numpy, to_numpy",
        f"{HERE}:Listing": "claims: got ('dequant',), wanted a frozenset of str",
    }.items(),
)
def test_a_backend_that_cannot_be_made_ends_the_run_in_one_line(
    name: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--backend", name, "--timeout", "1"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert name in told.err
    assert what in told.err


@pytest.mark.spec("BCK-034")
@pytest.mark.parametrize(
    ("backend", "what"),
    [
        (backends.Wide, "(dtype('float64'), 2)"),
        (backends.Flat, "(dtype('float32'), 1)"),
        (backends.Spoilt, "nan"),
        (backends.Nothing, "NoneType"),
        (backends.Raising, "ZeroDivisionError: a kernel that was not there; it came from"),
    ],
)
def test_a_method_that_gives_no_result_fails_its_own_tests_only(backend: type[backends.Two], what: str) -> None:
    report = conformance.run(backend(), ["DEQ-006", "RTR-021"])
    assert report.exit_code == 1
    assert (report.status("DEQ-006"), report.status("RTR-021")) == ("FAIL", "passed")
    assert not [test for test, message in report.recorder.failures if "got" not in message or what not in message]
    assert all("DEQ-" in message and "spec/02-dequant.md" in message for _, message in report.recorder.failures)


@pytest.mark.spec("BCK-034")
def test_a_call_that_does_not_come_back_fails_its_test_and_the_next_one_runs() -> None:
    report = conformance.run(backends.Hanging(), ["DEQ-006", "RTR-021"], seconds=2)
    assert (report.status("DEQ-006"), report.status("RTR-021")) == ("FAIL", "passed")
    assert report.recorder.outcomes["DEQ-006"]["passed"] > 0
    for test, message in report.recorder.failures:
        assert f"{test}: dequantize did not come back within 2 s; it was in dequantize, " in message


@pytest.mark.spec("BCK-001")
def test_claims_that_are_unknown_or_lack_a_method_are_told_by_name() -> None:
    report = conformance.run(backends.Boasting(), ["BCK-001"])
    assert report.status("BCK-001") == "FAIL"
    assert "telepathy" in report.recorder.failures[0][1]


@pytest.mark.spec("BCK-030")
def test_what_a_backend_prints_is_told_and_is_no_part_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{HERE}:Chatting"
    assert main(["--backend", name, "--only", "DEQ-006", "--failures", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "loading shaders" in line]
    assert len(lines) == 1
    assert lines[0].startswith("the backend wrote to stdout in")


@pytest.mark.spec("BCK-030")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--only", "XYZ-001"], "XYZ-001"),
        (["--timeout", "0"], "--timeout 0"),
        (["--report", "/no/such/folder/out.json"], "no such folder"),
        (["--known-failures", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_command_line_that_cannot_be_carried_out_is_one_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--backend", f"{HERE}:Two", *arguments]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert what in told
