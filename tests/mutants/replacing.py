"""Replacing a function wherever it is known by its name, or by what is made of it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest


def replace_everywhere(patch: pytest.MonkeyPatch, original: Any, changed: Any) -> None:
    """In every module of edge0 and of the suite that imported it."""
    for module in [m for name, m in sys.modules.items() if name.startswith(("edge0_ref", "conformance"))]:
        for name in [name for name, value in vars(module).items() if value is original]:
            patch.setattr(module, name, changed)


def wrapped(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`change(original, *arguments)` in the place of a function."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **named: change(original, *arguments, **named))
