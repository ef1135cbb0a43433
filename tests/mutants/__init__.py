"""Mutants: the reference, broken in one way each, and the requirement that has to notice.

A suite that lets one live has a hole. `python -m tests.mutants [NAME...]` prints who was killed by what.
"""

import time
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

import conformance
import conformance.recording_store
from edge0_ref.backend import create
from tests.mutants import backends, decoders, experts, ling, prerouters, residency, routers, weights

Mutant = FunctionType  # of one argument, a pytest.MonkeyPatch
CHAPTERS = (weights, routers, experts, residency, prerouters, decoders, ling, backends)
MUTANTS: dict[Mutant, str] = {mutant: id_ for chapter in CHAPTERS for mutant, id_ in chapter.MUTANTS.items()}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. message: the first line of the failure that killed it."""

    name: str
    requirement: str
    killed: bool
    message: str
    seconds: float


def try_to_kill(mutant: Mutant) -> Verdict:
    """Run the tests of the requirement a mutant breaks until one fails."""
    requirement, start = MUTANTS[mutant], time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        # a read that a mutant forgot never comes: no need to wait long for it
        patch.setattr(conformance.recording_store, "PATIENCE_SECONDS", 0.5)
        mutant(patch)
        backend: Any = create()
        report = conformance.run(backend, [requirement], profile="no-shrink", stop_at_first=True)
    failures = [message.splitlines()[0] for _, message in report.recorder.failures]
    killed = report.status(requirement) == "FAIL"
    return Verdict(mutant.__name__, requirement, killed, failures[0] if failures else "", time.perf_counter() - start)
