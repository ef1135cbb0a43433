"""Reading byte ranges of files in three modes that never change a bit: mmap, pread, direct.

mmap    pages come through the page cache on first touch; the kernel decides how much to read.
pread   one system call copies a range through the page cache.
direct  O_DIRECT goes past the page cache: offset, length and memory must be aligned. Where they are, bytes go
        straight to where they are wanted; where not, a range is read as whole blocks into a scratch buffer and copied
        out. Where a file system refuses O_DIRECT the mode is an error, not a silent pread. macOS has no O_DIRECT;
        there it is pread with F_NOCACHE.
"""

import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from edge0_ref.contract import Array, ReadMode
from edge0_ref.errors import CheckpointError, ReadError

BLOCK = 4096
AT_ONCE = 2**30  # bytes that one call is asked for: macOS refuses 2 GiB, Linux returns less


@runtime_checkable
class RangeReader(Protocol):
    """Reads ranges of one file, from any thread."""

    def read_into(self, offset: int, buffer: memoryview) -> None: ...

    def close(self) -> None: ...


@contextmanager
def open_for_reading(path: Path) -> Iterator[int]:
    """A file descriptor for the length of a `with`."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        yield file
    finally:
        os.close(file)


def read_exactly(file: int, offset: int, buffer: memoryview) -> None:
    """[STO-020] Fill `buffer` from `offset`; a short file is an error, never zeros."""
    done = count = os.preadv(file, [buffer[:AT_ONCE]], offset)
    while done < len(buffer):
        if count == 0:
            raise OSError(errno.EIO, f"the file ends {len(buffer) - done} bytes early at byte {offset + done}")
        count = os.preadv(file, [buffer[done : done + AT_ONCE]], offset + done)
        done += count


class PreadReader:
    """Buffered reads."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        read_exactly(self._file, offset, buffer)

    def close(self) -> None:
        os.close(self._file)


class MmapReader:
    """Copies out of a memory map. The length is checked at each read: touching a page past the end would be SIGBUS."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._map = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._file)
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        size = os.fstat(self._file).st_size
        if offset + len(buffer) > size:
            raise OSError(errno.EIO, f"the file now ends at byte {size}, before byte {offset + len(buffer)}")
        buffer[:] = memoryview(self._map)[offset : offset + len(buffer)]

    def close(self) -> None:
        self._map.close()
        os.close(self._file)


def page_rows(count: int, nbytes: int) -> Array:
    """uint8 [count, nbytes], contiguous, from the start of a page: each row is aligned if it is whole blocks long.

    A mapping of its own, which is the system's again as soon as nobody uses it: an allocator may keep what it was given
    back, and a plan counts on it (DEC-058).
    """
    memory = mmap.mmap(-1, max(1, count * nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, count * nbytes).reshape(count, nbytes)


SCRATCH = threading.local()  # of all files: a thread reads one range at a time


def aligned_scratch(size: int) -> memoryview:
    """Memory of this thread that direct reads can fill, until it asks again."""
    held = getattr(SCRATCH, "map", None)
    if held is None or len(held) < size:
        held = SCRATCH.map = mmap.mmap(-1, max(size, BLOCK))  # anonymous maps start on a page
    return memoryview(held)[:size]


class DirectReader:
    """Reads past the page cache: straight into aligned memory, else through a scratch buffer of the thread."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self._file, fcntl.F_NOCACHE, 1)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset % BLOCK or len(buffer) % BLOCK:
            self._read_through_scratch(offset, buffer)
            return
        try:
            self._read_blocks(offset, buffer, len(buffer))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._read_through_scratch(offset, buffer)  # memory that this file system cannot read into

    def _read_through_scratch(self, offset: int, buffer: memoryview) -> None:
        first = offset // BLOCK * BLOCK
        wanted = offset + len(buffer) - first
        scratch = aligned_scratch(-(-wanted // BLOCK) * BLOCK)
        self._read_blocks(first, scratch, wanted)
        buffer[:] = scratch[offset - first : wanted]

    def _read_blocks(self, first: int, blocks: memoryview, wanted: int) -> None:
        """Fill whole blocks, of which `wanted` bytes must be there."""
        done = 0
        while done < wanted:
            count = os.preadv(self._file, [blocks[done : done + AT_ONCE]], first + done)
            done += count
            if done < wanted and (count == 0 or count % BLOCK):
                raise OSError(errno.EIO, f"the file ends {wanted - done} bytes early at byte {first + done}")

    def close(self) -> None:
        os.close(self._file)


READERS: dict[ReadMode, type[PreadReader] | type[MmapReader] | type[DirectReader]] = {
    "mmap": MmapReader,
    "pread": PreadReader,
    "direct": DirectReader,
}


def open_reader(path: Path, mode: ReadMode) -> RangeReader:
    """Raises ReadError when the file cannot be opened in this mode."""
    try:
        return READERS[mode](path)
    except (OSError, ValueError) as error:
        refused = mode == "direct" and getattr(error, "errno", None) in (errno.EINVAL, errno.EOPNOTSUPP)
        hint = "; this file system has no direct reads, use --read-mode pread" if refused else ""
        raise ReadError(f"{path}: cannot be opened for {mode} reads: {error}{hint}") from error
