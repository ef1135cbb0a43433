"""How the command starts, and how it ends when Ctrl-C comes before it has."""

import os
import signal
import subprocess
import sys
import time

import pytest

from edge0_ref.app.locate import embedded_model
from tests.app.command import ROOT, TIMEOUT, start

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


ENDING = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.spec("ENG-065", "STO-047")
@pytest.mark.parametrize(("number", "code"), ENDING)
def test_a_signal_that_ends_the_command_leaves_nothing_half_written(tmp_path, number, code) -> None:
    folder, end = tmp_path / "made", time.monotonic() + TIMEOUT
    with start("synth", "qwen3.6-35b-a3b", "--out", folder, "--layers", 4, "--experts", 64) as process:
        while not folder.exists() and time.monotonic() < end:
            time.sleep(0.001)
        process.send_signal(number)
        told = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, told, folder.exists()) == (code, ("", ""), False)


@pytest.mark.spec("ENG-065", "ENG-073")
@pytest.mark.parametrize(("number", "code"), ENDING)
def test_a_signal_that_ends_a_measurement_ends_its_process_too(number, code) -> None:
    with start("bench", "--tokens", 1900) as process:
        assert any("prefetch, K = " in line for line in process.stderr)  # its process has begun
        process.send_signal(number)
        told = process.communicate(timeout=TIMEOUT)  # to the end of stderr, which that process has too
    assert (process.returncode, told) == (code, ("", ""))


@pytest.mark.spec("ENG-065")
def test_what_nohup_has_ignored_stays_ignored() -> None:
    shown = "import signal; from edge0_ref.app import cli; cli.run = lambda words: signal.getsignal(1); cli.main()"
    words = ["nohup", sys.executable, "-c", shown]
    assert subprocess.run(words, capture_output=True, cwd=ROOT, check=False).returncode == signal.SIG_IGN


NOWHERE = """
from numba.core.caching import FunctionCache
from edge0_ref.__main__ import main
FunctionCache._impl_class._locator_classes = []
main()
"""


@pytest.mark.spec("ENG-065")
@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["doctor"], ["bench"], ["trace", "--out", "x"]])
def test_who_can_keep_compiled_kernels_nowhere_is_told_how_to_name_a_place(command) -> None:
    done = run("-c", NOWHERE, *command)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout, line.startswith("edge0: error: ")) == (2, "", True)
    assert "NUMBA_CACHE_DIR=FOLDER" in line


def redirected(redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it, with a stream of its own elsewhere, or closed."""
    words = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "edge0_ref", *arguments]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, env=os.environ | environment)


@pytest.mark.spec("ENG-065")
@pytest.mark.parametrize("command", [["--help"], ["inspect"], ["generate", "--prompt-ids", "5", "--max-tokens", "2"]])
@pytest.mark.parametrize(("redirection", "says"), [(">/dev/full", "No space left"), (">&-", "stdout is closed")])
def test_a_stdout_that_takes_nothing_is_told_in_one_line(command, redirection, says) -> None:
    done = redirected(redirection, *command)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith("edge0: error: "), says in line) == (2, True, True)


@pytest.mark.spec("ENG-065")
def test_streams_that_are_closed_change_nothing_else() -> None:
    generate = ("generate", "--prompt-ids", "5", "--max-tokens", "2", "--stats")
    done = redirected("2>&-", *generate)
    assert (done.returncode, done.stdout) == (0, run("-m", "edge0_ref", *generate).stdout)
    assert redirected("<&-", "chat").returncode == 0  # as at the end of the input
    assert redirected(">&- 2>&-", *generate).returncode == 2


@pytest.mark.spec("ENG-065")
def test_characters_that_the_encoding_of_stdout_lacks_are_replaced(tmp_path) -> None:
    (tmp_path / "é").symlink_to(embedded_model())
    done = redirected("", "inspect", str(tmp_path / "é"), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/?" in done.stdout
