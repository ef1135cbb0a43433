"""The conformance suite on trial: each mutant of the reference is killed by the requirement it breaks.

Mutants run in processes of their own. Here signatures are checked at run time, and that check would kill some of them
before the suite has had its say.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
NAMES = [mutant.__name__ for mutant in MUTANTS]
Verdicts = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    """What became of the mutants this session asks about, half of them in each of two processes."""
    asked = [name for name in NAMES if any(item.name.endswith(f"[{name}]") for item in request.session.items)]
    halves = [half for half in (asked[::2], asked[1::2]) if half]
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.mutants", "--json", *half], cwd=ROOT, stdout=subprocess.PIPE)
        for half in halves
    ]
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    return {verdict["name"]: verdict for verdict in map(json.loads, lines)}


@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_killed_by_the_requirement_it_breaks(verdicts: Verdicts, name: str) -> None:
    assert name in verdicts, "its process ended before its turn"
    assert verdicts[name]["killed"], f"{verdicts[name]['requirement']}: {verdicts[name]['message']}"


@pytest.mark.spec("BCK-003")
def test_the_unbroken_reference_passes(tmp_path: Path) -> None:
    """The whole suite, as its users run it: of a mutant that dies where nothing lives one learns nothing."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "conformance", "--backend", "reference", "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert done.returncode == os.EX_OK
    statuses = [row["status"] for row in json.loads(report.read_text("utf-8"))["requirements"]]
    assert set(statuses) == {"passed", "not run", "unclaimed"}
    assert statuses.count("passed") > 100
