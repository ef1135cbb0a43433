"""Running vectors alone: `--replay FILE`, and the check that a failure which is kept does fail again."""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np

import edge0_ref.errors
from conformance.compare import ConformanceError, Judge
from conformance.driven import Driven
from conformance.profiles import profile_of
from conformance.report import Recorder
from conformance.requirements import Requirement, read_requirements
from conformance.vectors import Case, carry_out
from conformance.watchdog import Hang
from conformance.watched import Limit, Memory, WatchedBackend, unlimited
from edge0_ref.contract import EXECUTOR_KINDS


def hold(driven: Driven, judge: Judge, case: Case, kind: str) -> None:
    """Carry out one case and compare its outputs, as spec/README.md says."""
    what = f"{case.id} ({case.comment} Catches: {', '.join(case.flags)})"
    if "error" in case.values:
        error = getattr(edge0_ref.errors, case.error["kind"])
        for mention in case.error["mentions"] or [""]:
            judge.error(error, lambda: carry_out(driven, case.operation, kind, case.arguments()), what, mention)
        return
    got = carry_out(driven, case.operation, kind, case.arguments())
    if "either" in case.values:
        options = case.decoded(case.either)
        for name in options[0]:
            judge.either(got[name], [option[name] for option in options], f"{name} of {what}")
    else:
        bounds = case.bounds(judge.profile)
        for name, wanted in case.decoded(case.expected).items():
            judge_output(judge, got[name], wanted, bounds.get(name), f"{name} of {what}")


def judge_output(judge: Judge, got: Any, wanted: Any, bound: np.ndarray | None, what: str) -> None:
    """Within its bound, equal in its bits, or equal."""
    if bound is not None:
        judge.bound(got, wanted, bound, what)
    elif isinstance(wanted, np.ndarray):
        judge.bits(np.asarray(got), wanted, what)
    elif isinstance(wanted, dict):
        judge.state({name: got.get(name) for name in wanted}, wanted, what)
    else:
        judge.state(got, wanted, what)


def fails_alone(backend: Any, case: Case, kind: str, limit: Limit = unlimited) -> bool:
    """Whether a case fails, on this executor if it needs one."""
    judge = Judge(
        [Requirement(id_, "?", "", "") for id_ in case.requirements], kind, Recorder(), "", profile_of(backend)
    )
    driven = Driven(WatchedBackend(backend, Memory(), limit, case.id), judge)
    try:
        with redirect_stdout(io.StringIO()):
            hold(driven, judge, case, kind)
            driven.close()
    except (Exception, Hang, SystemExit):
        return True
    return False


def replay(backend: Any, cases: Sequence[Case], again: str, recorder: Recorder, limit: Limit = unlimited) -> None:
    """Run cases and nothing else; a case that the backend does not claim is unclaimed."""
    requirements = read_requirements()
    for case in cases:
        cited = [requirements.get(id_, Requirement(id_, "?", "", "not in spec/")) for id_ in case.requirements]
        for kind in case.kinds(EXECUTOR_KINDS):
            if set(case.claims(kind)) <= backend.claims:
                judge = Judge(cited, kind, recorder, again, profile_of(backend))
                recorder.outcome(tuple(case.requirements), outcome_of(backend, judge, case, kind, limit))
            else:
                recorder.outcome(tuple(case.requirements), "unclaimed")


def outcome_of(backend: Any, judge: Judge, case: Case, kind: str, limit: Limit) -> str:
    """Run one case, note how it failed if it did, and say how it ended."""
    name = f"{case.id} on {kind}" if kind else case.id
    driven = Driven(WatchedBackend(backend, Memory(), limit, name), judge)
    try:
        hold(driven, judge, case, kind)
        driven.close()
    except (ConformanceError, Hang) as error:
        judge.recorder.failures.append((name, str(error)))
        return "FAIL"
    except (Exception, SystemExit) as error:
        judge.recorder.failures.append((name, f"{type(error).__name__}: {error}\n  again   {judge.again}"))
        return "FAIL"
    return "passed"
