"""The suite as plain tests, for whoever wants pytest's own options."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def plain(backend: str, selected: str) -> subprocess.CompletedProcess[str]:
    options = ["--backend", backend, "-k", selected, "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "conformance", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("selected", ["router and softmax", "dequant"])
def test_a_right_backend_passes_as_it_does_in_a_run(selected: str) -> None:
    ran = plain("conformance.examples.minimal_backend:MinimalBackend", selected)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.spec("BCK-008")
def test_a_backend_that_cannot_be_had_is_told_in_one_line() -> None:
    ran = plain("no_such_module:create", "router")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = ran.stderr.strip().splitlines()
    assert "no_such_module:create: ModuleNotFoundError" in line
