"""How much memory this process uses, and sizes as people write them."""

import os
import re
import reprlib
import resource
import sys
from pathlib import Path

from edge0_ref.errors import UsageError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def resident_bytes() -> int:
    """Resident set size now; where the system does not tell, the highest so far."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """The highest resident set size of this process so far.

    On Linux from VmHWM: `ru_maxrss` begins with the size of whoever started the process.
    """
    try:
        status = Path("/proc/self/status").read_text("ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes


def parse_size(text: str) -> int:
    """Bytes of a size as people write it. Raises UsageError.

    >>> parse_size("3GiB"), parse_size("1.5 GB"), parse_size("4096")
    (3221225472, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise UsageError(f"a size of {reprlib.repr(text)}, wanted one like 3GiB, 800MB or a number of bytes")
    nbytes = float(match[1]) * UNITS[match[2]]
    if nbytes >= 2**63:
        raise UsageError(f"a size of {reprlib.repr(text)}, wanted less than 2**63 bytes")
    return int(nbytes)


def size_text(nbytes: int) -> str:
    """A size with a unit and three digits or so.

    >>> size_text(512), size_text(1_769_472), size_text(3 * 2**30)
    ('512 B', '1.69 MiB', '3.00 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            value = nbytes / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{nbytes} B"
