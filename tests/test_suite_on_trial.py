"""Subtle bugs in a copy of the reference: each is found within 200 examples, shrunk, kept, and comes back alone.

They are mutants like the others; here the whole way of a backend's author is gone.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import conformance
from conformance.runner import EXAMPLES
from edge0_ref.backend import create

ROOT = Path(__file__).parents[1]
BUGS = {
    "one_expert_sums_in_float16": "EXE-003",
    "a_sticky_slot_read_one_step_late": "EXE-020",
    "chosen_on_bfloat16": "RTR-010",
}


def conformance_of(bug: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The suite on the reference with a bug, or without."""
    module = ["tests.mutants.broken", bug, "conformance.__main__"] if bug else ["conformance"]
    command = [sys.executable, "-m", *module, "--backend", "reference", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.spec("BCK-032")
@pytest.mark.parametrize("bug", BUGS)
def test_a_subtle_bug_is_found_within_200_examples_and_what_is_kept_shows_it_again(tmp_path: Path, bug: str) -> None:
    assert 1.5 * EXAMPLES["ci"] <= 200  # no test of the suite draws more than that
    run = conformance_of(bug, "--only", BUGS[bug], "--failures", tmp_path)
    assert run.returncode == 1, run.stderr
    kept = sorted(tmp_path.glob("*.json"))
    assert kept, run.stdout
    assert f"--replay {kept[0]}" in run.stdout
    assert conformance_of(bug, "--replay", *kept).returncode == 1
    sound = conformance_of("", "--replay", *kept)
    assert sound.returncode == 0, sound.stdout


@pytest.mark.spec("BCK-003")
def test_the_suite_runs_where_signatures_are_checked_at_run_time() -> None:
    """Here they are: no vector of edge0's own functions may hand over anything that their signatures do not allow."""
    report = conformance.run(create(), ["ENG-012", "STO-001", "DEC-001", "DEC-020", "DEC-051", "DEC-053", "DEQ-004"])
    assert report.exit_code == 0, report.recorder.failures
