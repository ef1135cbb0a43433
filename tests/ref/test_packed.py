"""The sidecar: its bytes, its checksums, when it is refused, and that nothing but speed depends on it."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app.pack import run_pack
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import READ_MODES, ReadMode
from edge0_ref.errors import CheckpointError
from edge0_ref.expert_store import find_experts
from edge0_ref.inventory import open_checkpoint
from edge0_ref.packed import SIDECAR, PackedFiles, checksum, fingerprint, open_experts
from edge0_ref.readers import BLOCK, DirectReader, open_reader, page_rows
from tests.ref.builders import (
    MODEL,
    Recipe,
    Tensors,
    build,
    build_adapters,
    expert_bytes,
    make_config,
    make_tensors,
    tensor,
    write_model,
)
from tests.ref.conftest import Open
from tests.ref.ling import DATA, TOKENS

RECIPE = Recipe(layers=2, experts=3, top_k=2)
WHOLE_BLOCKS = Recipe(layers=1, hidden=256, inner=128, experts=3)  # an expert of 15 blocks


def silent(text: str) -> None:
    """Nobody is told."""


def pack(folder: Path, out: Path | None = None) -> Path:
    run_pack(folder, None if out is None else str(out), silent)
    return (out or folder) / SIDECAR


def words_by_hand(data: bytes) -> list[int]:
    return [int.from_bytes(data[first : first + 8], "little") for first in range(0, len(data), 8)]


def checksum_by_hand(data: bytes) -> int:
    """Python's own integers, one word at a time."""
    whole = len(data) // 4096
    sums = [sum(words_by_hand(data[block * 4096 : (block + 1) * 4096])) % 2**64 for block in range(whole)]
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in sums) + data[whole * 4096 :])


def make(folder: Path, recipe: Recipe, shards: int = 1) -> tuple[Path, Tensors]:
    tensors = make_tensors(recipe)
    return write_model(folder, make_config(recipe), tensors, shards), tensors


@pytest.mark.spec("STO-040", "STO-041")
@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("recipe", [RECIPE, WHOLE_BLOCKS, replace(RECIPE, expert_bits=8, coefficients="F32")])
def test_a_sidecar_holds_every_expert_at_a_block_with_its_checksum(tmp_path: Path, recipe: Recipe, shards: int) -> None:
    """Read back by hand, from the description of the format alone."""
    folder, tensors = make(tmp_path / "model", recipe, shards)
    raw = pack(folder).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    assert start % 4096 == 0
    names = [name for name in entries if name != "__metadata__"]
    assert names == [f"layers.{layer}.{part}" for part in ("experts", "checksums") for layer in range(recipe.layers)]
    for layer in range(recipe.layers):
        entry, words = entries[f"layers.{layer}.experts"], entries[f"layers.{layer}.checksums"]
        count, stride = entry["shape"]
        first, last = (start + place for place in words["data_offsets"])
        checksums = np.frombuffer(raw[first:last], "<u4").tolist()
        assert (count, len(checksums)) == (recipe.experts, recipe.experts + 1)
        for expert in range(count):
            place = start + entry["data_offsets"][0] + expert * stride
            content = expert_bytes(tensors, layer, expert)
            assert place % 4096 == stride % 4096 == 0
            assert raw[place : place + stride] == content + bytes(stride - len(content))
            assert checksums[expert] == checksum_by_hand(content)
        assert checksums[-1] == zlib.crc32(raw[first : last - 4])


