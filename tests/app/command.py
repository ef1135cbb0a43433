"""Running the command `edge0` as its users do: another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge0_ref.app.cli import run

EDGE0 = [sys.executable, "-m", "edge0_ref.app.cli"]
ROOT = Path(__file__).parents[2]


def start(*arguments: object, **pipes: object) -> subprocess.Popen[str]:
    """The running command; stdout and stderr are pipes unless told otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    command = [*EDGE0, *map(str, arguments)]
    return subprocess.Popen(command, text=True, env=os.environ | {"COLUMNS": "200"}, cwd=ROOT, **pipes)


def edge0(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The finished command."""
    with start(*arguments) as process:
        stdout, stderr = process.communicate(timeout=120)
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
