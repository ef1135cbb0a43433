"""Backends that are programs: the examples pass, and what a program does wrong is told in one line."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conformance
from conformance.__main__ import main
from conformance.cases import ExpertsRecipe, MatrixRecipe
from conformance.framing import FramingError, Message, announced, tensors_in
from conformance.process import ProgramError
from conformance.program import Program
from conformance.recording_store import RecordingStore
from conformance.watchdog import Hang, Watchdog
from edge0_ref.contract import Routing, SoftmaxTopK
from edge0_ref.errors import BackendError, ShapeError

EXAMPLES = Path(conformance.__file__).parent / "examples"
SERVED = f"{sys.executable} -m conformance.serve --backend"
MATRIX = MatrixRecipe(1, 32).build()
PROGRAM_REQUIREMENTS = ("BCK-020", "BCK-021", "BCK-022", "BCK-023", "BCK-025")


@contextmanager
def running(command: str, seconds: float = 60.0) -> Iterator[Program]:
    program = Program(command, seconds)
    try:
        yield program
    finally:
        program.close()


def broken(how: str) -> str:
    return f"{sys.executable} {Path(__file__).parent / 'broken_program.py'} {how}"


@pytest.mark.spec("BCK-020", "BCK-021", "BCK-022", "BCK-023", "BCK-025")
def test_the_example_in_c_passes_everything_it_claims(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    program = tmp_path / "backend"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    subprocess.run([compiler, *flags, str(EXAMPLES / "backend.c"), "-lm"], check=True)
    with running(str(program)) as backend:
        report = conformance.run(backend)
    assert report.recorder.failures == []
    for id_ in ("DEQ-002", "DEQ-003", "RTR-002", "RTR-003", "RTR-011", "RTR-023", "RTR-024", *PROGRAM_REQUIREMENTS):
        assert report.status(id_) == "passed"
    assert report.status("LOR-001") == "unclaimed"


@pytest.mark.spec("BCK-001")
def test_the_example_in_python_passes_everything_it_claims(tmp_path: Path) -> None:
    name = "conformance.examples.minimal_backend:MinimalBackend"
    assert main(["--backend", name, "--failures", str(tmp_path)]) == 0


@pytest.mark.spec("BCK-020", "BCK-021", "BCK-026", "BCK-027")
def test_the_protocol_carries_executors_and_decoders(unchecked: None) -> None:
    with running(f"{SERVED} reference") as backend:
        report = conformance.run(
            backend, ["EXE-013", "EXE-016", "DEC-045", "PRE-023", "DEQ-020", "LOR-001"], "no-shrink"
        )
    assert report.recorder.failures == []
    assert {report.status(id_) for id_ in ("EXE-013", "EXE-016", "DEC-045", "PRE-023", "DEQ-020")} == {"passed"}


WRONG = {
    "crash": "killed by SIGSEGV before it replied",
    "exit": "ended with exit status 3 before it replied; its last words: no more memory on the device",
    "print": "a line that is not JSON: 'loading shaders'",
    "name": "lacks the tensor 'weights'; there: w",
    "length": "tensor weights",
    "dtype": "tensor weights",
    "blob": "no safetensors file",
    "bytes": "bytes: got -1",
    "kind": "an error of no kind that the spec lists",
}


@pytest.mark.spec("BCK-024")
@pytest.mark.parametrize("how", WRONG)
def test_what_a_program_does_wrong_is_one_line_and_it_is_started_again(how: str) -> None:
    command = broken(how)
    with running(command) as program:
        for _ in range(2):
            with pytest.raises(ProgramError) as caught:
                program.dequantize(MATRIX)
            assert len(str(caught.value).splitlines()) == 1
            assert str(caught.value).startswith(f"{command}: dequantize: ")
            assert WRONG[how] in str(caught.value)
            with pytest.raises(BackendError, match="not here"):
                program.route(np.zeros((1, 2), np.float32), SoftmaxTopK(1))


@pytest.mark.spec("BCK-024")
@pytest.mark.parametrize(
    ("how", "what"),
    {
        "resident": "resident is [[1]], wanted integers",
        "counters": "counters: hits is '3', wanted numbers from 0 up",
        "silence": "counters lack bytes_read, read_ahead",
        "less": "counters: reads is -1, wanted numbers from 0 up",
    }.items(),
)
def test_a_state_that_is_none_is_told_as_what_the_program_wrote(how: str, what: str) -> None:
    command = broken(how)
    with running(command) as program:
        with pytest.raises(ProgramError) as caught:
            program.executor("exact", RecordingStore(ExpertsRecipe(2)), 1)
        assert str(caught.value) == f"{command}: executor_open: {what}"


@pytest.mark.spec("BCK-024", "BCK-020")
def test_a_reply_that_nobody_asked_for_is_found_at_the_next_request() -> None:
    with running(broken("twice")) as program:
        with pytest.raises(ShapeError, match="one"):
            program.dequantize(MATRIX)
        with pytest.raises((ProgramError, ShapeError), match=r"without being asked|two"):
            program.route(np.zeros((1, 2), np.float32), SoftmaxTopK(1))


@pytest.mark.spec("BCK-024")
def test_a_program_that_hangs_fails_its_tests_and_the_others_run() -> None:
    with running(broken("hang"), 1.0) as program:
        with pytest.raises(Hang, match=r"dequantize: no reply within 1 s"):
            program.dequantize(MATRIX)
        report = conformance.run(program, ["BCK-023", "NUM-004"], seconds=60)
    assert (report.status("NUM-004"), report.status("BCK-023")) == ("FAIL", "FAIL")
    told = dict(report.recorder.failures)
    assert [test for test in told if "unknown_operation" in test] == []
    assert any("no reply within 1 s" in message for message in told.values())


@pytest.mark.spec("BCK-024")
def test_a_program_that_hangs_once_is_started_again_whoever_stops_waiting_for_it() -> None:
    """The limit of a call is armed before the program's own, so that it is the one that strikes."""
    command = broken("hang")
    with running(command) as program, Watchdog(0.5, sys.stderr).watching() as watchdog:
        with pytest.raises(Hang, match=r"did not come back within 0\.5 s") as caught, watchdog.limited("a test"):
            program.dequantize(MATRIX)
        assert str(caught.value).startswith(f"{command}: dequantize: no reply: a test")
        assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(BackendError, match="not here"):
            program.route(np.zeros((1, 2), np.float32), SoftmaxTopK(1))


