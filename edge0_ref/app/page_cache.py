"""The page cache of files: how much of it there is, and how to be rid of it."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def forget_pages(paths: Iterable[Path]) -> bool:
    """[ENG-074] Ask the system to drop these files from its page cache; whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


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
    library = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(pages, np.uint8)
        address = view.ctypes.data
        del view  # a map with views cannot be closed
        if library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(resident.ctypes.data)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        return int((resident & 1).sum())
