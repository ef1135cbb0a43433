"""Opening a model folder: config, shards and tensor table held against each other, from headers alone.

After this no later step meets a missing tensor, a wrong shape or a tensor nobody knows.
"""

from pathlib import Path

from edge0_ref.checkpoint import Checkpoint, read_shards
from edge0_ref.config import read_config
from edge0_ref.errors import CheckpointError
from edge0_ref.expert_store import find_experts
from edge0_ref.json_files import is_there
from edge0_ref.packed import SIDECAR


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """[STO-003] A verified checkpoint. Raises CheckpointError, or UnsupportedModelError naming the architecture."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_config(folder)
    tensors, metadata = read_shards(folder)
    kept = {name: info for name, info in tensors.items() if not name.startswith(config.skipped)}
    skipped = tuple(name for name in tensors if name.startswith(config.skipped))
    head_paths = tuple(f"{layer.mlp_path}.prerouter." for layer in config.layers)
    heads = {name: kept.pop(name) for name in list(kept) if name.startswith(head_paths)}
    packed = folder / SIDECAR if is_there(folder / SIDECAR) else None
    checkpoint = Checkpoint(folder, config, kept, skipped, metadata, heads, packed)
    verify(checkpoint)
    return checkpoint


def verify(checkpoint: Checkpoint) -> None:
    """[STO-007] Every promised tensor is there in its shape, and no other. Raises CheckpointError, naming one."""
    known: set[str] = set()
    for layer, moe in checkpoint.config.moe_layers.items():
        _, pieces = find_experts(checkpoint, layer, moe)
        known |= {piece.tensor for piece in pieces}
    for module, (rows, cols) in checkpoint.config.tensors.linears.items():
        if checkpoint.is_stacked(module):
            stacks = checkpoint.config.tensors.stacks[module]
            check_float(checkpoint, stacks.keys, (stacks.heads, cols, stacks.key_size))
            check_float(checkpoint, stacks.values, (stacks.heads, stacks.value_size, cols))
            known |= {stacks.keys, stacks.values}
        elif f"{module}.scales" in checkpoint or f"{module}.biases" in checkpoint:
            checkpoint.quantization(module, (rows,), cols)
            known |= {f"{module}.{part}" for part in ("weight", "scales", "biases")}
        else:
            check_float(checkpoint, f"{module}.weight", (rows, cols))
            known.add(f"{module}.weight")
    for name, shape in checkpoint.config.tensors.vectors.items():
        check_float(checkpoint, name, shape)
        known.add(name)
    unknown = sorted(set(checkpoint.tensors) - known)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(f"{checkpoint.folder}: nothing in this architecture uses the tensor {unknown[0]}{more}")


def check_float(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    info = checkpoint.info(name)
    if info.dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(f"{name}: dtype {info.dtype}, wanted F32, F16 or BF16")
    if info.shape != shape:
        raise CheckpointError(f"{name}: shape {list(info.shape)}, config.json says {list(shape)}")
