"""Finding a backend by name: an entry point of the group `edge0.backends`, or `package.module:factory`."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from edge0_ref.contract import Backend
from edge0_ref.errors import BackendError

GROUP = "edge0.backends"


def known_backends() -> list[str]:
    """Names that `find_backend` knows without being told a module."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_backend(name: str, needs: str = "decoder") -> Backend[Any]:
    """[BCK-008] The backend a factory makes, if it claims what is needed. Raises BackendError, saying what is known."""
    if ":" in name:
        module, _, attribute = name.partition(":")
    else:
        entry = next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            known = ", ".join(known_backends()) or "none"
            raise BackendError(f"backend {name!r} is not known; known: {known}, or package.module:factory")
        module, attribute = entry.module, entry.attr
    try:
        backend: Backend[Any] = getattr(import_module(module), attribute)()
        claims = backend.claims
    except Exception as error:  # a backend is foreign code: its import can fail in any way
        raise BackendError(f"backend {name}: {module}:{attribute} fails: {type(error).__name__}: {error}") from error
    if needs not in claims:
        raise BackendError(
            f"backend {name} does not claim {needs!r}; it claims {', '.join(sorted(claims)) or 'nothing'}"
        )
    return backend


def notice_of(backend: Backend[Any]) -> str | None:
    """[BCK-011] What a backend wants said before its first work ("compiling, once"): its optional `notice()`."""
    notice = getattr(backend, "notice", None)
    return notice() if notice is not None else None
