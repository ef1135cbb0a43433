"""Finding a backend by name: an entry point of the group `edge0.backends`, or `package.module:factory`."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from edge0_ref.contract import Backend
from edge0_ref.errors import BackendError

GROUP = "edge0.backends"


def known_backends() -> list[str]:
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_backend(name: str) -> Backend[Any]:
    """[BCK-002] The backend that a factory makes. Raises BackendError, saying what is known."""
    if ":" in name:
        module, _, attribute = name.partition(":")
    else:
        entry = next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            known = ", ".join(known_backends()) or "none"
            raise BackendError(f"backend {name!r} is not known; known: {known}, or package.module:factory")
        module, attribute = entry.module, entry.attr
    try:
        backend = getattr(import_module(module), attribute)()
    except Exception as error:  # a backend is foreign code: its import can fail in any way
        raise BackendError(f"backend {name}: {module}:{attribute} fails: {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend):
        raise BackendError(f"backend {name}: {module}:{attribute} made a {type(backend).__name__}, not a Backend")
    return backend


def notice_of(backend: Backend[Any]) -> str | None:
    """[BCK-003] What a backend wants said before its first work ("compiling, once"): its optional `notice()`."""
    notice = getattr(backend, "notice", None)
    return notice() if notice is not None else None
