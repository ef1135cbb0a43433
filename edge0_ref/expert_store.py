"""(layer, expert) -> bytes in a slot: where a layer's experts lie in the files, and how they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import MoeConfig
from edge0_ref.contract import Array, ExpertLayout, ReadMode
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.readers import RangeReader, open_reader

EXPONENTS: dict[str, np.uint16 | np.uint32] = {
    "float32": np.uint32(0x7F800000),
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
}
COEFFICIENT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Piece:
    """A range of an expert: expert e's `nbytes` bytes start at `offset + e * stride` of `path`."""

    tensor: str
    path: Path
    offset: int
    nbytes: int
    stride: int
    slot_offset: int


class FileExpertStore:
    """[STO-011] One layer's routed experts, read as ranges: nine in a checkpoint, which may lie in different shards."""

    def __init__(
        self,
        layer: int,
        num_experts: int,
        layout: ExpertLayout,
        pieces: list[Piece],
        readers: Mapping[Path, RangeReader],
    ) -> None:
        self.layer, self._num_experts, self._layout = layer, num_experts, layout
        self._ranges = [(piece, readers[piece.path]) for piece in pieces]
        self._readers = readers  # empty once they are closed
        self._first_coefficient = next(offset for _, part, _, offset, _ in layout.pieces() if part != "weight")
        self._exponent = EXPONENTS[layout.coefficient_dtype]

    @property
    def num_experts(self) -> int:
        return self._num_experts

    @property
    def layout(self) -> ExpertLayout:
        return self._layout

    def read_into(self, expert: int, slot: Array) -> None:
        """Raises ReadError for a failing disk or a shrunken file, CheckpointError for NaN coefficients."""
        self.read_unchecked(expert, slot)
        self.check(expert, slot)

    def read_unchecked(self, expert: int, slot: Array) -> None:
        """[STO-033] Raises ReadError."""
        if not 0 <= expert < self._num_experts:
            raise IndexError(f"layer {self.layer}: expert {expert} of {self._num_experts}")
        if not self._readers:
            raise ReadError(f"layer {self.layer} expert {expert}: the model's files are closed")
        view = slot.data
        for piece, reader in self._ranges:
            target = view[piece.slot_offset : piece.slot_offset + piece.nbytes]
            try:
                reader.read_into(piece.offset + expert * piece.stride, target)
            except OSError as error:
                raise ReadError(
                    f"layer {self.layer} expert {expert}: reading {piece.tensor} from {piece.path} failed: {error}"
                ) from error

    def check(self, expert: int, slot: Array) -> None:
        """[STO-012] NaN or infinite scales are an error of the file, found at the first read of that expert."""
        patterns = slot[self._first_coefficient :].view(self._exponent.dtype)
        if ((patterns & self._exponent) == self._exponent).any():  # all ones: no finite number
            raise CheckpointError(f"layer {self.layer} expert {expert}: scales or biases hold NaN or infinity")


class ExpertFiles:
    """All layers' stores over one set of open files: the checkpoint's own shards."""

    def __init__(self, checkpoint: Checkpoint, mode: ReadMode) -> None:
        self._readers: dict[Path, RangeReader] = {}
        self.stores: dict[int, FileExpertStore] = {}
        try:
            for layer, moe in checkpoint.config.moe_layers.items():
                layout, pieces = find_experts(checkpoint, layer, moe)
                for piece in pieces:
                    if piece.path not in self._readers:
                        self._readers[piece.path] = open_reader(piece.path, mode)
                self.stores[layer] = FileExpertStore(layer, moe.num_experts, layout, pieces, self._readers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        close_all(self._readers)


def close_all(readers: dict[Path, RangeReader]) -> None:
    """[BCK-010] Close each once, even after an interrupted attempt: its number may be another file's by now."""
    while readers:
        readers.popitem()[1].close()


def find_experts(checkpoint: Checkpoint, layer: int, moe: MoeConfig) -> tuple[ExpertLayout, list[Piece]]:
    """[STO-010] Layout and ranges of a layer's experts. Raises CheckpointError naming the tensor that disagrees."""
    module = _experts_module(checkpoint, layer)
    hidden = checkpoint.config.hidden_size
    shapes = (("gate_proj", moe.inner_size, hidden), ("up_proj", moe.inner_size, hidden))
    found = set()
    for name, rows, cols in (*shapes, ("down_proj", hidden, moe.inner_size)):
        path = f"{module}.{name}"
        if f"{path}.weight" in checkpoint and f"{path}.scales" not in checkpoint:
            raise CheckpointError(f"{path}: routed experts are not quantised; edge0 streams int4 or int8 experts")
        stacked = checkpoint.info(f"{path}.weight").shape[:1]
        if stacked != (moe.num_experts,):
            raise CheckpointError(f"{path}.weight: {[*stacked]} experts, config.json says {moe.num_experts}")
        bits, group_size = checkpoint.quantization(path, (moe.num_experts, rows), cols)
        found.add((bits, group_size, COEFFICIENT_NAMES[checkpoint.info(f"{path}.scales").dtype]))
    if len(found) != 1:
        raise CheckpointError(f"{module}: the three projections differ in bits, group size or dtype: {sorted(found)}")
    bits, group_size, coefficient = found.pop()
    layout = ExpertLayout(hidden, moe.inner_size, bits, group_size, coefficient)  # type: ignore[arg-type]
    pieces = []
    for name, part, _, offset, length in layout.pieces():
        info = checkpoint.info(f"{module}.{name}.{part}")
        pieces.append(Piece(info.name, info.path, info.offset, length, length, offset))
    return layout, pieces


def _experts_module(checkpoint: Checkpoint, layer: int) -> str:
    candidates = checkpoint.config.tensors.experts[layer]
    for module in candidates:
        if f"{module}.gate_proj.weight" in checkpoint:
            return module
    mlp = checkpoint.config.layers[layer].mlp_path
    if f"{mlp}.gate_proj.weight" in checkpoint:
        raise CheckpointError(f"layer {layer} is dense ({mlp}.gate_proj), config.json promises routed experts")
    if any(name.startswith(f"{mlp}.experts.0.") for name in checkpoint.tensors):
        raise CheckpointError(f"layer {layer}: experts are stored one by one; edge0 reads them stacked")
    raise CheckpointError(f"layer {layer}: no routed experts; wanted {' or '.join(candidates)}.gate_proj.weight")
