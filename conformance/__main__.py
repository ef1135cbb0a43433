"""`python -m conformance --backend NAME`: exit code 0 all claimed pass, 1 failures, 2 usage, 130 interrupted."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance import MISSING

if MISSING:
    print(f"the conformance suite needs {', '.join(MISSING)}: pip install 'edge0[test]'", file=sys.stderr)
    sys.exit(2)

from conformance.certificate import certificate
from conformance.known_failures import KnownFailuresError, read_known_failures
from conformance.loading import load_backend
from conformance.page import page
from conformance.program import Program
from conformance.replay import replay
from conformance.report import INTERRUPTED, Recorder, Report
from conformance.requirements import read_requirements
from conformance.runner import EXAMPLES, SECONDS_A_CALL, command_of, run, watchdog
from conformance.usable import unusable
from conformance.vector_files import read_files
from conformance.watchdog import Hang
from edge0_ref.errors import BackendError

PROFILES = ("ci", "deep")
LONGEST_SECONDS = 10.0**6  # timers of operating systems end somewhere beyond


class RequestError(ValueError):
    """A command line that cannot be carried out."""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser("python -m conformance", description="Hold a backend to edge0's specification.")
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--backend", metavar="NAME", help="a name from edge0.backends, or package.module:factory")
    which.add_argument("--exec", metavar="COMMAND", help="a program that speaks the protocol of spec/11-backend.md")
    options.add_argument("--only", metavar="ID[,ID]", help="these requirements only")
    examples = ", ".join(f"{EXAMPLES[name]} in {name}" for name in PROFILES)
    options.add_argument("--seed", type=int, help="draw other examples than the standing ones; the same for one seed")
    options.add_argument("--profile", choices=PROFILES, default="ci", help=f"examples a test: {examples}")
    options.add_argument("--deep", dest="profile", action="store_const", const="deep", help="the profile for a night")
    options.add_argument("--timeout", type=float, default=SECONDS_A_CALL, metavar="SECONDS", help="for each call")
    options.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="run these vector files, nothing else")
    folder = Path("conformance-failures")
    options.add_argument("--failures", type=Path, default=folder, metavar="DIR", help=f"keeps failures; {folder}")
    options.add_argument("--known-failures", type=Path, metavar="FILE", help="a requirement and a reason a line")
    options.add_argument("--report", type=Path, metavar="FILE", help="write the result as JSON")
    options.add_argument("--html", type=Path, metavar="FILE", help="write the result as a page")
    return options


def chosen(only: str | None) -> list[str]:
    """The requirements of --only, or none for all. Raises RequestError."""
    ids = [id_.strip() for id_ in (only or "").split(",") if id_.strip()]
    if only is not None and not ids:
        raise RequestError(f"--only {only!r}: names no requirement")
    unknown = [id_ for id_ in ids if id_ not in read_requirements()]
    if unknown:
        raise RequestError(f"--only {','.join(unknown)}: spec/ has no such requirement")
    return ids


def check_path(option: str, path: Path | None, folder: bool) -> None:
    """Whether something can be written there, known before anything is run. Raises RequestError."""
    if path is None:
        return
    if not path.resolve().parent.is_dir():
        raise RequestError(f"{option} {path}: no such folder")
    if path.exists() and path.is_dir() != folder:
        raise RequestError(
            f"{option} {path}: is {'no' if folder else 'a'} folder, wanted a {'folder' if folder else 'file'}"
        )


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Everything that can be wrong with a command line before a backend is made. Raises RequestError."""
    options.only = chosen(options.only)
    if not 0 < options.timeout <= LONGEST_SECONDS:
        raise RequestError(f"--timeout {options.timeout:g}: wanted more than 0 and at most {LONGEST_SECONDS:g} seconds")
    for name in ("report", "html", "failures"):
        check_path(f"--{name}", getattr(options, name), folder=name == "failures")
    try:
        options.known = read_known_failures(options.known_failures) if options.known_failures else {}
    except KnownFailuresError as error:
        raise RequestError(f"--known-failures {error}") from None
    options.named = f"--backend {options.backend}" if options.exec is None else f"--exec {shlex.quote(options.exec)}"
    return options


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Any]:
    """The backend, made within the time that a call may take."""
    if options.exec is not None:
        program = Program(options.exec, options.timeout)
        try:
            yield program
        finally:
            program.close()
    else:
        with watchdog(options.timeout) as watching, watching.limited(f"making the backend {options.backend}"):
            backend = load_backend(options.backend)
        yield backend


def held(options: argparse.Namespace, backend: Any) -> tuple[Report, list[str]]:
    """The report of a run, and what could not be used of what the command line named."""
    label = options.backend if options.exec is None else options.exec
    if not options.replay:
        named = {"option": options.named, "failures": options.failures, "known": options.known}
        report = run(
            backend, options.only, options.profile, options.seed, label, quiet=False, seconds=options.timeout, **named
        )
        return report, []
    return replayed(options, backend, label)


def replayed(options: argparse.Namespace, backend: Any, label: str) -> tuple[Report, list[str]]:
    """Vector files instead of a run, each with the line that runs it alone."""
    recorder, problems, requirements, interrupted = Recorder(), list[str](), set[str](), False
    with watchdog(options.timeout) as watching:
        try:
            for path in options.replay:
                cases, refused = read_files([path])
                if not refused and (why := unusable(path, cases)):
                    cases, refused = [], [why]
                problems += refused
                cases = [case for case in cases if not options.only or set(case.requirements) & set(options.only)]
                requirements |= {id_ for case in cases for id_ in case.requirements}
                again = f"python -m conformance --replay {path} {options.named}"
                replay(backend, cases, again, recorder, watching.limited)
        except KeyboardInterrupt:
            interrupted = True
    claims, selected = tuple(sorted(backend.claims)), frozenset(options.only or requirements)
    stated = (read_requirements(), recorder, selected, options.known)
    return Report(label, claims, "replay", None, *stated, interrupted), problems


def tell(report: Report, problems: Sequence[str], options: argparse.Namespace) -> None:
    """What a run has to say, for people and for programs."""
    for test, message in report.recorder.failures:
        print(f"\n{test}\n{message}")
    print(f"\n{report.table()}")
    for line in [*report.notes, *report.stale]:
        print(line)
    for line in problems:
        print(line, file=sys.stderr)
    facts = certificate(report, command_line(options, report.seed))
    if options.report:
        options.report.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    if options.html:
        options.html.write_text(page(facts), "utf-8")


def command_line(options: argparse.Namespace, seed: int | None) -> str:
    """The line that gives the same report again."""
    if options.replay:
        return f"python -m conformance --replay {' '.join(map(str, options.replay))} {options.named}"
    only = f" --only {','.join(options.only)}" if options.only else ""
    known = f" --known-failures {options.known_failures}" if options.known_failures else ""
    return command_of(options.named, options.profile, seed) + only + known


def main(arguments: Sequence[str]) -> int:
    os.environ.pop("PYTEST_ADDOPTS", None)  # what its user adds to pytest runs of their own is none of the suite's
    options = parser().parse_args(arguments)
    try:
        options = checked(options)
        with opened(options) as backend:
            report, problems = held(options, backend)
    except (BackendError, RequestError, Hang) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before anything was judged", file=sys.stderr)
        return INTERRUPTED
    tell(report, problems, options)
    return 2 if problems and not report.interrupted else report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
