"""Mutants: edge0, broken in one way each, and the requirement whose own tests have to notice.

A suite that lets one live has a hole. Requirements are held by the conformance suite, or by the tests of this
repository, or by both: the tests that cite the requirement are run in this order until one fails.
`python -m tests.mutants [NAME...]` prints who was killed by what.
"""

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

import pytest

import conformance.recording_store
import edge0_ref
from conformance.runner import run
from edge0_ref.backend import create
from tests.mutants import (
    adapters,
    backends,
    commands,
    conversations,
    decoders,
    engine,
    experts,
    files,
    ling,
    locating,
    measuring,
    plans,
    prefixes,
    prerouters,
    programs,
    reports,
    residency,
    routers,
    serving,
    sidecars,
    training,
    weights,
)
from tests.mutants.repository import broken_command, failures_in_tests

Mutant = FunctionType  # of one argument, a pytest.MonkeyPatch
CHAPTERS = (
    weights,
    routers,
    experts,
    files,
    sidecars,
    residency,
    prerouters,
    adapters,
    decoders,
    ling,
    engine,
    plans,
    prefixes,
    commands,
    conversations,
    locating,
    serving,
    measuring,
    backends,
    programs,
    reports,
    training,
)
MUTANTS: dict[Mutant, str] = {mutant: id_ for chapter in CHAPTERS for mutant, id_ in chapter.MUTANTS.items()}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. by: "conformance" or "tests"; message: the first line of the failure that killed it."""

    name: str
    requirement: str
    killed: bool
    by: str
    message: str
    seconds: float


def import_everything() -> None:
    """Modules are imported whole: one that was first imported by a mutant's run would keep what it broke."""
    for package in (edge0_ref, conformance):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".test_" not in module.name and not module.name.endswith((".__main__", ".conftest")):
                importlib.import_module(module.name)


@contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """edge0 as the mutant leaves it, in this process and in commands that tests start."""
    import_everything()
    for name in [name for name in sys.modules if name.startswith(("tests.", "conformance.test_"))]:
        if not name.startswith(("tests.mutants", "tests.conftest")):
            del sys.modules[name]  # tests take what they import from the modules that are broken now
    with pytest.MonkeyPatch.context() as patch:
        # a read that a mutant forgot never comes: no need to wait long for it
        patch.setattr(conformance.recording_store, "PATIENCE_SECONDS", 0.5)
        broken_command(patch, mutant.__name__)
        mutant(patch)
        yield


def try_to_kill(mutant: Mutant) -> Verdict:
    """Run the tests of the requirement a mutant breaks until one fails. One that cannot be tried lives."""
    requirement, start = MUTANTS[mutant], time.perf_counter()
    try:
        with broken(mutant):
            by, failures = what_kills(mutant)
        message = failures[0].splitlines()[0] if failures else "no test fails"
    except Exception as error:  # as when what it breaks has moved; the others have their turns all the same
        by, failures, message = "nobody", [], f"cannot be tried: {error!r}"
    return Verdict(mutant.__name__, requirement, bool(failures), by, message, time.perf_counter() - start)


def what_kills(mutant: Mutant) -> tuple[str, list[str]]:
    """The suite, the repository's tests or nobody, and what fails there, while edge0 is broken."""
    requirement, backend = MUTANTS[mutant], programs.program_of(mutant) or create()
    try:
        report = run(backend, [requirement], profile="no-shrink", stop_at_first=True)
    finally:
        getattr(backend, "close", lambda: None)()
    if report.status(requirement) == "FAIL":
        return "conformance", [message for _, message in report.recorder.failures]
    failures = failures_in_tests(requirement)
    return "tests" if failures else "nobody", failures
