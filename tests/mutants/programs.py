"""Mutants of chapter 11, backends that are programs: `conformance.serve` as a program that breaks the protocol."""

from typing import Any


def program_of(mutant: Any) -> Any:
    """The program that a mutant is, or None if it breaks something else."""
    return None


MUTANTS: dict[Any, str] = {}
