"""[BCK-002] [BCK-003] What a run found, per requirement, and the table that people read.

A requirement whose tests need a claim the backend does not make is *unclaimed*; one for which the suite ran nothing is
*not run*. Neither is ever counted as passed. A failure that the backend's own list names is *known*.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.known_failures import stale_entries
from conformance.requirements import Requirement

OUTCOMES = ("FAIL", "passed", "unclaimed")
INTERRUPTED = 130
STATUSES = ("passed", "FAIL", "known", "unclaimed", "not run")


@dataclass
class Figures:
    """The worst that was measured on one path, and where: relative L2, and the error as a share of its bound."""

    relative_l2: float = 0.0
    ratio_to_bound: float = 0.0
    case: str = ""
    comparisons: int = 0


@dataclass
class Recorder:
    """Collects outcomes and figures while tests run.

    outcomes: requirement -> how many of its tests passed, failed, were unclaimed; failures: (test, message);
    worst: (requirement, path) -> figures; printed: (test, the first line that the backend wrote to stdout during it).
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    worst: dict[tuple[str, str], Figures] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    printed: list[tuple[str, str]] = field(default_factory=list)

    def measure(self, requirement: str, path: str, relative_l2: float, ratio: float, case: str) -> None:
        figures = self.worst.setdefault((requirement, path), Figures(case=case))
        figures.comparisons += 1
        if (ratio, relative_l2) > (figures.ratio_to_bound, figures.relative_l2):
            figures.case = case
        figures.relative_l2 = max(figures.relative_l2, relative_l2)
        figures.ratio_to_bound = max(figures.ratio_to_bound, ratio)

    def outcome(self, requirements: tuple[str, ...], outcome: str) -> None:
        for requirement in requirements:
            self.outcomes.setdefault(requirement, Counter())[outcome] += 1


@dataclass(frozen=True)
class Report:
    """A finished run. selected: the requirements asked for, or none for all; known: requirement -> why it fails.

    interrupted: somebody ended it before its last test.
    """

    backend: str
    claims: tuple[str, ...]
    profile: str
    seed: int | None
    requirements: Mapping[str, Requirement]
    recorder: Recorder
    selected: frozenset[str]
    known: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def outcome(self, requirement: str) -> str:
        """One failing test fails it; a test it passed passes it; a test it does not claim leaves it unclaimed."""
        outcomes = self.recorder.outcomes.get(requirement, Counter())
        return next((outcome for outcome in OUTCOMES if outcome in outcomes), "not run")

    def status(self, requirement: str) -> str:
        """The outcome, or that its failure is known."""
        outcome = self.outcome(requirement)
        return "known" if outcome == "FAIL" and requirement in self.known else outcome

    @property
    def failed(self) -> list[str]:
        return [id_ for id_ in self.listed() if self.status(id_) == "FAIL"]

    @property
    def stale(self) -> list[str]:
        """[BCK-031] Known failures that did not happen, a line each. What the run left out is not judged."""
        known = {id_: why for id_, why in self.known.items() if id_ not in self.requirements or self._judged(id_)}
        return stale_entries(known, {id_: self.outcome(id_) for id_ in self.requirements})

    def _judged(self, requirement: str) -> bool:
        """Whether the run was to judge it, and came to it."""
        if self.interrupted and self.outcome(requirement) != "FAIL":
            return False
        return not self.selected or requirement in self.selected

    @property
    def notes(self) -> list[str]:
        """What a person should be told beside results."""
        notes, printed = [], self.recorder.printed
        if self.interrupted:
            notes.append("interrupted: what this table calls passed has passed the tests that were run by then")
        if printed:
            test, line = printed[0]
            notes.append(f"the backend wrote to stdout in {len(printed)} tests, first {line[:100]!r} in {test}")
        return notes

    @property
    def verdict(self) -> str:
        """What failed has failed, however much was left to run."""
        if self.failed or self.stale:
            return "FAIL"
        return "interrupted" if self.interrupted else "passed"

    @property
    def exit_code(self) -> int:
        """1 if a test failed that concerns more than known failures, or a known failure did not happen.

        130, as shells have it, if the run was interrupted.
        """
        if self.interrupted:
            return INTERRUPTED
        return 1 if self.verdict == "FAIL" else 0

    def listed(self) -> list[str]:
        """Requirements in the order of the chapters, then whatever else failed."""
        known = [*self.requirements, *(id_ for id_ in self.recorder.outcomes if id_ not in self.requirements)]
        return [id_ for id_ in known if not self.selected or id_ in self.selected]

    def paths(self, requirement: str) -> dict[str, Figures]:
        return {path: figures for (id_, path), figures in self.recorder.worst.items() if id_ == requirement}

    def table(self) -> str:
        """One line a requirement: id, class, status, worst relative L2, worst ratio to its bound, place."""
        lines = [f"{'id':8} {'class':7} {'status':10} {'rel L2':>9} {'of bound':>9}  spec"]
        for id_ in self.listed():
            if self.status(id_) == "not run" and not self.selected:
                continue
            stated = self.requirements.get(id_)
            place, exactness = (stated.place, stated.exactness) if stated else ("not in spec/", "?")
            figures = self.paths(id_)
            measured = [f for f in figures.values() if f.ratio_to_bound]
            l2 = f"{max(f.relative_l2 for f in measured):9.2e}" if measured else f"{'':9}"
            ratio = f"{max(f.ratio_to_bound for f in measured):9.2e}" if measured else f"{'':9}"
            lines.append(f"{id_:8} {exactness:7} {self.status(id_):10} {l2} {ratio}  {place}")
            if len(measured) > 1:
                lines += [
                    f"{'':8} {'':7} {path or 'default':>10} {f.relative_l2:9.2e} {f.ratio_to_bound:9.2e}"
                    for path, f in figures.items()
                ]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        counts = {status: sum(self.status(id_) == status for id_ in self.listed()) for status in STATUSES}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count or status != "known")
        return f"{self.backend}: {told} (requirements that concern no backend are tested elsewhere: not run)"
