"""`edge0 sessions`: the prefixes of conversations that are kept on the disk."""

import json as json_format
import time
from pathlib import Path

from edge0_ref.engine.memory import size_text
from edge0_ref.engine.prefix_files import PrefixFile, list_files, remove_all
from edge0_ref.errors import UsageError


def run_sessions(folder: Path, *, clear: bool, json: bool) -> None:
    """[ENG-084] List them, the most recently used first, or remove them. Raises UsageError for one that stays."""
    files = sorted(list_files(folder), key=lambda file: -file.used)
    if clear:
        try:
            remove_all(folder)
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be removed: {error.strerror}") from None
        print(f"{len(files)} kept prefixes removed from {folder}, {size_text(sum(file.nbytes for file in files))}")
    elif json:
        print(json_format.dumps({"folder": str(folder), "prefixes": [facts(file) for file in files]}))
    else:
        for file in files:
            print(line(file))
        print(f"{len(files)} kept prefixes in {folder}, {size_text(sum(file.nbytes for file in files))}")


def facts(file: PrefixFile) -> dict[str, object]:
    told = {name: file.metadata.get(name) for name in ("model", "backend", "top_k", "edge0")}
    return {**told, "tokens": file.tokens, "bytes": file.nbytes, "used": file.used, "file": file.path.name}


def line(file: PrefixFile) -> str:
    if not file.metadata:
        return f"{file.path.name}: damaged; it will be dropped"
    held = file.metadata
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
    return (
        f"{when}  {file.tokens:7} tokens  {size_text(file.nbytes):>9}  {held.get('model')}, "
        f"K = {held.get('top_k')}, {held.get('backend')}, edge0 {held.get('edge0')}"
    )
