"""The page cache of files: what is in it, what this process has mapped, and how to be rid of it."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.app import bench_case, page_cache
from edge0_ref.app.bench_case import process_peak
from edge0_ref.app.page_cache import ask, cached_bytes, forget_pages, mapped_bytes
from edge0_ref.readers import open_reader


@pytest.mark.spec("ENG-074")
def test_dropped_pages_are_gone_and_read_ones_are_there(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2**20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet cannot be dropped
        file.read()
    try:
        assert cached_bytes([path]) == 2**20
    except OSError as error:
        pytest.skip(f"this system does not say what is in its page cache: {error}")
    forget_pages([path])
    assert cached_bytes([path]) == 0
    reader, wanted, buffer = open_reader(path, "mmap"), path.read_bytes(), bytearray(2**20)
    for _ in range(2):  # what was dropped is read again
        reader.read_into(0, memoryview(buffer))
        assert buffer == wanted
        forget_pages([path])
        assert cached_bytes([path]) == 0
    reader.close()


@pytest.mark.spec("ENG-073")
def test_mapped_pages_are_told_from_others_and_counted_once(tmp_path, monkeypatch) -> None:
    paths = [tmp_path / name for name in ("mapped", "other")]
    for path in paths:
        path.write_bytes(os.urandom(2**20))
    try:
        assert mapped_bytes(paths) == 0
    except OSError as error:
        pytest.skip(f"this system does not say what is mapped: {error}")
    reader = open_reader(paths[0], "mmap")
    reader.read_into(0, memoryview(bytearray(2**20)))
    assert (mapped_bytes(paths), mapped_bytes(paths[1:])) == (2**20, 0)
    monkeypatch.setattr(bench_case, "peak_bytes", lambda: 2**20)  # which has what is mapped
    assert process_peak(paths)[0] == 2 * 2**20
    reader.close()
    assert mapped_bytes(paths) == 0


@pytest.mark.spec("ENG-074")
def test_where_files_take_no_advice_pages_are_dropped_by_a_map_of_the_file_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    asked = list[Any]()
    monkeypatch.setattr(page_cache, "ask", lambda *call: (asked.append(call), ask(*call))[1])
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.write_bytes(content := os.urandom(3 * 2**16 + 5))
    empty.touch()
    forget_pages([full, empty])
    ((name, path, _, size, flags),) = asked
    assert (name, path, size) == ("msync", full, len(content))
    written_first = {"darwin": 0x10, "linux": 0x4}[sys.platform]
    assert flags == 0x2 | written_first  # alone, the first throws away what is not on the disk yet
    assert full.read_bytes() == content
