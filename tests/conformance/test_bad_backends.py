"""Backends that are hardly backends: each is a line that says what and where, and nobody else is hurt."""

import json
import re
from pathlib import Path

import pytest

import conformance
from conformance.__main__ import main, parser
from conformance.replay import replay
from conformance.report import Recorder
from conformance.vector_files import FOLDER as VECTORS
from conformance.vector_files import read_file
from edge0_ref.backend import ReferenceBackend
from tests.conformance import backends

FOLDER = Path(__file__).parent
HERE = "tests.conformance.backends"


@pytest.mark.spec("BCK-008", "BCK-034")
@pytest.mark.parametrize(
    ("name", "what"),
    {
        "nobody": "no backend 'nobody'; installed:",
        "no_such_module:create": "ModuleNotFoundError",
        f"{HERE}:no_such_factory": "AttributeError",
        f"{HERE}:failing_factory": "OSError: libcuda.so is not here",
        f"{HERE}:exiting_factory": "SystemExit: 3",
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
        (backends.Exiting, "SystemExit: no device; it came from"),
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
@pytest.mark.parametrize(
    ("backend", "requirement", "got", "wanted"),
    [
        (backends.Routeless, "RTR-021", "NoneType", "Routing"),
        (backends.Unquantized, "DEQ-020", "NoneType", "QuantizedMatrix"),
        (backends.Nested, "EXE-018", "[[1]]", "a set of integers"),
        (backends.Spelled, "EXE-015", "hits is '3'", "numbers from 0 up"),
    ],
)
def test_what_is_no_result_is_told_beside_what_was_wanted(
    backend: type[ReferenceBackend], requirement: str, got: str, wanted: str
) -> None:
    report = conformance.run(backend(), [requirement])
    messages = [message for _, message in report.recorder.failures]
    assert messages
    assert [m for m in messages if not re.search(rf"  got     {re.escape(got)}\n  wanted  {wanted}\n", m)] == []


@pytest.mark.spec("BCK-034")
def test_a_call_that_does_not_come_back_fails_its_test_and_the_next_one_runs() -> None:
    report = conformance.run(backends.Hanging(), ["DEQ-006", "RTR-021"], seconds=2)
    assert (report.status("DEQ-006"), report.status("RTR-021")) == ("FAIL", "passed")
    assert report.recorder.outcomes["DEQ-006"]["passed"] > 0
    for test, message in report.recorder.failures:
        assert f"{test}: dequantize did not come back within 2 s; it was in dequantize, " in message


@pytest.mark.spec("DEQ-002")
def test_weights_that_are_flushed_to_zero_are_found_whatever_is_drawn() -> None:
    files = [case for case in read_file(VECTORS / "dequant.json") if "subnormal" in case.id]
    recorder = Recorder()
    replay(backends.FlushesWeights(), files, "again", recorder)
    assert len(files) == 3
    assert recorder.outcomes["DEQ-002"] == {"FAIL": 3}


@pytest.mark.spec("NUM-005")
@pytest.mark.parametrize("seed", [None, 1])
def test_sums_that_are_flushed_to_zero_are_within_their_bounds(seed: int | None) -> None:
    report = conformance.run(backends.FlushesSums(), ["NUM-005", "LOR-001", "PRE-001", "RTR-011"], seed=seed)
    assert report.recorder.failures == []
    assert report.status("NUM-005") == "passed"


@pytest.mark.spec("BCK-034")
def test_what_ends_a_process_is_a_failure_that_is_kept(tmp_path: Path) -> None:
    """Keeping a failure makes the call again."""
    report = conformance.run(backends.Exiting(), ["DEQ-006", "RTR-021"], failures=tmp_path)
    assert (report.status("DEQ-006"), report.status("RTR-021")) == ("FAIL", "passed")
    kept = [str(path) for path in tmp_path.iterdir()]
    assert kept
    assert main(["--backend", f"{HERE}:Exiting", "--replay", *kept]) == 1


@pytest.mark.spec("BCK-034")
def test_what_fails_now_and_then_is_told_in_its_own_words() -> None:
    report = conformance.run(backends.Sometimes(), ["DEQ-002"])
    messages = [message for _, message in report.recorder.failures]
    assert messages
    assert all("got     ZeroDivisionError: a kernel that was not there; it came from" in m for m in messages)
    assert any("not every time" in m for m in messages)


@pytest.mark.spec("BCK-030")
def test_an_interrupted_run_tells_what_was_judged_by_then(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written, drawn = tmp_path / "out.json", tmp_path / "out.html"
    paths = ["--report", str(written), "--html", str(drawn)]
    assert main(["--backend", f"{HERE}:Interrupted", "--only", "DEQ-006,RTR-021", *paths]) == 130
    assert json.loads(written.read_text("utf-8"))["verdict"] == "interrupted"
    assert "interrupted" in drawn.read_text("utf-8").partition('class="verdict"')[2].partition("</p>")[0]
    told = capsys.readouterr()
    assert "DEQ-006  either  passed" in told.out
    assert re.search(r"RTR-021 +\w+ +not run", told.out)
    assert "interrupted" in told.out
    assert "Traceback" not in told.out + told.err


@pytest.mark.spec("BCK-030", "BCK-033")
def test_a_replay_is_interrupted_in_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(VECTORS / f"{name}.json") for name in ("dequant", "router")]
    assert main(["--backend", f"{HERE}:Interrupted", "--replay", *files]) == 130
    assert "interrupted" in capsys.readouterr().out


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
        (["--only", ","], "--only ','"),
        (["--only", ""], "names no requirement"),
        (["--timeout", "0"], "--timeout 0"),
        (["--timeout", "nan"], "--timeout nan"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--timeout", "1e300"], "--timeout 1e+300"),
        (["--report", str(FOLDER)], "is a folder, wanted a file"),
        (["--html", str(FOLDER)], "is a folder, wanted a file"),
        (["--failures", __file__], "is no folder, wanted a folder"),
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


@pytest.mark.spec("BCK-030")
def test_help_shows_the_profiles_that_can_be_chosen() -> None:
    told = " ".join(parser().format_help().split())
    assert "40 in ci, 2000 in deep" in told
    assert "no-shrink" not in told
