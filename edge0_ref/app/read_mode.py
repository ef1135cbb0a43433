"""The read mode where nobody asked for one: what `edge0 doctor` measured on this file system, or what it allows."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import READ_MODES, ReadMode
from edge0_ref.errors import ReadError
from edge0_ref.expert_store import find_experts
from edge0_ref.readers import open_reader

MEASURED = "read-modes.json"
FITS = 4  # experts of at most this part of the machine's memory are left to the page cache


def default_read_mode(checkpoint: Checkpoint, memory: int | None, cache: Path | None) -> ReadMode:
    """[STO-046] Few experts and no budget: pread, since after a while all of them come from the page cache.

    Else the mode measured for this file system; where none was, direct if the file can be opened so. Direct reads
    leave no page cache behind, which a budget would have to count.
    """
    files: dict[Path, None] = {}
    experts = 0
    for layer, moe in checkpoint.config.moe_layers.items():
        layout, pieces = find_experts(checkpoint, layer, moe)
        experts += layout.nbytes * moe.num_experts
        files |= dict.fromkeys(piece.path for piece in pieces)
    if memory is None and experts <= machine_bytes() // FITS:
        return "pread"
    paths = [*files] if checkpoint.packed is None else [checkpoint.packed]
    measured = measured_mode(cache, paths[0])
    modes: tuple[ReadMode, ...] = ("direct", "pread") if measured is None else (measured, "pread")
    return next((mode for mode in modes if all(opens(path, mode) for path in paths)), "pread")


def machine_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def opens(path: Path, mode: ReadMode) -> bool:
    if not path.is_file():
        return False  # opening a pipe would wait
    try:
        open_reader(path, mode).close()
    except ReadError:
        return False
    return True


def file_system(path: Path) -> str:
    """A name for the file system of a file that survives a restart: device and mount point where the system tells."""
    device, real = os.stat(path).st_dev, path.resolve()
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return f"device {wanted}"
    mounts = ((line.split(" - ")[0].split(), line.partition(" - ")[2].split()) for line in lines)
    mounted = ((unescaped(fields[4]), source[1]) for fields, source in mounts if fields[2] == wanted)
    places = [(place, f"{source} on {place}") for place, source in mounted if real.is_relative_to(place)]
    return max(places, key=lambda place: len(place[0]), default=("", f"device {wanted}"))[1]


def unescaped(text: str) -> str:
    r"""A path as /proc/self/mountinfo has it.

    >>> unescaped(r"/media/My\040Passport")
    '/media/My Passport'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def measured_mode(cache: Path | None, path: Path) -> ReadMode | None:
    """What `edge0 doctor` found for the file system of `path`; a cache that cannot be read holds nothing."""
    mode = read_measured(cache).get(file_system(path), {}).get("mode")
    return mode if mode in READ_MODES else None


def read_measured(cache: Path | None) -> dict[str, Mapping[str, Any]]:
    if cache is None:
        return {}
    try:
        held = json.loads((cache / MEASURED).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in held.items() if isinstance(entry, dict)} if isinstance(held, dict) else {}


def write_measured(cache: Path, name: str, entry: Mapping[str, Any]) -> Path:
    """Remember what was measured on a `file_system`; where. Raises OSError."""
    cache.mkdir(parents=True, exist_ok=True)
    aside = cache / f"{MEASURED}.{os.getpid()}"
    aside.write_text(json.dumps({**read_measured(cache), name: dict(entry)}, indent=1), "utf-8")
    return aside.replace(cache / MEASURED)
