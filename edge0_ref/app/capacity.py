"""What this machine can do: its memory, the backends that are installed, and the disk that a model lies on."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0_ref.app.backends import find_backend, known_backends
from edge0_ref.app.probes import BlockReads, kernel_rate, memory_rate
from edge0_ref.app.read_mode import file_system
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import READ_MODES, READER_THREADS, ExpertLayout, ReadMode
from edge0_ref.errors import BackendError, ReadError
from edge0_ref.expert_store import find_experts
from edge0_ref.packed import stride_of

DEPTHS = (1, 2, READER_THREADS)
ENOUGH_BYTES = 2**29  # a file to measure on: more than half a second of reading
EQUAL = 0.95  # a mode this near to the fastest, and without page cache, is preferred

Rates = Mapping[ReadMode, Mapping[int, float] | str]


@dataclass(frozen=True)
class Machine:
    """Bytes a second. experts: backend -> of the weights of K experts in one call; disk: mode -> depth -> rate.

    In either, a text says why there is no rate.
    """

    memory: float
    experts: Mapping[str, float | str]
    disk: Rates
    mode: ReadMode
    file_system: str
    measured_on: str

    @property
    def disk_rate(self) -> float:
        rates = self.disk[self.mode]
        assert not isinstance(rates, str)
        return max(rates.values())

    @property
    def fastest(self) -> tuple[str, float]:
        """The backend that computes experts fastest, and its rate."""
        rates = {name: rate for name, rate in self.experts.items() if not isinstance(rate, str)}
        name = max(rates, key=lambda name: rates[name])
        return name, rates[name]


def measure(
    folder: Path, layout: ExpertLayout, top_k: int, backend: str | None, checkpoint: Checkpoint | None
) -> Machine:
    """Memory, then experts, then the disk: one at a time. backend: None for all that are installed."""
    memory = memory_rate()
    experts = rates_of_backends(layout, top_k) if backend is None else {backend: rate_of(backend, layout, top_k)}
    block = stride_of(layout)
    with file_to_read(folder, checkpoint, block) as path:
        disk: Rates = {mode: rates_of(BlockReads(path, block), mode) for mode in READ_MODES}
        return Machine(memory, experts, disk, best_mode(disk), file_system(path), str(path))


def rate_of(backend: str, layout: ExpertLayout, top_k: int) -> float:
    return kernel_rate(find_backend(backend, "executor:staged"), layout, top_k)


def rates_of_backends(layout: ExpertLayout, top_k: int) -> dict[str, float | str]:
    """Of all whose names are known; one that cannot, as its library is not here, says so. Raises BackendError."""
    rates: dict[str, float | str] = {}
    for name in known_backends():
        try:
            rates[name] = rate_of(name, layout, top_k)
        except BackendError as error:
            rates[name] = str(error)
        except Exception as error:  # foreign code, which nobody has asked for by name
            rates[name] = f"fails: {type(error).__name__}: {error}"
    if all(isinstance(rate, str) for rate in rates.values()):
        told = "; ".join(f"{name}: {why}" for name, why in rates.items()) or "none is installed"
        raise BackendError(f"no backend computes experts here: {told}")
    return rates


@contextmanager
def file_to_read(folder: Path, checkpoint: Checkpoint | None, block: int) -> Iterator[Path]:
    """The model's own largest file with experts; if that is small, a new one beside it, or where temporary files go."""
    own = None if checkpoint is None else largest_file(checkpoint)
    if own is not None and own.stat().st_size >= ENOUGH_BYTES:
        yield own
        return
    here = folder if os.access(folder, os.W_OK) else None
    with tempfile.NamedTemporaryFile(dir=here, prefix="edge0-doctor-") as file:
        content = np.random.default_rng(0).integers(0, 256, block, np.uint8).data
        try:
            for _ in range(ENOUGH_BYTES // block + 1):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped from the page cache
        except OSError as error:
            raise ReadError(f"{file.name}: no room to measure the disk: {error.strerror}") from None
        yield Path(file.name)


def largest_file(checkpoint: Checkpoint) -> Path:
    layers = checkpoint.config.moe_layers.items()
    paths = {piece.path for layer, moe in layers for piece in find_experts(checkpoint, layer, moe)[1]}
    return checkpoint.packed or max(paths, key=lambda path: path.stat().st_size)


def rates_of(reads: BlockReads, mode: ReadMode) -> Mapping[int, float] | str:
    try:
        return {depth: reads.rate(mode, depth) for depth in DEPTHS}
    except OSError as error:
        return str(error)


def best_mode(disk: Rates) -> ReadMode:
    """[STO-046] The fastest at the depth the engine uses; direct if it is as good as any: it needs no page cache."""
    rates = {mode: rates[READER_THREADS] for mode in READ_MODES if not isinstance(rates := disk[mode], str)}
    if not rates:
        raise ReadError(f"no read mode works: {'; '.join(str(why) for why in disk.values())}")
    fastest = max(rates, key=lambda mode: rates[mode])
    return "direct" if rates.get("direct", 0.0) >= EQUAL * rates[fastest] else fastest
