"""A memory cgroup around one process: its memory and the page cache it causes, limited and counted by the kernel."""

import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Controller:
    """What a version of cgroups calls its files. swap: of memory and swap together, or of swap alone."""

    version: str
    limit: str
    swap: str
    swap_is_total: bool
    peak: str
    events: str


V1 = Controller(
    version="v1",
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    swap_is_total=True,
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
)
V2 = Controller("v2", "memory.max", "memory.swap.max", swap_is_total=False, peak="memory.peak", events="memory.events")


@dataclass(frozen=True)
class MemoryGroup:
    """[ENG-073] A group of its own for one process, limited to `cap` bytes, or only counted."""

    folder: Path
    controller: Controller

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` in this group from its first byte on."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *arguments]

    @property
    def peak_bytes(self) -> int | None:
        """The most that was charged to the group, page cache included; None where the kernel does not say."""
        try:
            return int((self.folder / self.controller.peak).read_text("ascii"))
        except OSError:
            return None

    @property
    def kills(self) -> int:
        """Processes of this group that the kernel killed for lack of memory."""
        found = re.search(r"^oom_kill (\d+)$", (self.folder / self.controller.events).read_text("ascii"), re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def what(self) -> str:
        return f"{self.controller.peak} of a cgroup {self.controller.version}, page cache included"


@contextmanager
def memory_group(cap: int | None, root: Path = CGROUPS) -> Iterator[MemoryGroup]:
    """A new group, removed at the end. Raises OSError, saying why there is none, where root does not allow it."""
    parent, controller = find_controller(root)
    group = MemoryGroup(parent / f"edge0-bench-{os.getpid()}-{time.monotonic_ns()}", controller)
    group.folder.mkdir()
    try:
        if cap is not None:
            set_limit(group, cap)
        yield group
    finally:
        remove(group.folder)


def find_controller(root: Path) -> tuple[Path, Controller]:
    """Where new groups go. Raises OSError."""
    if (root / "memory" / V1.limit).exists():
        return root / "memory", V1
    controllers = root / "cgroup.controllers"
    if not controllers.exists() or "memory" not in controllers.read_text("ascii").split():
        raise OSError(errno.ENOENT, "no memory controller", str(root))
    active = root / "cgroup.subtree_control"
    if "memory" not in active.read_text("ascii").split():
        active.write_text("+memory", "ascii")
    return root, V2


def set_limit(group: MemoryGroup, cap: int) -> None:
    """Swap would hide memory: there is none for the group, where the kernel counts swap."""
    (group.folder / group.controller.limit).write_text(str(cap), "ascii")
    swap = group.folder / group.controller.swap
    if swap.exists():
        swap.write_text(str(cap) if group.controller.swap_is_total else "0", "ascii")


def remove(folder: Path) -> None:
    """A group whose last process has just ended may be busy for a moment."""
    for _ in range(20):
        try:
            folder.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.05)
