"""Running the command `edge0` as its users do: another process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.app.cli import run

EDGE0 = [sys.executable, "-m", "edge0_ref.app.cli"]
ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0  # kernels may have to be compiled first, on a busy machine


class Command(subprocess.Popen[str]):
    """Used by `with`, it is ended by a test that fails, which would else wait for it, maybe for ever."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def start(*arguments: object, **pipes: object) -> Command:
    """The running command; stdout and stderr are pipes unless told otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    command = [*EDGE0, *map(str, arguments)]
    return Command(command, text=True, env=os.environ | {"COLUMNS": "200"}, cwd=ROOT, **pipes)


def edge0(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The finished command."""
    with start(*arguments) as process:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def refused(*arguments: object) -> str:
    """The one line with which the command refuses; nothing on stdout, no traceback, exit code 2."""
    return refusal(edge0(*arguments))


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """That line of a finished command."""
    assert (done.returncode, done.stdout.strip()) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("edge0: error: ")
    return line


def edge0_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, for many short runs."""
    code = run([*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())
