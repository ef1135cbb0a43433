"""`edge0 pack`: write the sidecar that holds each expert in one aligned place, or check the one that is there.

The file grows under a name of its own, layer by layer, and a layer's checksums are written when its bytes are on the
disk: a run that was interrupted goes on where the last whole layer ends.
"""

import errno
import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge0_ref.app.locate import locate
from edge0_ref.app.output_files import target_of
from edge0_ref.app.progress import Advance, byte_bar
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, ReadMode
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import CheckpointError, ReadError, UsageError
from edge0_ref.expert_store import ExpertFiles, FileExpertStore
from edge0_ref.inventory import open_checkpoint
from edge0_ref.packed import SIDECAR, PackedFiles, PackedLayer, checksum, make_header, read_checksums, seal
from edge0_ref.prefetch import Prefetcher, Read
from edge0_ref.readers import page_rows

READERS = 2
SLOTS = 8  # experts in memory at a time
MARGIN_BYTES = 2**20

Notify = Callable[[str], None]
F = TypeVar("F", ExpertFiles, PackedFiles)


def run_pack(model: Path | str | None, out: str | None, notify: Notify) -> dict[str, Any]:
    """[STO-045] Pack, resume, or check; what was done, for a line of JSON. Raises UsageError, CheckpointError."""
    checkpoint = open_checkpoint(locate(model).folder)
    path = (checkpoint.folder if out is None else Path(out)) / SIDECAR
    if path.is_symlink():
        path = target_of(path)
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder")
    start = time.perf_counter()
    if path.exists():
        if not os.access(path, os.R_OK):  # no reason to make it anew
            raise UsageError(f"{path}: cannot be read by this user, so not be checked; --out DIR puts one elsewhere")
        try:
            size = check_sidecar(checkpoint, path)
            return report(path, "checked", size, size, start)
        except CheckpointError as error:
            notify(f"{error}: packing again")
    try:
        path.unlink(missing_ok=True)
        size, written = write_sidecar(checkpoint, path)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        what = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            what = "the disk is full; what is packed stays, and another run goes on from there"
        hint = "; --out DIR puts the file elsewhere" if error.errno in (errno.EROFS, errno.EACCES) else ""
        raise UsageError(f"{error.filename or path}: cannot be written: {what}{hint}") from None
    return report(path, "packed" if written == size else "resumed", size, written, start)


def report(path: Path, did: str, size: int, done: int, start: float) -> dict[str, Any]:
    seconds = time.perf_counter() - start
    return {
        "sidecar": str(path),
        "did": did,
        "bytes": size,
        "bytes_done": done,
        "seconds": round(seconds, 3),
        "gb_s": round(done / seconds / 1e9, 3),
    }


def check_sidecar(checkpoint: Checkpoint, path: Path) -> int:
    """Read every expert of a sidecar; its size. Raises CheckpointError for one that is stale or damaged."""
    packed = open_fast(lambda mode: PackedFiles(checkpoint, path, mode))
    try:
        total = sum(store.num_experts * store.layout.nbytes for store in packed.stores.values())
        with byte_bar(f"checking {path.name}", total) as advance:
            for store in packed.stores.values():
                for _, slot in read_all(store):
                    advance(slot.nbytes)
    finally:
        packed.close()
    return path.stat().st_size


def write_sidecar(checkpoint: Checkpoint, path: Path) -> tuple[int, int]:
    """The size of the file, and how much of it was written now."""
    header, layers, size = make_header(checkpoint)
    partial = path.with_name(f"{path.name}.partial")
    with writing(partial) as descriptor:
        begun = os.fstat(descriptor)
        if begun.st_size != size or os.pread(descriptor, len(header), 0) != header:
            os.ftruncate(descriptor, 0)
            begun = os.fstat(descriptor)
            check_space(path, size)
            write_at(descriptor, header, 0)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            sealed = set[int]()
        else:
            sealed = {layer for layer, packed in layers.items() if is_sealed(partial, layer, packed)}
            check_space(path, size - begun.st_blocks * 512)
        left = {layer: packed for layer, packed in layers.items() if layer not in sealed}
        total = sum(packed.num_experts * packed.stride for packed in layers.values())
        written = sum(packed.num_experts * packed.stride for packed in left.values())
        files = open_fast(lambda mode: ExpertFiles(checkpoint, mode))
        try:
            with byte_bar(f"packing {path}", total, total - written) as advance:
                for layer, packed in left.items():
                    write_layer(descriptor, files.stores[layer], packed, advance)
        finally:
            files.close()
        os.replace(partial, path)
    return size, written if sealed else size


@contextmanager
def writing(path: Path) -> Iterator[int]:
    """A file descriptor that no other process writes to."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{path}: another process is writing it") from None
        yield descriptor
    finally:
        os.close(descriptor)


def check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed + MARGIN_BYTES:
        raise UsageError(f"{path}: needs {size_text(needed)} ({needed} bytes), the disk has {size_text(free)} free")


def is_sealed(path: Path, layer: int, packed: PackedLayer) -> bool:
    try:
        read_checksums(path, layer, packed)
    except CheckpointError:
        return False
    return True


def open_fast(opener: Callable[[ReadMode], F]) -> F:
    """Past the page cache where the file system allows it: each byte is read once."""
    try:
        return opener("direct")
    except ReadError:
        return opener("pread")


def read_all(store: FileExpertStore) -> Iterator[tuple[int, Array]]:
    """Every expert in order, and its bytes, which are there until the next one is asked for."""
    slots = page_rows(min(SLOTS, store.num_experts), store.layout.nbytes)
    prefetcher = Prefetcher(READERS)
    coming = deque(prefetcher.submit(Read(store, expert, slot), "ahead") for expert, slot in enumerate(slots))
    try:
        for expert in range(store.num_experts):
            read = coming.popleft()
            read.wait()
            yield expert, read.slot
            following = expert + len(slots)
            if following < store.num_experts:
                coming.append(prefetcher.submit(Read(store, following, read.slot), "ahead"))
    finally:
        for read in coming:
            read.abandon()
        prefetcher.close()


def write_layer(descriptor: int, store: FileExpertStore, packed: PackedLayer, advance: Advance) -> None:
    """[STO-045] A layer's experts, then, once they are on the disk, the sealed checksums that say so."""
    checksums = np.zeros(packed.num_experts + 1, "<u4")
    for expert, slot in read_all(store):
        write_at(descriptor, slot.data, packed.offset + expert * packed.stride)
        checksums[expert] = checksum(slot)
        advance(packed.stride)
    flush(descriptor)
    checksums[-1] = seal(checksums[:-1])
    write_at(descriptor, checksums.tobytes(), packed.checksums)
    flush(descriptor)


def write_at(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def flush(descriptor: int) -> None:
    """Onto the disk, and out of the page cache."""
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
