"""Examples that a reader copies run, and print what they say: docstrings, the guided reading, the README."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edge0_ref

ROOT = Path(__file__).parents[1]
MODULES = sorted(module.name for module in pkgutil.walk_packages(edge0_ref.__path__, "edge0_ref."))
MODULES += ["conformance.operations", "conformance.requirements"]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_docstrings_of_compiled_functions_are_found() -> None:
    """Numba wraps functions: a finder that does not look through would run nothing."""
    assert doctest.testmod(importlib.import_module("edge0_ref.kernels")).attempted > 0


def test_the_guided_reading_runs() -> None:
    with np.printoptions():  # the reading sets its own, which must not outlive it
        results = doctest.testfile(str(ROOT / "edge0_ref" / "README.md"), module_relative=False)
    assert results.attempted > 80
    assert results.failed == 0


def test_every_breakpoint_of_the_guided_reading_can_be_set() -> None:
    """In the way of its command: a module is imported, and stopped at where a function of it begins."""
    text = (ROOT / "edge0_ref" / "README.md").read_text("utf-8")
    (line,) = re.findall(r"python -m pdb (.*)", text)
    command = shlex.split(line)
    assert command[:4] == ["-c", "import edge0_ref.router", "-c", "break edge0_ref.router.top_k"]
    told = re.findall(r"^\*Breakpoint: (.*)", text, re.M)
    places = re.findall(r"`((edge0_ref(?:\.[a-z_]+)+?)\.(?:[A-Z]\w+\.)?\w+)`", " ".join(told))
    assert len(places) >= len(told) == 10
    breaks = [word for place, module in places for word in ("-c", f"import {module}", "-c", f"break {place}")]
    pdb = [sys.executable, "-m", "pdb", *breaks, "-c", "quit", *command[command.index("-m") :]]
    ran = subprocess.run(pdb, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ran.stdout.count("Breakpoint ") == len(places), ran.stdout


def test_the_api_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith(" 0\n")
