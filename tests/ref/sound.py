"""A sound model, ways to spoil it, and what is then seen."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.contract import READ_MODES, ReadMode
from edge0_ref.errors import CheckpointError, Edge0Error, ReadError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.readers import open_reader
from tests.ref.builders import MODEL, Recipe, make_config, make_tensors

RECIPE = Recipe(vocab=32, experts=4)
TENSORS = make_tensors(RECIPE)
CONFIG = make_config(RECIPE)
LAYER = f"{MODEL}.layers.1"
EXPERTS = f"{LAYER}.mlp.switch_mlp"
NORM = f"{MODEL}.norm.weight"


def refused(folder: Path, kind: type[Edge0Error] = CheckpointError) -> str:
    """The one line a user sees."""
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def modes_of(folder: Path) -> list[ReadMode]:
    """The read modes that the file system of a folder has: not every one has direct reads."""
    probe, modes = folder / "probe", list[ReadMode]()
    probe.write_bytes(bytes(4096))
    for mode in READ_MODES:
        with contextlib.suppress(ReadError):
            open_reader(probe, mode).close()
            modes.append(mode)
    probe.unlink()
    return modes


def with_config(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    change(config)
    return config