@pytest.mark.spec("STO-041")
@given(data=st.data(), size=st.integers(1, 3 * BLOCK + 100))
def test_a_checksum_sees_a_changed_bit_and_a_block_in_the_wrong_place(data: st.DataObject, size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert checksum(content) == checksum_by_hand(content.tobytes())
    changed = content.copy()
    changed[data.draw(st.integers(0, size - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    assert checksum(changed) != checksum(content)
    if size >= 2 * BLOCK:
        swapped = np.concatenate([content[BLOCK : 2 * BLOCK], content[:BLOCK], content[2 * BLOCK :]])
        assert checksum(swapped) != checksum(content)


@pytest.mark.spec("STO-044")
@pytest.mark.parametrize("mode", READ_MODES)
@pytest.mark.parametrize("recipe", [RECIPE, WHOLE_BLOCKS], ids=["scratch", "straight"])
def test_every_expert_is_the_same_from_the_sidecar(tmp_path: Path, recipe: Recipe, mode: ReadMode) -> None:
    folder, tensors = make(tmp_path / "model", recipe)
    pack(folder)
    files = open_experts(open_checkpoint(folder), mode)
    assert isinstance(files, PackedFiles)
    for layer, store in files.stores.items():
        slots = page_rows(recipe.experts, store.layout.nbytes)
        for expert, slot in enumerate(slots):
            store.read_into(expert, slot)
            store.read_into(expert, slot)  # the second time without a checksum
            assert slot.tobytes() == expert_bytes(tensors, layer, expert)
    files.close()


@pytest.fixture(scope="module", params=["qwen", "ling_edge0", "ling_mlx4_bf16"])
def with_and_without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """A checkpoint without a sidecar and with one."""
    out = tmp_path_factory.mktemp(request.param)
    qwen = request.param == "qwen"
    plain = open_checkpoint(build(out / "model", replace(RECIPE, vocab=512)) if qwen else DATA / request.param)
    return [plain, replace(plain, packed=pack(plain.folder, out))]


@pytest.mark.spec("STO-044")
@pytest.mark.parametrize("executor", ["exact", "staged", "hot", "whole_layer"])
@pytest.mark.parametrize("mode", READ_MODES)
def test_results_and_counters_are_the_same_with_a_sidecar(
    with_and_without: list[Checkpoint], opened: Open, mode: ReadMode, executor: str
) -> None:
    seen = []
    for checkpoint in with_and_without:
        decoder = opened(checkpoint, executor=executor, prefill_executor=executor, read_mode=mode, slots=2)
        logits = [decoder.prefill(TOKENS[:3]), *(decoder.step(token) for token in TOKENS[3:5])]
        counters = asdict(decoder.counters) | {"wait_seconds": 0}
        seen.append(([row.tobytes() for row in logits], counters))
    assert seen[0] == seen[1]
    assert seen[0][1]["reads"] > 0


@pytest.mark.spec("STO-044")
def test_predictions_are_the_same_with_a_sidecar(tmp_path: Path, opened: Open) -> None:
    from edge0_ref.adapters import open_adapters

    folder = build(tmp_path / "model", RECIPE)
    build_adapters(tmp_path / "adapters", RECIPE, [0], {})
    plain = open_checkpoint(folder)
    adapters = open_adapters(tmp_path / "adapters", plain.config)
    seen = []
    for checkpoint in (plain, replace(plain, packed=pack(folder))):
        decoder = opened(checkpoint, adapters, slots=4)
        logits = [decoder.prefill([5, 6, 7]), *(decoder.step(token) for token in (8, 9, 10))]
        seen.append(([row.tobytes() for row in logits], decoder.counters.reads, decoder.counters.read_ahead))
    assert seen[0] == seen[1]
    assert seen[0][2] > 0


@pytest.mark.spec("STO-040")
def test_a_packed_expert_of_whole_blocks_goes_straight_into_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tensors = make(tmp_path / "model", WHOLE_BLOCKS)
    pack(folder)
    files = open_experts(open_checkpoint(folder), "direct")
    monkeypatch.setattr(DirectReader, "_read_through_scratch", lambda *given: pytest.fail("a copy"))
    for layer, store in files.stores.items():
        ((piece, _),) = store._ranges
        slots = page_rows(store.num_experts, store.layout.nbytes)
        assert slots.flags.c_contiguous
        assert piece.offset % BLOCK == piece.stride % BLOCK == 0
        assert all(slot.ctypes.data % BLOCK == slot.nbytes % BLOCK == 0 for slot in slots)
        for expert, slot in enumerate(slots):
            store.read_into(expert, slot)
            assert slot.tobytes() == expert_bytes(tensors, layer, expert)
    files.close()


@pytest.mark.spec("STO-021")
@given(blocks=st.integers(1, 3), shift=st.integers(0, BLOCK - 1) | st.sampled_from([1, 64, 512]))
def test_a_direct_read_fills_memory_that_begins_anywhere(tmp_path: Path, blocks: int, shift: int) -> None:
    """Whether the file system reads into it or not."""
    content = np.random.default_rng(blocks).integers(0, 256, blocks * BLOCK, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    reader = open_reader(tmp_path / "file", "direct")
    memory = page_rows(1, len(content) + BLOCK)[0][shift : shift + len(content)]
    reader.read_into(0, memory.data)
    assert memory.tobytes() == content
    reader.close()


@pytest.mark.spec("STO-021", "STO-020")
@given(blocks=st.integers(1, 6), first=st.integers(0, 5), count=st.integers(1, 6), tail=st.integers(0, BLOCK - 1))
def test_aligned_direct_reads_are_the_bytes_or_an_error(
    tmp_path: Path, blocks: int, first: int, count: int, tail: int
) -> None:
    content = np.random.default_rng(blocks).integers(0, 256, blocks * BLOCK + tail, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    reader = open_reader(tmp_path / "file", "direct")
    memory = page_rows(1, count * BLOCK)[0]
    wanted = content[first * BLOCK : (first + count) * BLOCK]
    if len(wanted) == count * BLOCK:
        reader.read_into(first * BLOCK, memory.data)
        assert memory.tobytes() == wanted
    else:
        with pytest.raises(OSError, match="ends"):
            reader.read_into(first * BLOCK, memory.data)
    reader.close()


@pytest.mark.spec("STO-042")
def test_the_fingerprint_is_of_the_weights_and_not_of_their_files(tmp_path: Path) -> None:
    first, _ = make(tmp_path / "one", RECIPE)
    others = [make(tmp_path / str(shards), RECIPE, shards)[0] for shards in (2, 7)]
    os.utime(first / "model.safetensors", (0, 0))
    assert len({fingerprint(open_checkpoint(folder)) for folder in (first, *others)}) == 1
    sidecar = pack(first)
    for folder in others:
        open_experts(replace(open_checkpoint(folder), packed=sidecar), "pread").close()


def other_seed(folder: Path) -> None:
    make(folder, replace(RECIPE, seed=1))


def one_scale(folder: Path) -> None:
    tensors = make_tensors(RECIPE)
    name = f"{MODEL}.layers.1.mlp.switch_mlp.up_proj.scales"
    values = np.frombuffer(tensors[name].data, np.uint16).astype(np.uint32) << 16
    floats = values.view(np.float32).reshape(tensors[name].shape).copy()
    floats[-1, 0, 0] *= 2
    tensors[name] = tensor(floats, "BF16")
    write_model(folder, make_config(RECIPE), tensors)


def other_experts(folder: Path) -> None:
    make(folder, replace(RECIPE, experts=4))


def other_format(folder: Path) -> None:
    path = folder / SIDECAR
    path.write_bytes(path.read_bytes().replace(b"packed experts, 1", b"packed experts, 9"))


def other_bits_of_the_header(folder: Path) -> None:
    path = folder / SIDECAR
    raw = bytearray(path.read_bytes())
    place = raw.index(b"fingerprint") + 20
    raw[place] ^= 1
    path.write_bytes(raw)


def last_word(folder: Path) -> None:
    path = folder / SIDECAR
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1  # a checksum of the last layer
    path.write_bytes(raw)


def not_a_file_of_this_kind(folder: Path) -> None:
    (folder / SIDECAR).write_bytes(b"\xff" * 10000)


def a_folder(folder: Path) -> None:
    (folder / SIDECAR).unlink()
    (folder / SIDECAR).mkdir()


@pytest.mark.spec("STO-042")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (other_seed, "other weights"),
        (one_scale, "other weights"),
        (other_experts, "other weights"),
        (other_format, "format"),
        (other_bits_of_the_header, "other weights"),
        (last_word, "checksums of layer 1 are damaged"),
        (not_a_file_of_this_kind, "not a safetensors file"),
        (a_folder, "not a regular file"),
    ],
)
def test_a_sidecar_that_is_not_of_this_checkpoint_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    folder, _ = make(tmp_path / "model", RECIPE)
    path = pack(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_experts(open_checkpoint(folder), "pread")
    assert str(path) in str(caught.value)


@pytest.mark.spec("STO-042")
@given(data=st.data())
def test_a_truncated_sidecar_is_refused_wherever_it_ends(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        make(folder, RECIPE)
    path = pack(folder)
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(CheckpointError, match=str(path)):
        open_experts(open_checkpoint(folder), "pread")
    path.unlink()


@pytest.mark.spec("STO-043")
@pytest.mark.parametrize("mode", READ_MODES)
@given(layer=st.integers(0, 1), expert=st.integers(0, 2), place=st.integers(0), bit=st.integers(0, 7))
def test_a_changed_bit_is_found_when_its_expert_is_first_read(
    tmp_path: Path, mode: ReadMode, layer: int, expert: int, place: int, bit: int
) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        make(folder, RECIPE)
        pack(folder)
    checkpoint = open_checkpoint(folder)
    changed = damaged_copy(checkpoint, tmp_path / "changed", layer, expert, place, bit)
    files = open_experts(replace(checkpoint, packed=changed), mode)
    for other in range(RECIPE.experts):
        slot = np.empty(files.stores[layer].layout.nbytes, np.uint8)
        if other == expert:
            for _ in range(2):
                with pytest.raises(CheckpointError, match=f"{changed}: layer {layer} expert {expert}: bad checksum"):
                    files.stores[layer].read_into(other, slot)
        else:
            files.stores[layer].read_into(other, slot)
    files.close()


def damaged_copy(checkpoint: Checkpoint, path: Path, layer: int, expert: int, place: int, bit: int) -> Path:
    assert checkpoint.packed is not None
    raw = bytearray(checkpoint.packed.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8:start])[f"layers.{layer}.experts"]
    nbytes = find_experts(checkpoint, layer, checkpoint.config.moe_layers[layer])[0].nbytes
    raw[start + entry["data_offsets"][0] + expert * entry["shape"][1] + place % nbytes] ^= 1 << bit
    path.write_bytes(raw)
    return path
