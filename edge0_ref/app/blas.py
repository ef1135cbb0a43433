"""OpenBLAS in the place of the reference BLAS that MLX's Linux wheel carries: thirty times faster."""

import platform
import sys
from collections.abc import Callable
from pathlib import Path

CANDIDATES = (
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/libopenblas.so.0",
)


def find_openblas() -> Path | None:
    """A library file of the system's, or None."""
    found = (path for pattern in CANDIDATES for path in sorted(Path("/").glob(pattern.removeprefix("/"))))
    return next(found, None)


def restart_with_openblas(
    arguments: list[str],
    preloaded: str | None,
    threads: str,
    tell: Callable[[str], None],
    execute: Callable[[str, list[str]], None],
) -> None:
    """Start this command again with OpenBLAS preloaded, unless it is, or there is none: then say how to get it.

    Returns only if there is nothing to do. preloaded, threads: `LD_PRELOAD` and `OPENBLAS_NUM_THREADS`; execute:
    `os.execv`.
    """
    if platform.system() != "Linux" or "openblas" in (preloaded or ""):
        return
    library = find_openblas()
    if library is None:
        tell("no OpenBLAS found: training will take several times as long; apt-get install libopenblas0-pthread")
        return
    before = f"{preloaded}:" if preloaded else ""
    variables = [f"LD_PRELOAD={before}{library}", f"OPENBLAS_NUM_THREADS={threads}"]
    execute("/usr/bin/env", ["env", *variables, sys.executable, "-m", "edge0_ref.app.cli", *arguments])
