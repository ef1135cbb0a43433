"""Bytes from a disk: the same in every read mode, wherever they lie, and an error when they are not there."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.contract import READ_MODES, ReadMode
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.expert_store import ExpertFiles, FileExpertStore, find_experts
from edge0_ref.inventory import open_checkpoint
from edge0_ref.readers import PreadReader, RangeReader, open_reader
from tests.ref.builders import MODEL, Recipe, build, expert_bytes, make_config, make_tensors, tensor, write_model
from tests.ref.sound import modes_of

RECIPE = Recipe(vocab=32, experts=5)


@pytest.fixture(params=READ_MODES)
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> ReadMode:
    """Each read mode; direct only where the file system of the temporary folder has it."""
    if request.param not in modes_of(tmp_path):
        pytest.skip(f"no {request.param} reads in {tmp_path}")
    mode: ReadMode = request.param
    return mode


@pytest.mark.spec("STO-021", "STO-022")
def test_only_a_refused_mode_is_blamed_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReadError, match="No such file") as absent:
        open_reader(tmp_path / "nowhere", "direct")
    assert "file system" not in str(absent.value)

    def refuse(path: object, flags: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ReadError, match="this file system has no direct reads, use --read-mode pread"):
        open_reader(tmp_path / "nowhere", "direct")


@pytest.mark.spec("STO-021")
@given(data=st.data())
def test_every_range_of_a_file_is_read_as_it_is(tmp_path: Path, mode: ReadMode, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 4095, 4096, 4097, 20000]) | st.integers(1, 20000))
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    reader = open_reader(tmp_path / "file", mode)
    for _ in range(3):
        first = data.draw(st.integers(0, size))
        last = data.draw(st.integers(first, size))
        buffer = bytearray(last - first)
        reader.read_into(first, memoryview(buffer))
        assert bytes(buffer) == content[first:last]
    reader.close()


@pytest.mark.spec("STO-021")
@pytest.mark.parametrize("mode", ["pread", "direct"], indirect=True)
def test_ranges_of_more_than_2_gib_are_read_where_one_call_reads_less(
    tmp_path: Path, mode: ReadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS has it. Nothing is read here, and memory that nobody touches is none."""
    asked = list[tuple[int, int]]()

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) >= 2**31:
            raise OSError(errno.EINVAL, "Invalid argument")
        asked.append((offset, offset + len(buffers[0])))
        return len(buffers[0])

    (tmp_path / "file").touch()
    reader, size = open_reader(tmp_path / "file", mode), 2**32 + 4096
    monkeypatch.setattr(os, "preadv", preadv)
    reader.read_into(8192, np.empty(size, np.uint8).data)
    reader.close()
    firsts, ends = zip(*asked, strict=True)
    assert firsts == (8192, *ends[:-1])
    assert ends[-1] == 8192 + size


