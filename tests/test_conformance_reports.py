"""What a backend's author sees: the example of the suite's README, and how a run ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFORMANCE = [sys.executable, "-m", "conformance"]
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "conformance/README.md").read_text("utf-8"), re.DOTALL)


def conformance_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*CONFORMANCE, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True
    )


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the README's backend."""
    assert EXAMPLE is not None
    (tmp_path / "my_backend.py").write_text(EXAMPLE[1], "utf-8")
    return tmp_path


@pytest.mark.spec("BCK-002", "BCK-003")
def test_the_readmes_backend_is_green_where_it_is_done_and_fails_where_it_is_not(example: Path) -> None:
    told = example / "report.json"
    run = conformance_of(example, "--backend", "my_backend:MyBackend", "--report", str(told))
    status = {row["id"]: row["status"] for row in json.loads(told.read_text("utf-8"))["requirements"]}
    assert run.returncode == 1
    assert {status[id_] for id_ in ("DEQ-002", "DEQ-003", "DEQ-005", "DEQ-006", "RTR-010", "RTR-011")} == {"passed"}
    assert {status[id_] for id_ in ("RTR-003", "RTR-021", "RTR-023", "RTR-024")} == {"FAIL"}
    assert {status[id_] for id_ in ("DEQ-010", "LOR-001", "EXE-003", "DEC-042", "PRE-001", "NUM-002")} == {"unclaimed"}
    assert "the sigmoid family comes tomorrow" in run.stdout


@pytest.mark.spec("BCK-002")
def test_a_backend_that_claims_less_is_green(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--option-of-another-suite")
    source = (example / "my_backend.py").read_text("utf-8")
    (example / "my_backend.py").write_text(source.replace('{"dequant", "router"}', '{"dequant"}'), "utf-8")
    run = conformance_of(example, "--backend", "my_backend:MyBackend", "--only", "DEQ-002,DEQ-003,RTR-003")
    assert run.returncode == 0, run.stdout
    assert re.search(r"^RTR-003 +choice +unclaimed", run.stdout, re.MULTILINE)


@pytest.mark.spec("BCK-008")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--backend", "nobody"], "reference"),
        (["--backend", "my_backend:Missing"], "Missing"),
        (["--backend", "no_such_module:create"], "no_such_module"),
        (["--backend", "reference", "--only", "XYZ-001"], "XYZ-001"),
        (["--backend", "reference", "--report", "no-such-folder/report.json"], "no-such-folder"),
    ],
)
def test_a_run_that_cannot_be_made_says_why_and_ends_with_2(example: Path, arguments: list[str], named: str) -> None:
    run = conformance_of(example, *arguments)
    assert run.returncode == 2
    assert named in run.stderr
    assert "Traceback" not in run.stderr
