"""Damaged safetensors files: extents, names and lengths that do not describe the bytes that follow."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import make_header, write_model, write_raw, write_safetensors
from tests.ref.sound import CONFIG, NORM, TENSORS, refused


@pytest.mark.spec("STO-003")
def test_files_that_are_missing_or_no_files_are_named(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "absent")
    assert "config.json: No such file" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait forever
    assert "not a regular file" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").mkdir()
    assert "index.json: not a regular file" in refused(tmp_path)


@pytest.mark.spec("STO-001", "STO-002")
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = write_model(tmp_path, CONFIG, TENSORS) / "model.safetensors"
    whole = path.stat().st_size
    os.truncate(path, data.draw(st.integers(0, whole - 1) | st.integers(0, 600)))
    assert str(path) in refused(tmp_path)


@pytest.mark.spec("STO-001")
@given(garbage=st.binary(max_size=200))
def test_garbage_for_a_shard_is_refused(tmp_path: Path, garbage: bytes) -> None:
    path = write_model(tmp_path, CONFIG, TENSORS) / "model.safetensors"
    path.write_bytes(garbage)
    assert str(path) in refused(tmp_path)


def entry(header: dict[str, Any], name: str, **fields: Any) -> dict[str, Any]:
    return {**header, name: {**header[name], **fields}}


@pytest.mark.spec("STO-002")
def test_extents_tile_the_data_without_overlap_or_hole(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, TENSORS)
    path = folder / "model.safetensors"
    header = make_header(TENSORS, list(TENSORS), {})
    data = b"".join(held.data for held in TENSORS.values())
    first, last = header[NORM]["data_offsets"]
    cases = {
        "overlaps": (entry(header, NORM, data_offsets=[first - 2, last - 2]), data),
        "bytes between": (make_header(TENSORS, list(TENSORS)[1:], {}) | {NORM: header[NORM]}, data),
        "belong to no tensor": (header, data + b"\0"),
        "ends at byte": (entry(header, NORM, data_offsets=[first + 2**40, last + 2**40]), data),
        "its extent has": (entry(header, NORM, shape=[63]), data),
        "its extent has -128": (entry(header, NORM, data_offsets=[last, first]), data),
        "tensor x: the header entry is not dtype, shape and data_offsets": (header | {"x": 5}, data),
        "dtype 'F8_E4M3'": (entry(header, NORM, dtype="F8_E4M3"), data),
    }
    for message, (broken, held) in cases.items():
        write_raw(path, broken, held)
        assert message in refused(folder), message
    shorter = {**header, NORM: {**header[NORM], "shape": [63], "data_offsets": [first, last - 2]}}
    write_raw(path, shorter, data)
    assert "2 bytes" in refused(folder)


@pytest.mark.spec("STO-001")
def test_a_name_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, TENSORS)
    text = json.dumps(make_header(TENSORS, list(TENSORS), {}))
    data = b"".join(held.data for held in TENSORS.values())
    write_raw(folder / "model.safetensors", f"{text[:-1]}, {text[1:]}".encode(), data)
    assert "occurs twice" in refused(folder)


@pytest.mark.spec("STO-001")
def test_metadata_must_be_strings(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG, TENSORS)
    write_safetensors(folder / "model.safetensors", TENSORS, metadata={"format": "mlx"})
    assert open_checkpoint(folder).metadata == {"format": "mlx"}
    header = make_header(TENSORS, list(TENSORS), {}) | {"__metadata__": {"format": 5}}
    write_raw(folder / "model.safetensors", header, b"".join(held.data for held in TENSORS.values()))
    assert "not a table of strings" in refused(folder)
