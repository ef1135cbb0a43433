"""The Python API, and what every command is made of.

    from edge0_ref.app import open_model

    with open_model() as model:
        for piece in (text := model.generate("In the beginning", max_tokens=40)):
            print(piece.text, end="", flush=True)
        print(text.result.tokens_per_second, model.counters.bytes_read)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge0_ref.adapters import Adapters, open_adapters
from edge0_ref.app.backends import find_backend, notice_of
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import ModelConfig
from edge0_ref.contract import (
    EXECUTOR_KINDS,
    READ_MODES,
    Array,
    Backend,
    Counters,
    ExecutorKind,
    Observe,
    ReadMode,
)
from edge0_ref.engine.memory import parse_size, resident_bytes
from edge0_ref.engine.plan import MemoryPlan, Request, make_plan
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.engine.session import Generation, Prompt, Session
from edge0_ref.errors import UsageError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.tokens import Tokenizer, open_tokenizer

Notify = Callable[[str], None]


def embedded_model() -> Path:
    """The model that comes with edge0."""
    return Path(str(files("edge0_ref"))) / "assets" / "kjv-moe"
