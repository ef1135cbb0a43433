"""Finding a backend by name: an entry point of the group `edge0.backends`, or `package.module:factory`."""

from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import Any

from edge0_ref.contract import Backend
from edge0_ref.errors import BackendError

GROUP = "edge0.backends"
LARGE_BYTES = 2**30  # of a model with which the reference lets people wait


def known_backends() -> list[str]:
    """Names that `find_backend` knows without being told a module."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_backend(name: str, needs: str = "decoder", dtype: str | None = None) -> Backend[Any]:
    """[BCK-008] The backend a factory makes, if it claims what is needed. Raises BackendError, saying what is known.

    dtype: of activations, None for the backend's own choice. A factory with more than one takes a keyword `dtype`.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
    else:
        entry = next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            known = ", ".join(known_backends()) or "none"
            raise BackendError(f"backend {name!r} is not known; known: {known}, or package.module:factory")
        module, attribute = entry.module, entry.attr
    try:
        factory = getattr(import_module(module), attribute)
        chosen = {"dtype": dtype} if dtype and "dtype" in signature(factory).parameters else {}
        backend: Backend[Any] = factory(**chosen)
        claims, activations = backend.claims, getattr(backend, "activations", "float32")
    except BackendError:
        raise
    except Exception as error:  # a backend is foreign code: its import can fail in any way
        raise BackendError(f"backend {name}: {module}:{attribute} fails: {type(error).__name__}: {error}") from error
    if dtype not in (None, activations):
        raise BackendError(f"backend {name} computes in {activations} only, wanted {dtype}")
    if needs not in claims:
        raise BackendError(
            f"backend {name} does not claim {needs!r}; it claims {', '.join(sorted(claims)) or 'nothing'}"
        )
    return backend


def reads_as_stored(backend: Backend[Any]) -> bool:
    """[ENG-030] Whether weights and adapters stay what they are in files, and are widened as they are read."""
    return bool(getattr(backend, "reads_as_stored", False))


def limit_memory(backend: Backend[Any], budget: int | None) -> None:
    """Tell a backend that allocates by itself what a plan allows, None for no budget: its optional `limit_memory`."""
    limit = getattr(backend, "limit_memory", None)
    if limit is not None:
        limit(budget)


def notice_of(backend: Backend[Any]) -> str | None:
    """[BCK-011] What a backend wants said before its first work ("compiling, once"): its optional `notice()`."""
    notice = getattr(backend, "notice", None)
    return notice() if notice is not None else None


def advice(backend: Backend[Any], nbytes: int) -> str | None:
    """For who waits for a model of so many bytes and may not know of faster backends."""
    if nbytes < LARGE_BYTES or not getattr(backend, "to_be_read", False):
        return None
    return "the reference is written to be read, not for speed; `edge0 doctor` tells how fast other backends are here"
