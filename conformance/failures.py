"""[BCK-032] Keeping failures: each as a vector that fails when it is run alone, or as the line that brings it back."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

from conformance.compare import ConformanceError
from conformance.counterexamples import Expectation, counterexamples, inputs_of
from conformance.replay import fails_alone
from conformance.vector_files import VectorError, digest_of, encoded, write_case
from conformance.vectors import Case
from conformance.watchdog import Hang
from conformance.watched import Limit, Memory, Operation, unlimited


@dataclass(frozen=True)
class Keeper:
    """Writes failures into a folder. backend: as the command line names it (`--backend NAME` or `--exec COMMAND`)."""

    folder: Path
    backend: str
    seed: int | None = None
    limit: Limit = unlimited
    memory: Memory = field(default_factory=Memory)

    def keep(self, test: str, cited: Sequence[str], error: BaseException) -> str:
        """The line that replays a failure, or "" if no vector shows it."""
        requirement = getattr(error, "requirement", "") or next(iter(cited), "")
        if not requirement:
            return ""
        for operation, expected in counterexamples(self.memory, error):
            case = self.case(test, requirement, operation, expected, error)
            if case is None or not (isinstance(error, Hang) or self.fails(case, operation)):
                continue
            try:
                path = write_case(self.folder, case.values)
            except VectorError:
                continue
            return f"  replay  python -m conformance --replay {quote(str(path))} {self.backend}"
        return ""

    def fails(self, case: Case, operation: Operation) -> bool:
        return fails_alone(self.memory.backend, case, operation.kind, self.limit)

    def case(
        self, test: str, requirement: str, operation: Operation, expected: Expectation, error: BaseException
    ) -> Case | None:
        inputs = inputs_of(operation, self.memory.backend.to_numpy)
        if inputs is None:
            return None
        wanted: dict[str, Any] = encoded(expected)
        name = re.sub(r"[^a-z0-9]+", "-", test.rpartition("::")[2].lower()).strip("-")
        seed = "" if self.seed is None else f", seed {self.seed}"
        values = {
            "id": f"failure/{requirement.lower()}-{operation.name}-{digest_of(inputs, wanted)}",
            "requirements": [requirement],
            "operation": operation.name,
            "flags": [name],
            "comment": comment_of(error),
            "source": f"conformance {version('edge0')}{seed}",
            "inputs": inputs,
            **wanted,
        }
        return Case(values, {})


def comment_of(error: BaseException) -> str:
    """What was compared, without the requirement in front of it; of other errors, themselves."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    compared = isinstance(error, ConformanceError) and bool(error.requirement)
    return first.partition(": ")[2] if compared else first
