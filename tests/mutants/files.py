"""Mutants of chapter 5: headers, folders, reads."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_ref import checkpoint, config, expert_store, inventory, readers, safetensors_header
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import QuantizationConfig
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.expert_store import FileExpertStore
from edge0_ref.families import qwen3_5_moe
from edge0_ref.prefetch import Prefetcher, Read
from edge0_ref.safetensors_header import TensorInfo, read_header
from tests.mutants.replacing import replace_everywhere


def the_last_of_two_names_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safetensors_header, "parse_object", lambda text, origin: config.json.loads(text))


def holes_and_overlaps_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(safetensors_header, "_check_extents", lambda path, tensors, start, size: None)


def weights_read_when_a_folder_is_opened(patch: pytest.MonkeyPatch) -> None:
    original = inventory.verify

    def verify(opened: Checkpoint) -> None:
        original(opened)
        for name in opened.config.tensors.vectors:
            opened.read(name)

    patch.setattr(inventory, "verify", verify)


def half_a_quantisation_is_a_float(patch: pytest.MonkeyPatch) -> None:
    original = inventory.verify

    def verify(opened: Checkpoint) -> None:
        try:
            original(opened)
        except CheckpointError as error:
            if "biases is missing" not in str(error) and "scales is missing" not in str(error):
                raise

    patch.setattr(inventory, "verify", verify)


def quantisation_of_the_config_unread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QuantizationConfig, "of", lambda self, module: None)


def all_shards(folder: Path) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= read_header(path)[0]
    return found


def every_file_beside_the_index_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inventory, "read_shards", lambda folder: (all_shards(folder), {}))


def a_stale_index_made_good(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint.read_shards

    def read_shards(folder: Path) -> Any:
        try:
            return original(folder)
        except CheckpointError as error:
            if "does not hold it" not in str(error):
                raise
            return all_shards(folder), {}

    patch.setattr(inventory, "read_shards", read_shards)


def tensors_nobody_knows_ignored(patch: pytest.MonkeyPatch) -> None:
    original = inventory.verify

    def verify(opened: Checkpoint) -> None:
        try:
            original(opened)
        except CheckpointError as error:
            if "nothing in this architecture uses" not in str(error):
                raise

    patch.setattr(inventory, "verify", verify)


def skipped_tensors_not_listed(patch: pytest.MonkeyPatch) -> None:
    original = inventory.open_checkpoint
    replace_everywhere(patch, original, lambda folder: replace(original(folder), skipped=()))


def any_architecture_taken_for_qwen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(qwen3_5_moe, "matches", lambda model_type, architectures: True)


def coefficients_of_one_projection_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(expert_store, "COEFFICIENT_NAMES", dict.fromkeys(("F32", "F16", "BF16"), "bfloat16"))


def ranges_changed(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Find each range of an expert elsewhere: change(piece, all pieces)."""
    original = expert_store.find_experts

    def find(opened: Checkpoint, layer: int, moe: Any) -> Any:
        layout, pieces = original(opened, layer, moe)
        return layout, [change(piece, pieces) for piece in pieces]

    patch.setattr(expert_store, "find_experts", find)


def ranges_one_row_late(patch: pytest.MonkeyPatch) -> None:
    ranges_changed(patch, lambda piece, _: replace(piece, offset=piece.offset + 4))


def every_range_in_the_first_shard(patch: pytest.MonkeyPatch) -> None:
    ranges_changed(patch, lambda piece, pieces: replace(piece, path=pieces[0].path))


def experts_of_the_next_layer(patch: pytest.MonkeyPatch) -> None:
    original = expert_store.find_experts

    def find(opened: Checkpoint, layer: int, moe: Any) -> Any:
        layers = list(opened.config.moe_layers)
        return original(opened, layers[(layers.index(layer) + 1) % len(layers)], moe)

    patch.setattr(expert_store, "find_experts", find)


def nan_scales_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileExpertStore, "check", lambda store, expert, slot: None)


def read_the_next_expert(patch: pytest.MonkeyPatch, stores: type[FileExpertStore]) -> None:
    """Of one kind of store."""
    original = stores.read_unchecked

    def read_unchecked(store: FileExpertStore, expert: int, slot: Any) -> None:
        original(store, (expert + 1) % store.num_experts, slot)

    patch.setattr(stores, "read_unchecked", read_unchecked)


def the_next_expert_is_read(patch: pytest.MonkeyPatch) -> None:
    read_the_next_expert(patch, FileExpertStore)


