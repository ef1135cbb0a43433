"""The page cache of files: how much of it there is, and how to be rid of it."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OUT_OF_DATE = 2 | (16 if sys.platform == "darwin" else 4)  # MS_INVALIDATE | MS_SYNC: dirty pages are written first


@dataclass(frozen=True)
class Mapping:
    """Of a file, in this process. resident: bytes of it that this process has touched."""

    path: Path
    address: int
    nbytes: int
    resident: int


def forget_pages(paths: Iterable[Path]) -> None:
    """[ENG-074] Ask the system to drop these files from its page cache. Raises OSError.

    It keeps pages that are mapped, so this process lets go of its own first; it may touch them again at any time.
    macOS has no advice for files; there a map of a file lets go of its pages when they are called out of date.
    """
    paths, mappings = [*paths], list[Mapping]()
    with suppress(OSError):  # of a system that has no such list, nothing can be let go
        mappings += mappings_of(paths)
    for mapping in mappings:
        if mapping.resident:
            ask("madvise", mapping.path, mapping.address, mapping.nbytes, mmap.MADV_DONTNEED)
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
        raise OSError(number, f"{name}: {os.strerror(number)}", str(path))


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of these files that are in the page cache now. Raises OSError where the system does not say."""
    return sum(cached_pages(path) for path in paths) * mmap.PAGESIZE


def mapped_bytes(paths: Iterable[Path]) -> int:
    """Bytes of these files that this process has mapped and touched. Raises OSError where the system does not say."""
    return sum(mapping.resident for mapping in mappings_of(paths))


def mappings_of(paths: Iterable[Path]) -> Iterator[Mapping]:
    """As this process has these files mapped now. Raises OSError where the system does not say."""
    wanted, found = {str(path.resolve()).replace("\n", "\\012"): path for path in paths}, None
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            first, *rest = line.split(maxsplit=5)
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                path = wanted.get(rest[4].rstrip("\n")) if len(rest) == 5 else None
                found = path and (path, start, end - start)
            elif found and first == "Rss:":
                yield Mapping(*found, resident=1024 * int(rest[0]))


def cached_pages(path: Path) -> int:
    """mincore(2): the lowest bit of a byte for each page of a map."""
    size = path.stat().st_size
    if not size:
        return 0
    resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with mapped(path) as address:
        ask("mincore", path, address, size, resident.ctypes.data)
    return int((resident & 1).sum())