@pytest.mark.spec("BCK-024")
def test_an_exchange_that_is_left_half_way_ends_the_process() -> None:
    """What the store raises in the middle of a request is its caller's, and the program is started again."""

    class Leaving(RecordingStore):
        def read_into(self, expert: int, slot: np.ndarray) -> None:
            raise KeyboardInterrupt

    with running(f"{SERVED} reference") as program:
        executor = program.executor("exact", Leaving(ExpertsRecipe(2)), 1)
        routing = Routing(np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
        with pytest.raises(KeyboardInterrupt):
            executor(np.zeros((1, 32), np.float32), routing)
        assert not program.knows(executor._process)
        assert program.dequantize(MATRIX).shape == (1, 32)


@pytest.mark.spec("BCK-022", "BCK-008")
@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("/no/such/program", "cannot be started"),
        ("'unclosed", "cannot be started"),
        (broken("newer"), "speaks protocol 2, wanted 1"),
        (f"{sys.executable} -c 1", "ended with exit status 0 before it replied"),
    ],
)
def test_a_program_that_cannot_be_had_ends_the_run_in_one_line(
    command: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--exec", command]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert what in told


@pytest.mark.spec("BCK-024", "BCK-022")
def test_a_program_that_never_says_hello_is_told_within_the_time_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--exec", broken("silent"), "--timeout", "1"]) == 2
    assert "hello: no reply within 1 s" in capsys.readouterr().err


DTYPES = st.sampled_from(("float32", "float16", "uint16", "uint32", "int64", "uint8"))


@pytest.mark.spec("BCK-021")
@given(dtype=DTYPES, shape=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 99))
def test_a_message_arrives_as_it_was_sent(dtype: str, shape: list[int], seed: int) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    data = Message({"operation": "x", "scale": 0.1}, {"a": array, "b": np.zeros(0, dtype)}).encode()
    line, _, blob = data.partition(b"\n")
    fields, length = announced(line)
    assert (fields["scale"], length) == (0.1, len(blob))
    assert b" " not in line
    back = tensors_in(blob)
    assert (back["a"].tobytes(), back["a"].shape, back["a"].dtype) == (array.tobytes(), array.shape, array.dtype)


@pytest.mark.spec("BCK-020")
@given(data=st.binary(max_size=80), cut=st.integers(0, 60))
def test_bytes_that_are_no_message_are_refused_by_name(data: bytes, cut: int) -> None:
    whole = Message({}, {"a": np.arange(3, dtype=np.uint32)}).encode().partition(b"\n")[2]
    for blob in (data, whole[:cut], data + whole):
        assert len(refusal(blob).splitlines()) <= 1


def refusal(blob: bytes) -> str:
    """What is said of bytes that should have been a safetensors file; any other exception is the caller's."""
    try:
        tensors_in(blob)
    except FramingError as error:
        return str(error)
    return ""
