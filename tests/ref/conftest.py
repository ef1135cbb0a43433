"""Decoders over folders, closed at the end of a test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.adapters import Adapters
from edge0_ref.backend import ReferenceBackend
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Plan
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.inventory import open_checkpoint

Open = Callable[..., ReferenceDecoder]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Decoders over a folder or checkpoint, closed at the end of the test."""
    made: list[ReferenceDecoder] = []

    def open_one(source: Path | Checkpoint, adapters: Adapters | None = None, **plan: Any) -> ReferenceDecoder:
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        top_k = plan.pop("top_k", checkpoint.config.top_k)
        made.append(ReferenceBackend().decoder(checkpoint, Plan(top_k=top_k, **plan), adapters))
        return made[-1]

    yield open_one
    for decoder in made:
        decoder.close()
