"""The page cache of files: how much of it there is, and how to be rid of it."""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Mapping:
    """Of a file, in this process. resident: bytes of it that this process has touched."""

    address: int
    nbytes: int
    resident: int


def forget_pages(paths: Iterable[Path]) -> bool:
    """[ENG-074] Ask the system to drop these files from its page cache; whether it can be asked.

    It keeps pages that are mapped, so this process lets go of its own first; it may touch them again at any time.
    Raises OSError.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    paths, mapped = [*paths], list[Mapping]()
    with suppress(OSError):  # of a system that has no such list, nothing can be let go
        mapped += mappings_of(paths)
    for mapping in mapped:
        if mapping.resident:
            call("madvise", mapping.address, mapping.nbytes, mmap.MADV_DONTNEED)
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
    return sum(mapping.resident for mapping in mappings_of(paths))


def mappings_of(paths: Iterable[Path]) -> Iterator[Mapping]:
    """As this process has these files mapped now. Raises OSError where the system does not say."""
    wanted, found = {str(path.resolve()).replace("\n", "\\012") for path in paths}, None
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            first, *rest = line.split(maxsplit=5)
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                found = (start, end - start) if len(rest) == 5 and rest[4].rstrip("\n") in wanted else None
            elif found and first == "Rss:":
                yield Mapping(*found, resident=1024 * int(rest[0]))


def cached_pages(path: Path) -> int:
    """mincore(2): the lowest bit of a byte for each page of a map."""
    size = path.stat().st_size
    if not size:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(pages, np.uint8)
        address = view.ctypes.data
        del view  # a map with views cannot be closed
        call("mincore", address, size, ctypes.c_void_p(resident.ctypes.data))
        return int((resident & 1).sum())


def call(name: str, address: int, nbytes: int, last: object) -> None:
    """A system call about a range of this process's memory. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), last):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
