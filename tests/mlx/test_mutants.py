"""The suite on trial again: mutants of the MLX backend die, in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mlx.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def verdicts() -> dict[str, bool]:
    run = subprocess.run([sys.executable, "-m", "tests.mlx.mutants"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line["killed"] for line in lines}


@pytest.mark.parametrize("name", [mutant.__name__ for mutant in MUTANTS])
def test_a_mutant_is_killed(verdicts: dict[str, bool], name: str) -> None:
    assert verdicts.get(name), f"nothing of {next(j for m, j in MUTANTS.items() if m.__name__ == name)} fails"
