"""Files of kept prefixes: whose they are, damage, and which of them leave first."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.engine import prefix_files
from edge0_ref.engine.prefix_files import Owner, PrefixFiles
from edge0_ref.engine.prefixes import PrefixBudget, Prefixes
from edge0_ref.errors import ReadError

OURS = Owner("1", "model", "f", "reference", 2)


@pytest.mark.spec("ENG-081")
@pytest.mark.parametrize("field", ["edge0", "fingerprint", "backend", "top_k"])
def test_what_another_state_depends_on_is_never_restored(tmp_path, field) -> None:
    notes = []
    other = replace(OURS, **{field: 3 if field == "top_k" else "another"})
    ids = np.array([5, 6], np.int32)
    assert PrefixFiles(tmp_path, 2**20, OURS, notes.append).write(ids, {"a": np.zeros(3)})
    assert [found.tolist() for found, _ in PrefixFiles(tmp_path, 2**20, OURS, notes.append).find()] == [[5, 6]]
    assert [*PrefixFiles(tmp_path, 2**20, other, notes.append).find()] == []
    assert notes == []


@pytest.mark.spec("ENG-081")
@given(data=st.data())
def test_a_damaged_file_is_dropped_and_said(tmp_path_factory, data) -> None:
    home, notes = tmp_path_factory.mktemp("damage"), []
    files = PrefixFiles(home, 2**20, OURS, notes.append)
    ids, arrays = np.array([5, 6], np.int32), {"a": np.arange(4.0), "logits": np.zeros(2, np.float32)}
    path = files.write(ids, arrays)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    damaged = data.draw(
        st.sampled_from([whole[:place], whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]])
    )
    path.write_bytes(damaged)
    kept = Prefixes(PrefixBudget(2**24), int, np.asarray, files, notify=notes.append)._kept
    try:
        read = files.read(path, ids)
    except ReadError as error:
        notes.append(str(error))
        read = None
    if read is not None:
        # a bit of the header that means nothing, such as the name of the model
        assert {name: array.tolist() for name, array in read.items()} == {n: a.tolist() for n, a in arrays.items()}
    else:
        assert not path.exists()
        assert len(notes) == 1
        assert str(path) in notes[0]
    assert len(kept) <= 1


@pytest.mark.spec("ENG-081")
def test_a_time_that_cannot_be_noted_harms_no_text(tmp_path, monkeypatch) -> None:
    """As in a folder that belongs to another user, or on a disk that is mounted read-only."""
    files = PrefixFiles(tmp_path, 2**20, OURS, pytest.fail)
    ids = np.array([5, 6], np.int32)
    path = files.write(ids, {"a": np.arange(4.0)})

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(prefix_files.os, "utime", refuse)
    assert files.read(path, ids)["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.spec("ENG-082")
def test_the_least_recently_used_leaves_the_disk_and_the_newest_never(tmp_path) -> None:
    files = PrefixFiles(tmp_path, 2**20, OURS, pytest.fail)
    ids = [np.array([number], np.int32) for number in range(4)]
    paths = [files.write(each, {"a": np.zeros(3)}) for each in ids[:3]]
    for used, path in enumerate(paths):
        os.utime(path, (used, used))
    files.read(paths[0], ids[0])
    files.budget = sum(path.stat().st_size for path in paths)
    paths.append(files.write(ids[3], {"a": np.zeros(3)}))
    assert {path for path in paths if path.exists()} == {paths[0], paths[2], paths[3]}


@pytest.mark.spec("ENG-082")
def test_what_an_interrupted_write_left_does_not_stay(tmp_path) -> None:
    """But what another process is writing now does."""
    left, now = tmp_path / "a.prefix.17", tmp_path / "b.prefix.18"
    for path in (left, now):
        path.write_bytes(b"half of a state")
    os.utime(left, (0, 0))
    PrefixFiles(tmp_path, 2**20, OURS, pytest.fail).write(np.array([5, 6], np.int32), {"a": np.zeros(3)})
    assert (left.exists(), now.exists()) == (False, True)