def a_short_read_is_zeros(patch: pytest.MonkeyPatch) -> None:
    original = readers.read_exactly

    def read_exactly(file: int, offset: int, buffer: memoryview) -> None:
        try:
            original(file, offset, buffer)
        except OSError:
            buffer[:] = bytes(len(buffer))

    patch.setattr(readers, "read_exactly", read_exactly)


def mmap_reads_one_byte_late(patch: pytest.MonkeyPatch) -> None:
    original = readers.MmapReader.read_into
    patch.setattr(readers.MmapReader, "read_into", lambda reader, offset, buffer: original(reader, offset + 1, buffer))


def refused_direct_reads_go_through_the_cache(patch: pytest.MonkeyPatch) -> None:
    original = readers.open_reader

    def open_reader(path: Path, mode: Any) -> Any:
        try:
            return original(path, mode)
        except ReadError:
            return original(path, "pread")

    replace_everywhere(patch, original, open_reader)


def urgent_reads_wait_their_turn(patch: pytest.MonkeyPatch) -> None:
    original = Prefetcher.submit

    def submit(self: Prefetcher, read: Read, urgency: str) -> Read:
        return original(self, read, "ahead")

    patch.setattr(Prefetcher, "submit", submit)


def a_failed_read_is_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    def wait(read: Read) -> None:
        if read.claim.acquire(blocking=False):
            read._fill()
        read.join()
        if not read.done:
            raise ReadError("the read ahead failed")

    patch.setattr(Read, "wait", wait)


def waiting_ends_before_the_bytes_are_there(patch: pytest.MonkeyPatch) -> None:
    def wait(read: Read) -> None:
        read.slot[: len(read.slot) // 2] = np.uint8(0)

    patch.setattr(Read, "wait", wait)


def bytes_read_ahead_taken_as_checked(patch: pytest.MonkeyPatch) -> None:
    def check(read: Read) -> None:
        read.done = read.done or read.loaded

    patch.setattr(Read, "check", check)


def a_check_for_another_fails_the_call(patch: pytest.MonkeyPatch) -> None:
    def wait(prefetcher: Prefetcher, read: Read) -> float:
        while (read.next_up or read.claim.locked()) and not read.loaded and prefetcher._unchecked:
            other = prefetcher._unchecked.popleft()()
            if other is not None:
                other.check()
        read.wait()
        return 0.0

    patch.setattr(Prefetcher, "wait", wait)


def checks_go_before_a_read_that_nobody_has_begun(patch: pytest.MonkeyPatch) -> None:
    original = Prefetcher.wait

    def wait(prefetcher: Prefetcher, read: Read) -> float:
        read.next_up = True
        return original(prefetcher, read)

    patch.setattr(Prefetcher, "wait", wait)


def readers_at_rest_keep_their_last_read(patch: pytest.MonkeyPatch) -> None:
    original, kept = Read.run, dict[int, Read]()

    def run(read: Read) -> None:
        kept[threading.get_ident()] = read
        original(read)

    patch.setattr(Read, "run", run)


def files_closed_again_after_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    def close_all(readers: Any) -> None:
        for reader in readers.values():
            reader.close()
        readers.clear()

    replace_everywhere(patch, expert_store.close_all, close_all)


MUTANTS = {
    the_last_of_two_names_wins: "STO-001",
    holes_and_overlaps_accepted: "STO-002",
    weights_read_when_a_folder_is_opened: "STO-003",
    half_a_quantisation_is_a_float: "STO-004",
    quantisation_of_the_config_unread: "STO-005",
    every_file_beside_the_index_read: "STO-006",
    a_stale_index_made_good: "STO-006",
    tensors_nobody_knows_ignored: "STO-007",
    skipped_tensors_not_listed: "STO-008",
    any_architecture_taken_for_qwen: "STO-009",
    coefficients_of_one_projection_for_all: "STO-013",
    ranges_one_row_late: "STO-011",
    every_range_in_the_first_shard: "STO-011",
    experts_of_the_next_layer: "STO-011",
    the_next_expert_is_read: "STO-011",
    nan_scales_pass: "STO-012",
    a_short_read_is_zeros: "STO-020",
    mmap_reads_one_byte_late: "STO-021",
    refused_direct_reads_go_through_the_cache: "STO-022",
    urgent_reads_wait_their_turn: "STO-030",
    checks_go_before_a_read_that_nobody_has_begun: "STO-030",
    readers_at_rest_keep_their_last_read: "ENG-030",
    a_failed_read_is_not_tried_again: "STO-031",
    waiting_ends_before_the_bytes_are_there: "STO-031",
    bytes_read_ahead_taken_as_checked: "STO-033",
    a_check_for_another_fails_the_call: "STO-033",
    files_closed_again_after_an_interrupt: "BCK-010",
}
