"""The page cache of files: how much of it there is, and how to be rid of it."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

OUT_OF_DATE = 2 | (16 if sys.platform == "darwin" else 4)  # MS_INVALIDATE | MS_SYNC: dirty pages are written first


def forget_pages(paths: Iterable[Path]) -> None:
    """[ENG-074] Ask the system to drop these files from its page cache. Raises OSError.

    macOS has no advice for files; there a map of a file lets go of its pages when they are called out of date.
    """
    for path in paths:
        if hasattr(os, "posix_fadvise"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        elif size := path.stat().st_size:
            with mapped(path) as address:
                ask("msync", path, address, size, OUT_OF_DATE)


@contextmanager
def mapped(path: Path) -> Iterator[int]:
    """Where a map of a file that is not empty lies in memory."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        view = np.frombuffer(pages, np.uint8)
        address = view.ctypes.data
        del view  # a map with views cannot be closed
        yield address


def ask(name: str, path: Path, address: int, size: int, wanted: int) -> None:
    """A system call about a range of memory. Raises OSError naming the file."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    last = ctypes.c_void_p if name == "mincore" else ctypes.c_int
    if call(ctypes.c_void_p(address), ctypes.c_size_t(size), last(wanted)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of these files that are in the page cache now. Raises OSError where the system does not say."""
    return sum(cached_pages(path) for path in paths) * mmap.PAGESIZE


def mapped_bytes(paths: Iterable[Path]) -> int:
    """Bytes of these files that this process has mapped and touched. Raises OSError where the system does not say."""
    wanted, total, counts = {str(path.resolve()) for path in paths}, 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            first, *rest = line.split(maxsplit=5)
            if "-" in first and not first.endswith(":"):
                counts = len(rest) == 5 and rest[4].strip() in wanted
            elif counts and first == "Rss:":
                total += 1024 * int(rest[0])
    return total


def cached_pages(path: Path) -> int:
    """mincore(2): the lowest bit of a byte for each page of a map."""
    size = path.stat().st_size
    if not size:
        return 0
    resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with mapped(path) as address:
        ask("mincore", path, address, size, resident.ctypes.data)
    return int((resident & 1).sum())
