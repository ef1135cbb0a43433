"""How the command starts, and how it ends when Ctrl-C comes before it has."""

import subprocess
import sys

import pytest

from tests.app.command import ROOT

INTERRUPTED = """
import sys
from edge0_ref.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.spec("ENG-065")
@pytest.mark.parametrize("module", ["edge0_ref.app.cli", "edge0_ref.app.text_commands", "numpy", "typer"])
def test_ctrl_c_during_an_import_is_quiet(module) -> None:
    done = run("-c", INTERRUPTED.format(module=module))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.spec("ENG-065")
def test_the_package_is_the_command() -> None:
    assert "generate" in run("-m", "edge0_ref").stdout
    refused = run("-m", "edge0_ref", "dance")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("edge0: error: ")
