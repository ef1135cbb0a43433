"""`edge0 synth`: a checkpoint with the names, shapes, dtypes and shards of a published one, and random weights.

Everything is written in a folder of its own inside the new one; files move to their places at the end, config.json
last, so what an interrupted run leaves behind does not load.
"""

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0_ref.app.presets import GROUP_SIZE, Preset, find_preset, make_config, model_of
from edge0_ref.app.progress import Advance, byte_bar
from edge0_ref.app.random_blocks import NewTensor, RandomBlocks, Values
from edge0_ref.app.random_tokenizer import write_tokenizer
from edge0_ref.config import ModelConfig, MoeConfig
from edge0_ref.contract import ExpertLayout
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import UsageError
from edge0_ref.inventory import open_checkpoint

ASIDE = "synth.partial"
FLUSH_BYTES = 128 * 2**20  # of a file that may be in the page cache and not on the disk
MARGIN_BYTES = 64 * 2**20  # config, index, tokenizer, what a file system needs for itself

# Float tensors, by the end of their name: decays of a few tokens to a few hundred, norms near 1.
FLOATS: Mapping[str, Values] = {
    "conv1d.weight": Values("normal", spread=0.5),
    "A_log": Values("uniform", spread=1.0),
    "dt_bias": Values("uniform", spread=1.5, center=-3.0),
    "expert_bias": Values("normal", spread=0.02),
    "": Values("uniform", spread=0.2, center=1.0),
}


