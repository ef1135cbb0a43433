"""The suite as whoever installed the package has it: with all that it reads, or a line that says what it lacks."""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from conformance.requirements import SPEC

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_suite_needs_and_lacks_is_said_in_one_line() -> None:
    hidden = "import runpy, sys; sys.modules['pytest'] = None; runpy.run_module('conformance', run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    told = "the conformance suite needs pytest: pip install 'edge0[test]'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", told)


def test_the_specification_and_its_vectors_are_installed_with_the_suite() -> None:
    """The suite looks for them beside itself: in a checkout, and among installed packages."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    for path in [*SPEC.glob("*.md"), *SPEC.glob("vectors/*.json")]:
        assert ".".join(path.parent.relative_to(ROOT).parts) in settings["packages"]["find"]["include"]
        inside = str(path.relative_to(SPEC))
        assert any(fnmatch(inside, pattern) for pattern in settings["package-data"]["spec"]), inside
