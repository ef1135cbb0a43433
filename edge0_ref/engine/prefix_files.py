"""Kept prefixes on the disk: a safetensors file each, which is whole and meant for this very model, or is not used."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from edge0_ref.contract import Array
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.safetensors_header import read_header

FORMAT = "edge0 prefix, 1"
SUFFIX = ".prefix.safetensors"
IDS = "token_ids"
LONGEST_WRITE_SECONDS = 3600  # a file that is still being written then was left by a process that was ended


@dataclass(frozen=True)
class Owner:
    """[ENG-081] What a state depends on besides its ids: another edge0, model, backend, K or adapter, another state.

    model: its name, for people; fingerprint: of its files and adapters; backend: with the dtype of its activations.
    """

    edge0: str
    model: str
    fingerprint: str
    backend: str
    top_k: int

    @property
    def key(self) -> str:
        text = json.dumps([FORMAT, self.edge0, self.fingerprint, self.backend, self.top_k])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class PrefixFile:
    """A file as its header tells it. used: seconds since the epoch."""

    path: Path
    metadata: Mapping[str, str]
    tokens: int
    nbytes: int
    used: float


class PrefixFiles:
    """[ENG-081] The files of one owner in a folder that owners share; the folder has the budget.

    Writing that fails ends writing, said once: a kept prefix is never worth an error.
    """

    def __init__(self, folder: Path, budget: int, owner: Owner, notify: Callable[[str], None]) -> None:
        self.folder, self.budget, self.owner, self._notify = folder, budget, owner, notify

    def find(self) -> Iterator[tuple[Int32[np.ndarray, " tokens"], Path]]:
        """(ids, path) of this owner's files, least recently used first. A file that is damaged here is dropped."""
        for file in sorted(list_files(self.folder), key=lambda file: file.used):
            if file.metadata.get("key", self.owner.key) != self.owner.key:
                continue
            try:
                yield load_ids(file.path), file.path
            except ReadError as error:  # no header, or none that can be read, is nobody's
                self._drop(file.path)
                self._notify(str(error))

    def write(self, ids: Int32[np.ndarray, " tokens"], arrays: Mapping[str, Array]) -> Path | None:
        """Complete or absent, for this user only; then the least recently used files go, down to the budget."""
        tensors = {name: np.ascontiguousarray(array) for name, array in {**arrays, IDS: ids}.items()}
        metadata = {
            "format": FORMAT,
            "key": self.owner.key,
            "edge0": self.owner.edge0,
            "model": self.owner.model,
            "backend": self.owner.backend,
            "top_k": str(self.owner.top_k),
            "sha256": digest(tensors),
        }
        nbytes = sum(array.nbytes for array in tensors.values())
        if nbytes > self.budget:
            return None
        name = hashlib.sha256(self.owner.key.encode() + ids.tobytes()).hexdigest()[:32]
        path = self.folder / f"{name}{SUFFIX}"
        aside = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.touch(mode=0o600)
            save_file(tensors, aside, metadata)
            aside.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            self.budget = 0
            self._notify(f"prefixes are no longer written to {self.folder}: {error}")
            return None
        self._spend(path)
        return path

    def _spend(self, newest: Path) -> None:
        for path in self.folder.glob("*.prefix.*"):
            with suppress(OSError):  # another process has just dropped it
                if path.suffix != ".safetensors" and time.time() - path.stat().st_mtime > LONGEST_WRITE_SECONDS:
                    self._drop(path)
        left = self.budget
        for file in sorted(list_files(self.folder), key=lambda file: (file.path != newest, -file.used)):
            left -= file.nbytes
            if left < 0:
                self._drop(file.path)

    def read(self, path: Path, ids: Int32[np.ndarray, " tokens"]) -> dict[str, Array] | None:
        """[ENG-081] What was written for these ids; None if it is gone, by the budget or at a user's wish.

        Raises ReadError, and drops the file, if it is anything else.
        """
        if not path.exists():
            return None
        try:
            _, metadata = read_header(path)
            tensors = load_file(path)
        except (OSError, SafetensorError, CheckpointError) as error:
            self._drop(path)
            raise ReadError(f"{path}: a kept prefix that cannot be read, dropped: {error}") from None
        whole = metadata.get("sha256") == digest(tensors) and metadata.get("key") == self.owner.key
        if not whole or not np.array_equal(tensors.pop(IDS), ids):
            self._drop(path)
            raise ReadError(f"{path}: a kept prefix whose bytes are not those that were written, dropped")
        self.touch(path)
        return tensors

    def touch(self, path: Path) -> bool:
        """It is used now. Returns whether it is still there: the budget may have been spent on others."""
        with suppress(OSError):  # a folder that can only be read has no order to keep
            os.utime(path)
        return path.exists()

    def _drop(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._notify(f"{path}: cannot be removed: {error}")


def digest(tensors: Mapping[str, Array]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.data if array.size else b"")
    return total.hexdigest()


def load_ids(path: Path) -> Int32[np.ndarray, " tokens"]:
    """Raises ReadError."""
    try:
        with safe_open(path, "numpy") as file:
            ids = file.get_tensor(IDS)
    except (OSError, SafetensorError) as error:
        raise ReadError(f"{path}: a kept prefix that cannot be read, dropped: {error}") from None
    return np.asarray(ids, np.int32)


def list_files(folder: Path) -> list[PrefixFile]:
    """Every kept prefix below a folder, whoever owns it; one that cannot be read has no tokens and no metadata."""
    found = []
    for path in folder.glob(f"*{SUFFIX}") if folder.is_dir() else ():
        try:
            status = path.stat()
        except OSError:  # another process has just dropped it
            continue
        try:
            tensors, metadata = read_header(path)
            tokens = tensors[IDS].shape[0]
        except (CheckpointError, OSError, KeyError, IndexError):
            metadata, tokens = {}, 0
        found.append(PrefixFile(path, metadata, tokens, status.st_size, status.st_mtime))
    return found


def remove_all(folder: Path) -> list[OSError]:
    """Every kept prefix, and what an interrupted write left; the errors of those that stay."""
    stay = []
    for path in folder.glob("*.prefix.*") if folder.is_dir() else ():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            stay.append(error)
    return stay
