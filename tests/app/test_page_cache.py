"""Dropping files from the page cache, where the system takes no advice about files, as macOS."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.app import page_cache
from edge0_ref.app.page_cache import ask, forget_pages


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
