"""Mutants of the packed sidecar, of the default read mode, and of checkpoints that are being made."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edge0_ref import inventory, packed
from edge0_ref.app import read_mode, synth
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array
from edge0_ref.packed import PackedExpertStore, PackedLayer
from tests.mutants.files import read_the_next_expert
from tests.mutants.replacing import replace_everywhere


def experts_packed_without_gaps(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, packed.stride_of, lambda layout: layout.nbytes)


def a_checksum_that_is_a_sum(patch: pytest.MonkeyPatch) -> None:
    def checksum(expert: Array) -> int:
        return int(np.add.reduce(expert, dtype=np.uint32))

    replace_everywhere(patch, packed.checksum, checksum)


def a_stale_sidecar_used(patch: pytest.MonkeyPatch) -> None:
    def verify_sidecar(checkpoint: Checkpoint, path: Path) -> dict[int, PackedLayer]:
        packed.read_header(path)
        return packed.make_header(checkpoint)[1]

    replace_everywhere(patch, packed.verify_sidecar, verify_sidecar)


def a_link_to_nothing_taken_as_no_sidecar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inventory, "is_there", Path.exists)


def checksums_never_compared(patch: pytest.MonkeyPatch) -> None:
    def check(store: PackedExpertStore, expert: int, slot: Array) -> None:
        pass

    patch.setattr(PackedExpertStore, "check", check)


def the_next_expert_of_a_sidecar_read(patch: pytest.MonkeyPatch) -> None:
    read_the_next_expert(patch, PackedExpertStore)


def a_sidecar_named_before_it_is_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "with_name", lambda path, name: path.parent / name.removesuffix(".partial"))


def the_measured_mode_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read_mode, "measured_mode", lambda cache, path: None)


def what_a_failed_run_wrote_stays(patch: pytest.MonkeyPatch) -> None:
    lazy = SimpleNamespace(rmtree=lambda path, ignore_errors: None, disk_usage=shutil.disk_usage)
    patch.setattr(synth, "shutil", lazy)


MUTANTS = {
    experts_packed_without_gaps: "STO-040",
    a_checksum_that_is_a_sum: "STO-041",
    a_stale_sidecar_used: "STO-042",
    a_link_to_nothing_taken_as_no_sidecar: "STO-042",
    checksums_never_compared: "STO-043",
    the_next_expert_of_a_sidecar_read: "STO-044",
    a_sidecar_named_before_it_is_whole: "STO-045",
    the_measured_mode_forgotten: "STO-046",
    what_a_failed_run_wrote_stays: "STO-047",
}
