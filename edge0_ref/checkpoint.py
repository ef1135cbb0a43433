"""A checkpoint: config, shards, and every tensor's place, checked against each other before a weight is read."""

import reprlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge0_ref.bits import widen
from edge0_ref.config import HeadStacks, ModelConfig
from edge0_ref.contract import GROUP_SIZES, Array, QuantizedMatrix, WrapStore
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.json_files import is_there, read_json
from edge0_ref.readers import open_for_reading, read_exactly
from edge0_ref.safetensors_header import TensorInfo, read_header


@dataclass(frozen=True)
class Checkpoint:
    """[STO-003] A model folder, opened: nothing of a tensor is read before it is asked for.

    tensors: name -> place, without those the family skips; skipped: names of those, so that a command can say so;
    heads: tensors of prerouter heads that came in the model's own files; packed: the sidecar to read experts from;
    wrap_store: put around each layer's store, by whoever watches reads.
    """

    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    skipped: tuple[str, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    heads: dict[str, TensorInfo] = field(default_factory=dict)
    packed: Path | None = None
    wrap_store: WrapStore | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: the tensor {name} is missing")
        return self.tensors[name]

    def read(self, name: str) -> Array:
        """The tensor in its own dtype (bfloat16 as uint16 patterns)."""
        info = self.info(name)
        data = np.empty(info.nbytes, np.uint8)
        with open_for_reading(info.path) as file:
            try:
                read_exactly(file, info.offset, data.data)
            except OSError as error:
                raise ReadError(f"{info.path}: reading {name} failed: {error}") from error
        return data.view(info.numpy_dtype).reshape(info.shape)

    def vector(self, name: str) -> Array:
        """A float tensor widened to float32. Raises CheckpointError for NaN and infinity."""
        values = widen(self.read(name))
        if not np.isfinite(values).all():
            raise CheckpointError(f"{name}: holds NaN or infinity")
        return values

    def matrix(self, module: str) -> QuantizedMatrix | Array:
        """[STO-004] A linear layer's weight [rows, cols]: quantised if `<module>.scales` exists, float32 otherwise."""
        rows, cols = self.config.tensors.linears[module]
        if self.is_stacked(module):
            return self._from_stacks(self.config.tensors.stacks[module])
        if f"{module}.scales" not in self.tensors:
            return self.vector(f"{module}.weight")
        bits, group_size = self.quantization(module, (rows,), cols)
        packed, scales, biases = (self.read(f"{module}.{part}") for part in ("weight", "scales", "biases"))
        for part, values in (("scales", scales), ("biases", biases)):
            if not np.isfinite(widen(values)).all():
                raise CheckpointError(f"{module}.{part}: holds NaN or infinity")
        return QuantizedMatrix(packed, scales, biases, bits, group_size)

    def is_stacked(self, module: str) -> bool:
        """Whether the file holds this linear layer as two stacks of heads."""
        return module in self.config.tensors.stacks and f"{module}.weight" not in self.tensors

    def _from_stacks(self, stacks: HeadStacks) -> Array:
        """[DEC-061] float32 [heads * (key_size + value_size), cols]: each head's key rows, then its value rows."""
        keys, values = self.vector(stacks.keys).swapaxes(1, 2), self.vector(stacks.values)
        return np.concatenate([keys, values], axis=1).reshape(-1, values.shape[2])

    def quantization(self, module: str, leading: tuple[int, ...], cols: int) -> tuple[int, int]:
        """[STO-005] (bits, group_size) from the shapes of a module's three tensors; the config must agree."""
        weight, scales, biases = (self.info(f"{module}.{part}") for part in ("weight", "scales", "biases"))
        if weight.dtype != "U32":
            raise CheckpointError(f"{weight.name}: dtype {weight.dtype}, wanted U32 codes")
        if scales.dtype != biases.dtype or scales.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(f"{scales.name}: {scales.dtype}, biases {biases.dtype}; wanted one of F32, F16, BF16")
        for info in (weight, scales, biases):
            if info.shape[:-1] != leading or not info.shape:
                raise CheckpointError(f"{info.name}: shape {list(info.shape)}, wanted {[*leading, '...']}")
        if scales.shape != biases.shape:
            raise CheckpointError(f"{biases.name}: shape {list(biases.shape)}, scales have {list(scales.shape)}")
        words, groups = weight.shape[-1], scales.shape[-1]
        bits, group_size = words * 32 // cols, cols // max(groups, 1)
        if cols % min(GROUP_SIZES):
            wanted = f"wanted groups of {', '.join(map(str, GROUP_SIZES[:-1]))} or {GROUP_SIZES[-1]}"
            raise CheckpointError(f"{weight.name}: config.json says {cols} weights per row, {wanted}")
        if words * 32 != bits * cols or bits not in (4, 8):
            raise CheckpointError(
                f"{weight.name}: {words} words per row, needs {cols // 8} (int4) or {cols // 4} (int8)"
            )
        if groups * group_size != cols or group_size not in GROUP_SIZES:
            raise CheckpointError(f"{scales.name}: {groups} groups per row of {cols}, wanted groups of 32, 64 or 128")
        promised = self.config.quantization.of(module)
        if promised is not None and promised != (bits, group_size):
            raise CheckpointError(
                f"{module}: the shapes say {bits} bits in groups of {group_size}, "
                f"config.json says {promised[0]} bits in groups of {promised[1]}"
            )
        return bits, group_size


def read_shards(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """[STO-006] The index decides which file holds a tensor; without one, `model.safetensors` holds all."""
    index = folder / "model.safetensors.index.json"
    if not is_there(index):
        single = folder / "model.safetensors"
        if not is_there(single):
            raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json")
        return read_header(single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    headers: dict[str, dict[str, TensorInfo]] = {}
    tensors, metadata = {}, {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not 0 < len(file.encode(errors="replace")) < 256:
            raise CheckpointError(f"{index}: {name!r} is in {reprlib.repr(file)}, wanted a file name")
        if file not in headers:
            if not is_there(folder / file):
                raise CheckpointError(f"{index}: names the shard {file}, which is missing")
            headers[file], shard_metadata = read_header(folder / file)
            metadata.update(shard_metadata)
        if name not in headers[file]:
            raise CheckpointError(f"{index}: says {name!r} is in {file}, which does not hold it")
        tensors[name] = headers[file][name]
    return tensors, metadata
