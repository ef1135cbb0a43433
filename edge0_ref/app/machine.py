"""What a figure was measured on: machine, versions, commit."""

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edge0_ref.app.read_mode import machine_bytes
from edge0_ref.engine.memory import size_text

PACKAGES = ("edge0", "numpy", "numba", "mlx")  # that figures depend on


def provenance() -> dict[str, Any]:
    """[ENG-070] For every line of figures."""
    told = {"chip": processor(), "cores": os.cpu_count(), "memory_bytes": machine_bytes(), "os": operating_system()}
    machine = f"{told['chip']}, {told['cores']} cores, {size_text(machine_bytes())}, {told['os']}"
    return {"machine": machine, **told, "versions": versions(), "commit": commit()}


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Of Python, and of these packages as far as they are here."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def operating_system() -> str:
    release = platform.mac_ver()[0]
    return f"macOS {release}" if release else f"{platform.system()} {platform.release()}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()


def output_of(*command: str) -> str | None:
    """What a program prints; None if it is not here or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """The commit this package's own repository is at, with "-dirty" where files differ or are new; None outside."""
    git = "git", "-C", str(Path(__file__).parent)
    if output_of(*git, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed somewhere below an unrelated repository
    head, changes = output_of(*git, "rev-parse", "HEAD"), output_of(*git, "status", "--porcelain")
    return None if head is None else head + ("-dirty" if changes else "")
