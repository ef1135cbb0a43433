"""The packed sidecar: each expert of a checkpoint as one aligned range of one file, `experts.edge0` beside it.

In a checkpoint an expert is nine ranges at any byte; here it is one, at a multiple of 4096, in the order in which a
slot holds it, so a direct read goes straight into the slot. The file is a safetensors file: `layers.N.experts`, bytes
[experts, stride]; `layers.N.checksums`, words [experts + 1], the last of which seals the others; and metadata that
says which format it is and from which weights it was made.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8, UInt32

from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, ExpertLayout, ExpertStore, ReadMode
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.expert_store import ExpertFiles, FileExpertStore, Piece, close_all, find_experts
from edge0_ref.readers import BLOCK, RangeReader, open_for_reading, open_reader, read_exactly
from edge0_ref.safetensors_header import read_header

SIDECAR = "experts.edge0"
FORMAT = "edge0 packed experts, 1"
SAMPLE_BYTES = 64


@dataclass(frozen=True)
class PackedLayer:
    """Where a layer's experts lie: expert e at `offset + e * stride`, its checksum in word e at `checksums`."""

    layout: ExpertLayout
    num_experts: int
    offset: int
    checksums: int

    @property
    def stride(self) -> int:
        return stride_of(self.layout)


def stride_of(layout: ExpertLayout) -> int:
    """[STO-040] An expert's bytes, rounded up to whole blocks; zeros follow it."""
    return -(-layout.nbytes // BLOCK) * BLOCK


def checksum(expert: UInt8[np.ndarray, " nbytes"]) -> int:
    """[STO-041] CRC-32 of the sums of its 4096-byte blocks, each over 512 little-endian words of 64 bits, mod 2^64.

    Bytes after the last whole block follow the sums. A CRC of all bytes would take as long as reading them; a sum sees
    a changed bit and a lost block, and the CRC over the sums a block in another's place.

    >>> hex(checksum(np.arange(4100, dtype=np.uint16).astype(np.uint8)))
    '0x3111ce31'
    """
    whole = expert.nbytes // BLOCK * BLOCK
    words = expert[:whole].view("<u8")
    sums = np.add.reduceat(words, np.arange(0, words.size, BLOCK // 8))  # quicker than a reduce of rows
    return zlib.crc32(expert[whole:].data, zlib.crc32(sums.data))


def seal(checksums: UInt32[np.ndarray, " experts"]) -> int:
    """What follows a layer's checksums once all its experts are on the disk. Never 0, which a new file holds there."""
    return zlib.crc32(checksums.astype("<u4").data) or 1


def fingerprint(checkpoint: Checkpoint) -> str:
    """[STO-042] SHA-256 over geometry, tensor names, and 64 bytes of each range of each layer's first and last expert.

    No times, no paths, no offsets: a copy, or the same weights in other shards, have the same fingerprint.
    """
    digest = hashlib.sha256()
    for layer, moe in checkpoint.config.moe_layers.items():
        layout, pieces = find_experts(checkpoint, layer, moe)
        digest.update(f"{layer} {moe.num_experts} {layout}\n".encode())
        for piece in pieces:
            digest.update(f"{piece.tensor}\n".encode())
            sample = np.empty((2, min(SAMPLE_BYTES, piece.nbytes)), np.uint8)
            with open_for_reading(piece.path) as file:
                for row, expert in zip(sample, (0, moe.num_experts - 1), strict=True):
                    try:
                        read_exactly(file, piece.offset + expert * piece.stride, row.data)
                    except OSError as error:
                        raise ReadError(f"{piece.path}: reading {piece.tensor} failed: {error}") from error
            digest.update(sample.tobytes())
    return digest.hexdigest()


def make_header(checkpoint: Checkpoint) -> tuple[bytes, dict[int, PackedLayer], int]:
    """[STO-040] The header of a checkpoint's sidecar, padded to whole blocks; its layers; the size of the file."""
    found = {layer: find_experts(checkpoint, layer, moe)[0] for layer, moe in checkpoint.config.moe_layers.items()}
    counts = {layer: moe.num_experts for layer, moe in checkpoint.config.moe_layers.items()}
    entries: dict[str, object] = {"__metadata__": {"format": FORMAT, "fingerprint": fingerprint(checkpoint)}}
    places, end = {}, 0
    for name, dtype, size in (("experts", "U8", 1), ("checksums", "U32", 4)):
        for layer, layout in found.items():
            shape = [counts[layer], stride_of(layout)] if name == "experts" else [counts[layer] + 1]
            places[layer, name], end = end, end + size * int(np.prod(shape, dtype=np.int64))
            tensor = {"dtype": dtype, "shape": shape, "data_offsets": [places[layer, name], end]}
            entries[f"layers.{layer}.{name}"] = tensor
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % BLOCK)
    first = 8 + len(text)
    layers = {
        layer: PackedLayer(layout, counts[layer], first + places[layer, "experts"], first + places[layer, "checksums"])
        for layer, layout in found.items()
    }
    return len(text).to_bytes(8, "little") + text, layers, first + end


class PackedExpertStore(FileExpertStore):
    """[STO-043] A layer's experts in the sidecar, one range each, held against its checksum when it is first read."""

    def __init__(
        self, layer: int, packed: PackedLayer, checksums: Array, path: Path, readers: Mapping[Path, RangeReader]
    ) -> None:
        nbytes = packed.layout.nbytes
        pieces = [Piece(f"layers.{layer}.experts", path, packed.offset, nbytes, packed.stride, 0)]
        super().__init__(layer, packed.num_experts, packed.layout, pieces, readers)
        self._path, self._checksums = path, checksums
        self._checked = bytearray(packed.num_experts)

    def check(self, expert: int, slot: Array) -> None:
        """Raises CheckpointError for other bytes than were packed."""
        if self._checked[expert]:
            return
        if checksum(slot) != self._checksums[expert]:
            raise CheckpointError(
                f"{self._path}: layer {self.layer} expert {expert}: bad checksum, the file is damaged; "
                "`edge0 pack` makes it anew"
            )
        super().check(expert, slot)
        self._checked[expert] = 1


class PackedFiles:
    """[STO-042] All layers' stores over the sidecar. Raises CheckpointError for one that is not of this checkpoint."""

    def __init__(self, checkpoint: Checkpoint, path: Path, mode: ReadMode) -> None:
        layers = verify_sidecar(checkpoint, path)
        checksums = {layer: read_checksums(path, layer, packed) for layer, packed in layers.items()}
        self._readers = {path: open_reader(path, mode)}
        self.stores = {
            layer: PackedExpertStore(layer, packed, checksums[layer], path, self._readers)
            for layer, packed in layers.items()
        }

    def close(self) -> None:
        close_all(self._readers)


def verify_sidecar(checkpoint: Checkpoint, path: Path) -> dict[int, PackedLayer]:
    """[STO-042] The layers of a sidecar whose header is that of this checkpoint. Raises CheckpointError."""
    _, metadata = read_header(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {metadata.get('format')!r}, wanted {FORMAT!r}")
    wanted, layers, _ = make_header(checkpoint)
    with open(path, "rb") as file:
        header = file.read(len(wanted))
    if header != wanted:
        raise CheckpointError(
            f"{path}: packed from other weights than those of {checkpoint.folder}; `edge0 pack` makes it anew"
        )
    return layers


def read_checksums(path: Path, layer: int, packed: PackedLayer) -> UInt32[np.ndarray, " experts"]:
    """A layer's checksums. Raises CheckpointError unless they are sealed."""
    words = np.empty(packed.num_experts + 1, "<u4")
    with open_for_reading(path) as file:
        try:
            read_exactly(file, packed.checksums, words.view(np.uint8).data)
        except OSError as error:
            raise ReadError(f"{path}: reading the checksums of layer {layer} failed: {error}") from error
    if words[-1] != seal(words[:-1]):
        raise CheckpointError(f"{path}: the checksums of layer {layer} are damaged; `edge0 pack` makes the file anew")
    return words[:-1].astype(np.uint32)


@dataclass(frozen=True)
class WrappedFiles:
    """Files whose reads go through stores of someone who watches them."""

    files: ExpertFiles | PackedFiles
    stores: Mapping[int, ExpertStore]

    def close(self) -> None:
        self.files.close()


def open_experts(checkpoint: Checkpoint, mode: ReadMode) -> ExpertFiles | PackedFiles | WrappedFiles:
    """[STO-044] The sidecar if the checkpoint has one, else the checkpoint's own files."""
    files: ExpertFiles | PackedFiles
    if checkpoint.packed is None:
        files = ExpertFiles(checkpoint, mode)
    else:
        files = PackedFiles(checkpoint, checkpoint.packed, mode)
    if checkpoint.wrap_store is None:
        return files
    return WrappedFiles(files, {layer: checkpoint.wrap_store(layer, store) for layer, store in files.stores.items()})
