"""Files that a command writes: refused before any work where they cannot be, whole or not there, links followed."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge0_ref.errors import UsageError


def check_output(path: Path | None) -> None:
    """Before any work for a file, if one is asked for. Raises UsageError for one that could not be written."""
    if path is None:
        return
    target = target_of(path)
    try:
        if not target.parent.is_dir():
            raise UsageError(f"{path}: cannot be written, its parent is not a folder")
        if not os.access(target.parent, os.W_OK):
            raise UsageError(f"{path}: cannot be written, nor can anything in its folder")
        if not stat.S_ISREG(target.stat().st_mode):
            what = "a folder" if target.is_dir() else "neither a file nor a folder"
            raise UsageError(f"{path}: cannot be written, it is {what}")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def target_of(path: Path) -> Path:
    """What is renamed onto a link replaces the link: what it leads to is meant."""
    return Path(os.path.realpath(path))


def write_text(path: Path, text: str) -> None:
    """A text as a whole file. Raises UsageError where that cannot be."""
    try:
        with written_aside(path) as aside:
            aside.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` afterwards, with its mode; gone if anything fails.

    Raises OSError.
    """
    target = target_of(path)
    aside = target.with_name(f"edge0.{os.getpid()}.partial")  # a name that is not too long where the other is not
    try:
        aside.touch()
        mode = stat.S_IMODE((target if target.exists() else aside).stat().st_mode)
        yield aside
        aside.chmod(mode)  # whoever wrote it may have made it anew, for this user only
        aside.replace(target)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
