"""`edge0 sessions`: the prefixes of conversations that are kept on the disk."""

import json as json_format
import time
from collections.abc import Sequence
from pathlib import Path

from edge0_ref.engine.memory import size_text
from edge0_ref.engine.prefix_files import PrefixFile, list_files, remove_all
from edge0_ref.errors import UsageError


def run_sessions(folder: Path, *, clear: bool, json: bool) -> None:
    """[ENG-084] List them, the most recently used first, or remove them. Raises UsageError if one stays."""
    files = sorted(list_files(folder), key=lambda file: -file.used)
    if clear:
        clear_all(folder, files, json=json)
    elif json:
        print(json_format.dumps({"folder": str(folder), "prefixes": [facts(file) for file in files]}))
    else:
        for file in files:
            print(line(file))
        print(f"{len(files)} kept prefixes in {folder}, {size_text(sum(file.nbytes for file in files))}")


def clear_all(folder: Path, files: Sequence[PrefixFile], *, json: bool) -> None:
    """Raises UsageError when all that can be removed is."""
    stay = remove_all(folder)
    gone = [file for file in files if file.path not in {Path(error.filename) for error in stay}]
    if json:
        print(json_format.dumps({"folder": str(folder), "removed": [facts(file) for file in gone]}))
    else:
        print(f"{len(gone)} kept prefixes removed from {folder}, {size_text(sum(file.nbytes for file in gone))}")
    if stay:
        more = f", and {len(stay) - 1} more" if len(stay) > 1 else ""
        raise UsageError(f"{stay[0].filename}: cannot be removed: {stay[0].strerror}{more}")


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
