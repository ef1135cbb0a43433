"""What a figure was measured on: machine, versions, commit."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge0_ref.app.read_mode import machine_bytes
from edge0_ref.engine.memory import size_text

PACKAGES = ("edge0", "numpy", "numba")


def provenance() -> dict[str, Any]:
    """[ENG-070] For every line of figures."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {"machine": machine_text(), "versions": versions, "commit": commit()}


def machine_text() -> str:
    system = f"{platform.system()} {platform.release()}"
    return f"{processor()}, {os.cpu_count()} cores, {size_text(machine_bytes())}, {system}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str | None:
    """The commit this package's own repository is at, with "-dirty" where files differ; None outside of one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed somewhere below an unrelated repository
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
