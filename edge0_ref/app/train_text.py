"""Text to train on: files to token ids, ids to windows, and which windows a step takes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge0_ref.config import ModelConfig
from edge0_ref.data import Array
from edge0_ref.errors import UsageError
from edge0_ref.tokens import Tokenizer

END_OF_TEXT = "\f"  # what separates texts in a file; the model's end token takes its place


@dataclass(frozen=True, eq=False)
class Corpus:
    """Windows int64 [count, tokens] of consecutive text, the bytes that an average token stands for, a fingerprint."""

    windows: Array
    bytes_per_token: float
    fingerprint: str

    def batch(self, number: int, size: int, seed: tuple[int, ...]) -> Array:
        """[TRN-004] The windows of a step: all windows once in a random order, then once more in another.

        >>> corpus = Corpus(np.arange(6).reshape(6, 1), 1.0, "")
        >>> sorted(window for step in range(3) for window in corpus.batch(step, 2, (0,)).ravel().tolist())
        [0, 1, 2, 3, 4, 5]
        """
        size = min(size, len(self.windows))
        epoch, place = divmod(number, len(self.windows) // size)
        order = np.random.default_rng((*seed, epoch)).permutation(len(self.windows))
        chosen: Array = self.windows[order[place * size : (place + 1) * size]]
        return chosen


def read_corpus(path: Path, tokenizer: Tokenizer, config: ModelConfig, window: int) -> Corpus:
    """A file, or all `.txt` files of a folder in the order of their names.

    Raises UsageError for a missing file, one that is not UTF-8, and less text than a window.
    """
    files = sorted(path.glob("**/*.txt")) if path.is_dir() else [path]
    digest, ids, nbytes = hashlib.sha256(), list[int](), 0
    for file in files:
        raw = read_bytes(file)
        digest.update(raw)
        nbytes += len(raw)
        for text in decode(file, raw).split(END_OF_TEXT):
            if text:
                ids += [*tokenizer.encode(text, special=False), *config.eos_token_ids[:1]]
    count = len(ids) // window
    if not count:
        raise UsageError(f"{path}: {len(ids)} tokens of text, wanted at least one window of {window}")
    windows = np.array(ids[: count * window], np.int64).reshape(count, window)
    return Corpus(windows, nbytes / len(ids), digest.hexdigest())


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def decode(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from None
