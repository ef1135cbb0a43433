"""Room for kept prefixes, and what they belong to: this model's files, its adapters, K, backend and edge0."""

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Backend
from edge0_ref.engine.memory import parse_size
from edge0_ref.engine.plan import state_bytes
from edge0_ref.engine.prefix_files import Owner, PrefixFiles
from edge0_ref.engine.prefixes import PrefixBudget, Prefixes

FOLDER = "prefixes"  # below the cache folder
DEFAULT_BYTES = 512 * 2**20


def open_prefixes(
    checkpoint: Checkpoint,
    adapters: Adapters,
    backend: Backend[Any],
    top_k: int,
    budget: PrefixBudget,
    notify: Callable[[str], None],
) -> Prefixes:
    """Those of a model as it is run, with what earlier runs left on the disk."""
    files = None
    if budget.disk and budget.folder:
        files = PrefixFiles(budget.folder, budget.disk, owner_of(checkpoint, adapters, backend, top_k), notify)
    config = checkpoint.config
    return Prefixes(
        budget,
        lambda tokens: state_bytes(config, tokens) + 4 * config.vocab_size,
        backend.to_numpy,
        files,
        steps_are_prompts=not adapters.heads,
        notify=notify,
    )


def owner_of(checkpoint: Checkpoint, adapters: Adapters, backend: Backend[Any], top_k: int) -> Owner:
    """[ENG-081] A file counts by path, size and time, as build tools have it: reading gigabytes would take too long."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for path in sorted({info.path for info in (*checkpoint.tensors.values(), *checkpoint.heads.values())}):
        digest.update(file_mark(path))
    for owner, head in sorted(adapters.heads.items()):
        digest.update(f"head {owner}\n".encode())
        for array in (head.fc1, head.fc2, head.linear):
            digest.update(array.tobytes())
    for module, lora in sorted(adapters.loras.items()):
        digest.update(f"{module} {lora.scale}\n".encode())
        digest.update(lora.down.tobytes())
        digest.update(lora.up.tobytes())
    computes = f"{backend.name} {getattr(backend, 'activations', 'float32')}"
    return Owner(version("edge0"), checkpoint.folder.resolve().name, digest.hexdigest(), computes, top_k)


def file_mark(path: Path) -> bytes:
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode()


def choose_reuse(memory: str | None, keep: str | None, disk: str, cache: Path | None) -> PrefixBudget | None:
    """Room for kept prefixes: what was asked for, or an eighth of the memory budget up to a default; None for none.

    cache: the folder that what is written goes below; without one nothing is. Raises UsageError.
    """
    spare = DEFAULT_BYTES if memory is None else min(DEFAULT_BYTES, parse_size(memory) // 8)
    nbytes = spare if keep is None else parse_size(keep)
    return PrefixBudget(nbytes, parse_size(disk), cache / FOLDER if cache else None) if nbytes else None
