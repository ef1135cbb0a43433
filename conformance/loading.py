"""Getting hold of a backend, and the little it must have before anything can be asked of it."""

import importlib
import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from typing import Any

from edge0_ref.errors import BackendError


def load_backend(name: str) -> Any:
    """[BCK-008] A backend from the entry-point group `edge0.backends`, or `package.module:factory`."""
    known = {point.name: point for point in entry_points(group="edge0.backends")}
    if ":" not in name and name not in known:
        installed = ", ".join(sorted(known)) or "none"
        raise BackendError(f"no backend {name!r}; installed: {installed}, or package.module:factory")
    module, _, factory = (name if ":" in name else known[name].value).partition(":")
    try:
        with redirect_stdout(sys.stderr):  # what an import prints is no part of the report
            backend = getattr(importlib.import_module(module), factory)()
    except (Exception, SystemExit) as error:
        raise BackendError(f"backend {name}: {type(error).__name__}: {error}") from error
    check_backend(name, backend)
    return backend


def check_backend(name: str, backend: Any) -> None:
    """[BCK-034] A name, claims, and the way in and out of its arrays. Raises BackendError saying what is missing."""
    kind = type(backend).__name__
    missing = [member for member in ("name", "claims", "from_numpy", "to_numpy") if not hasattr(backend, member)]
    if missing:
        raise BackendError(f"backend {name}: {kind} has no {', '.join(missing)}")
    claims = backend.claims
    if not isinstance(claims, frozenset | set) or not all(isinstance(claim, str) for claim in claims):
        raise BackendError(f"backend {name}: claims: got {claims!r}, wanted a frozenset of str")
    if not isinstance(backend.name, str) or not backend.name:
        raise BackendError(f"backend {name}: name: got {backend.name!r}, wanted a word")