@dataclass(frozen=True)
class NewFile:
    """A safetensors file to be written: its tensors in the order of their bytes, and its metadata."""

    name: str
    tensors: tuple[NewTensor, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def run_synth(
    name: str, out: str | None, changes: Mapping[str, int], seed: int, *, tokenizer: bool, adapters: bool
) -> dict[str, Any]:
    """[STO-047] Write the checkpoint; what it is, for a line of JSON. Raises UsageError, and leaves nothing then."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed is {seed}, wanted 0 to 2**64 - 1")
    preset = find_preset(name)
    if out is None:
        raise UsageError("wanted --out DIR, a folder to make")
    folder = Path(out)
    config = make_config(preset, changes)
    model = model_of(config, name)
    files = [*shards_of(sorted(model_files(preset, model), key=layer_of), preset.shard_bytes)]
    extra = adapter_files(preset, model, seed) if adapters else []
    total = sum(file.nbytes for file in (*files, *extra))
    begun = claim(folder)
    start = time.perf_counter()
    try:
        check_space(folder, total)
        aside = folder / ASIDE
        (aside / "adapters").mkdir(parents=True)
        blocks = RandomBlocks(seed)
        with byte_bar(f"{name} -> {folder}", total) as advance:
            for file in (*files, *extra):
                write_file(aside / file.name, file, blocks, advance)
        finish(aside, folder, config, files, tokenizer=tokenizer, adapters=bool(extra))
    except OSError as error:
        what = f"the disk is full, {size_text(total)} are needed" if error.errno == errno.ENOSPC else error.strerror
        raise UsageError(f"{folder}: cannot be written: {what}") from None
    finally:
        shutil.rmtree(folder / ASIDE, ignore_errors=True)
        if begun and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    seconds = time.perf_counter() - start
    return {
        "model": str(folder),
        "name": name,
        "seed": seed,
        "files": len(files) + len(extra),
        "bytes": total,
        "seconds": round(seconds, 3),
        "gb_s": round(total / seconds / 1e9, 3),
    }


def claim(folder: Path) -> bool:
    """Whether the folder is new. Raises UsageError unless it is, or holds nothing but what an interrupted run left."""
    if not folder.parent.is_dir():
        raise UsageError(f"{folder}: its parent is not a folder")
    if not folder.exists():
        return True
    if not folder.is_dir() or any(path.name != ASIDE for path in folder.iterdir()):
        raise UsageError(f"{folder}: exists already; wanted a new folder, or an empty one")
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    return False


def check_space(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if free < total + MARGIN_BYTES:
        needed = f"{size_text(total + MARGIN_BYTES)} ({total + MARGIN_BYTES} bytes)"
        raise UsageError(f"{folder}: needs {needed}, the disk has {size_text(free)} free")


def model_files(preset: Preset, model: ModelConfig) -> Iterator[list[NewTensor]]:
    """The model's tensors, module by module, from its family's own table."""
    table = model.tensors
    for module, (rows, cols) in table.linears.items():
        spread = 1.0 if module == model.embedding else cols**-0.5
        if module.endswith(preset.unquantized):
            yield [NewTensor(f"{module}.weight", "BF16", (rows, cols), Values("normal", spread), module)]
        else:
            bits = 8 if module.endswith(preset.eight_bit) else 4
            yield matrix_tensors(module, (rows,), cols, spread, bits)
    for layer, paths in table.experts.items():
        experts = model.moe_layers[layer].num_experts
        (path,) = (path for path in paths if path.endswith(f".{preset.experts_name}"))
        for name, rows, cols in expert_layout(model, layer).matrix_shapes:
            yield matrix_tensors(f"{path}.{name}", (experts, rows), cols, cols**-0.5, 4)
    for name, shape in table.vectors.items():
        values = next(values for end, values in FLOATS.items() if name.endswith(end))
        yield [NewTensor(name, "BF16", shape, values, name)]


def expert_layout(model: ModelConfig, layer: int) -> ExpertLayout:
    return ExpertLayout(model.hidden_size, model.moe_layers[layer].inner_size, 4, GROUP_SIZE, "bfloat16")


def layer_of(module: list[NewTensor]) -> int:
    """A layer's tensors lie together, what belongs to no layer comes first."""
    found = re.search(r"\.layers\.(\d+)\.", module[0].name)
    return int(found[1]) if found else -1


def matrix_tensors(module: str, leading: tuple[int, ...], cols: int, spread: float, bits: int) -> list[NewTensor]:
    if cols % GROUP_SIZE:
        raise UsageError(f"{module}: {cols} weights per row, wanted groups of {GROUP_SIZE}")
    coefficients = (*leading, cols // GROUP_SIZE)
    return [
        NewTensor(f"{module}.weight", "U32", (*leading, cols * bits // 32), Values("codes"), module),
        NewTensor(f"{module}.scales", "BF16", coefficients, Values("scales", spread, bits=bits), module),
        NewTensor(f"{module}.biases", "BF16", coefficients, Values("biases", spread, bits=bits), module),
    ]


def shards_of(modules: Iterable[list[NewTensor]], shard_bytes: int | None) -> Iterator[NewFile]:
    """Files as converters cut them: in order, and a file ends before the tensor that would make it too large."""
    held: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in (tensor for module in modules for tensor in module):
        if held[-1] and shard_bytes is not None and size + tensor.nbytes > shard_bytes:
            held.append([])
            size = 0
        held[-1].append(tensor)
        size += tensor.nbytes
    for number, tensors in enumerate(held, 1):
        name = "model.safetensors" if len(held) == 1 else f"model-{number:05}-of-{len(held):05}.safetensors"
        yield NewFile(name, tuple(tensors), {"format": "mlx"})


def adapter_files(preset: Preset, model: ModelConfig, seed: int) -> list[NewFile]:
    """[PRE-010] Heads, and LoRA beside every linear layer of mixers and shared experts, as the published ones have."""
    layers = len(model.layers)
    first = max(min(preset.first_owner, layers - 2), min(model.moe_layers))
    owners = [layer for layer in range(first, layers - 1) if layer + 1 in model.moe_layers]
    settings = {
        "K": min(preset.adapter_top_k, model.top_k),
        "r": preset.rank,
        "alpha": preset.alpha,
        "owners": owners,
        "source": f"random, seed {seed}",
    }
    metadata = {"__metadata__": json.dumps(settings)}
    heads = [tensor for owner in owners for tensor in head_tensors(preset, model, owner)]
    loras = [tensor for module in lora_targets(model) for tensor in lora_tensors(preset, model, module)]
    files = [NewFile("adapters/lora.safetensors", tuple(loras), metadata)]
    return [NewFile("adapters/prerouter.safetensors", tuple(heads), metadata), *files] if heads else files


def head_tensors(preset: Preset, model: ModelConfig, owner: int) -> Iterator[NewTensor]:
    features = model.hidden_size + 2 * model.moe_layers[owner].num_experts
    experts, width = model.moe_layers[owner + 1].num_experts, preset.head_width
    shapes = {"fc1": (width, features), "fc2": (experts, width), "linear_init": (experts, features)}
    for part, shape in shapes.items():
        name = f"layers.{owner}.{part}.weight"
        yield NewTensor(name, "F16", shape, Values("normal", shape[1] ** -0.5), name)


def lora_targets(model: ModelConfig) -> list[str]:
    inside = tuple(f"{layer.mixer_path}." for layer in model.layers) + tuple(
        f"{layer.mlp_path}.{layer.mlp.shared_name}." for layer in model.layers if isinstance(layer.mlp, MoeConfig)
    )
    return [module for module in model.tensors.linears if module.startswith(inside)]


def lora_tensors(preset: Preset, model: ModelConfig, module: str) -> Iterator[NewTensor]:
    """An update of a tenth of its base: B A has the spread 0.1 of W, alpha / r counted."""
    rows, cols = model.tensors.linears[module]
    spread = 0.1 * preset.rank / preset.alpha * preset.rank**-0.5
    for name, shape, values in (
        (f"{module}.lora_A", (preset.rank, cols), Values("normal", cols**-0.5)),
        (f"{module}.lora_B", (rows, preset.rank), Values("normal", spread)),
    ):
        yield NewTensor(name, "F16", shape, values, name)


def write_file(path: Path, file: NewFile, blocks: RandomBlocks, advance: Advance) -> None:
    """A safetensors file, on the disk when this returns, and not in the page cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, memoryview(header_of(file)))
        unflushed = 0
        for tensor in file.tensors:
            for chunk in blocks.chunks(tensor):
                for first in range(0, len(chunk), 2**23):
                    piece = chunk[first : first + 2**23]
                    write_all(descriptor, piece)
                    advance(len(piece))
                    unflushed += len(piece)
                    if unflushed >= FLUSH_BYTES:
                        flush(descriptor)
                        unflushed = 0
        flush(descriptor)
    finally:
        os.close(descriptor)


def header_of(file: NewFile) -> bytes:
    """Names in order, compact, and no padding: as mlx writes it, so data begins at any byte."""
    offset, entries = 0, {}
    for tensor in file.tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"data_offsets": [offset, end], "dtype": tensor.dtype, "shape": list(tensor.shape)}
        offset = end
    header = {"__metadata__": dict(file.metadata), **dict(sorted(entries.items()))}
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def flush(descriptor: int) -> None:
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def finish(
    aside: Path, folder: Path, config: Mapping[str, Any], files: Sequence[NewFile], *, tokenizer: bool, adapters: bool
) -> None:
    """Check what was written as any checkpoint is checked, then move it, config.json last."""
    write_json(aside / "config.json", config)
    if len(files) > 1:
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        size = sum(file.nbytes for file in files)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(aside / "model.safetensors.index.json", index)
    if not adapters:
        (aside / "adapters").rmdir()
    checkpoint = open_checkpoint(aside)
    if tokenizer:
        write_tokenizer(aside, checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(folder / path.name)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=4), "utf-8")