@pytest.mark.spec("STO-020")
@given(size=st.integers(1, 12288), missing=st.integers(1, 5000))
def test_a_range_beyond_the_end_is_an_error_not_zeros(tmp_path: Path, mode: ReadMode, size: int, missing: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    reader = open_reader(tmp_path / "file", mode)
    first = max(0, size - 3)
    with pytest.raises(OSError, match="ends") as caught:
        reader.read_into(first, memoryview(bytearray(size - first + missing)))
    assert caught.value.errno == errno.EIO
    reader.close()


@pytest.mark.spec("STO-022")
def test_a_file_that_cannot_be_opened_in_a_mode_is_an_error_that_names_both(tmp_path: Path, mode: ReadMode) -> None:
    with pytest.raises(ReadError, match=f"absent: cannot be opened for {mode} reads"):
        open_reader(tmp_path / "absent", mode)


@pytest.mark.spec("STO-022")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs a file system without direct reads")
def test_a_file_system_without_direct_reads_is_an_error_and_no_other_mode() -> None:
    with pytest.raises(ReadError, match=r"/proc/self/status: cannot be opened for direct reads: .*--read-mode pread"):
        open_reader(Path("/proc/self/status"), "direct")


@pytest.mark.spec("STO-010", "STO-011", "STO-021")
@pytest.mark.parametrize("shards", [1, 2, 7])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("coefficients", ["BF16", "F16", "F32"])
def test_an_expert_is_its_nine_ranges_in_slot_order(
    tmp_path: Path, mode: ReadMode, shards: int, bits: int, coefficients: str
) -> None:
    recipe = replace(RECIPE, expert_bits=bits, coefficients=coefficients)
    tensors = make_tensors(recipe)
    checkpoint = open_checkpoint(write_model(tmp_path, make_config(recipe), tensors, shards, layout_seed=bits))
    files = ExpertFiles(checkpoint, mode)
    for layer, store in files.stores.items():
        assert store.num_experts == recipe.experts
        for expert in range(recipe.experts):
            slot = np.empty(store.layout.nbytes, np.uint8)
            store.read_into(expert, slot)
            assert slot.tobytes() == expert_bytes(tensors, layer, expert)
            viewed = store.layout.view(slot)
            assert (viewed.gate.rows, viewed.gate.cols, viewed.gate.bits) == (recipe.inner, recipe.hidden, bits)
    files.close()


@pytest.mark.spec("STO-020")
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_file_that_shrinks_while_it_is_open_is_an_error_that_names_the_expert(
    tmp_path: Path, mode: ReadMode, kept: int
) -> None:
    checkpoint = open_checkpoint(build(tmp_path, RECIPE))
    files = ExpertFiles(checkpoint, mode)
    path = tmp_path / "model.safetensors"
    _, pieces = find_experts(checkpoint, 1, checkpoint.config.moe_layers[1])
    last = max(pieces, key=lambda piece: piece.offset)
    os.truncate(path, last.offset + kept * last.nbytes)
    with pytest.raises(ReadError, match=rf"layer 1 expert {kept}: reading \S+ from {path} failed: .* ends"):
        files.stores[1].read_into(kept, np.empty(files.stores[1].layout.nbytes, np.uint8))
    files.close()


@pytest.mark.spec("STO-020")
def test_a_resident_tensor_of_a_file_that_shrank_is_a_read_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build(tmp_path, RECIPE))
    os.truncate(tmp_path / "model.safetensors", 8)
    with pytest.raises(ReadError, match=r"reading \S+norm.weight failed: .* ends"):
        checkpoint.vector(f"{MODEL}.norm.weight")


@pytest.mark.spec("STO-020")
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reads fail")
def test_a_disk_that_fails_in_mid_read_is_a_read_error_with_the_cause(tmp_path: Path) -> None:
    """The first page of a process is never mapped: reading it gives EIO, from the kernel itself."""
    checkpoint = open_checkpoint(build(tmp_path, RECIPE))
    layout, pieces = find_experts(checkpoint, 0, checkpoint.config.moe_layers[0])
    broken: dict[Path, RangeReader] = {pieces[0].path: PreadReader(Path("/proc/self/mem"))}
    here = [replace(piece, offset=0) for piece in pieces]
    store = FileExpertStore(0, RECIPE.experts, layout, here, broken)
    with pytest.raises(ReadError, match=r"layer 0 expert 0: .* failed: .*Input/output error") as caught:
        store.read_into(0, np.empty(layout.nbytes, np.uint8))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    broken[pieces[0].path].close()


@pytest.mark.spec("STO-012")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["gate_proj.scales", "up_proj.scales", "down_proj.biases"])
@pytest.mark.parametrize("coefficients", ["BF16", "F16", "F32"])
def test_an_expert_with_nan_or_infinite_coefficients_is_refused_when_it_is_read(
    tmp_path: Path, part: str, poison: float, coefficients: str
) -> None:
    recipe = replace(RECIPE, coefficients=coefficients)
    tensors = make_tensors(recipe)
    name = f"{MODEL}.layers.1.mlp.switch_mlp.{part}"
    values = np.full(tensors[name].shape, 0.01, np.float32)
    values[3].flat[-1] = poison
    tensors[name] = tensor(values, recipe.coefficients)
    files = ExpertFiles(open_checkpoint(write_model(tmp_path, make_config(recipe), tensors)), "pread")
    slot = np.empty(files.stores[1].layout.nbytes, np.uint8)
    files.stores[1].read_into(2, slot)
    with pytest.raises(CheckpointError, match="layer 1 expert 3: scales or biases hold NaN or infinity"):
        files.stores[1].read_into(3, slot)
    files.close()


@pytest.mark.spec("STO-032")
def test_a_store_of_closed_files_says_so(tmp_path: Path) -> None:
    files = ExpertFiles(open_checkpoint(build(tmp_path, RECIPE)), "pread")
    files.close()
    files.close()
    with pytest.raises(ReadError, match="layer 1 expert 0: the model's files are closed"):
        files.stores[1].read_into(0, np.empty(files.stores[1].layout.nbytes, np.uint8))
