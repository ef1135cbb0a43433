"""Running the suite: pytest underneath, so that a newcomer can also run, select and debug it as plain tests."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from conformance.failures import Keeper
from conformance.plugin import RunPlugin
from conformance.report import Report
from conformance.requirements import SPEC, read_requirements
from conformance.watchdog import Watchdog

HERE = Path(__file__).resolve().parent
PYTEST_OPTIONS = "-p no:cacheprovider -p no:benchmark -W error --strict-markers --assert=plain"
SECONDS_A_CALL = 60.0
ENDINGS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
EXAMPLES = {"ci": 40, "no-shrink": 40, "deep": 2000}


def profile_settings(profile: str, seed: int | None) -> settings:
    """Hypothesis settings of a profile; without a seed, `ci` and `no-shrink` draw the same examples every time."""
    phases = [Phase.explicit, Phase.generate] + ([] if profile == "no-shrink" else [Phase.shrink])
    return settings(
        max_examples=EXAMPLES[profile],
        derandomize=seed is None and profile != "deep",
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        stateful_step_count=25,
    )


@contextmanager
def hypothesis_profile(profile: str, seed: int | None) -> Iterator[None]:
    """The profile for the length of a run; whoever called the suite keeps their own."""
    before = settings.get_current_profile_name()
    name = f"conformance-{profile}"
    settings.register_profile(name, profile_settings(profile, seed))
    settings.load_profile(name)
    try:
        yield
    finally:
        settings.load_profile(before)


def files_citing(only: Sequence[str]) -> list[str]:
    """The test files worth collecting: those that name one of the requirements, and the vectors if a case does."""
    vectors = "".join(path.read_text("utf-8") for path in (SPEC / "vectors").glob("*.json"))
    texts = {path: path.read_text("utf-8") for path in sorted(HERE.glob("test_*.py"))}
    texts = {path: text + (vectors if path.name == "test_vectors.py" else "") for path, text in texts.items()}
    return [str(path) for path, text in texts.items() if not only or any(f'"{id_}"' in text for id_ in only)]


def command_of(option: str, profile: str, seed: int | None) -> str:
    """The command line that runs the same examples again."""
    profiled = " --profile deep" if profile == "deep" else ""
    return f"python -m conformance {option}{profiled}" + ("" if seed is None else f" --seed {seed}")


@contextmanager
def watchdog(seconds: float) -> Iterator[Watchdog]:
    """A watchdog that reaches the terminal although pytest keeps stderr to itself."""
    with os.fdopen(os.dup(2), "w") as stream, Watchdog(seconds, stream).watching() as watching:
        yield watching


def run(
    backend: Any,
    only: Sequence[str] = (),
    profile: str = "ci",
    seed: int | None = None,
    label: str = "",
    quiet: bool = True,
    stop_at_first: bool = False,
    option: str = "",
    failures: Path | None = None,
    known: Mapping[str, str] | None = None,
    seconds: float = SECONDS_A_CALL,
) -> Report:
    """Hold a backend to the spec, or to some of its requirements.

    label: the backend's name in the report; option: how the command line names it; failures: the folder that keeps
    them; known: requirement -> why it fails; seconds: how long a call of the backend may take.
    """
    name = label or backend.name
    option = option or f"--backend {name}"
    seed = SystemRandom().randrange(2**32) if profile == "deep" and seed is None else seed
    requirements, claims = read_requirements(), tuple(sorted(backend.claims))
    for module in [m for m in sys.modules if m.startswith("conformance.test_")]:
        del sys.modules[module]  # tests take their settings from the profile when they are imported
    files = files_citing(only)
    arguments = [*files, "-c", os.devnull, "--rootdir", str(HERE.parent)]
    arguments += PYTEST_OPTIONS.split()
    arguments += ["-p", "no:terminal"] if quiet else ["--tb=no", "-q", "--no-header", "--no-summary"]
    arguments += ["-x"] if stop_at_first else []
    arguments += [f"--hypothesis-seed={seed}"] if seed is not None else []
    with hypothesis_profile(profile, seed), watchdog(seconds) as watching:
        keeper = None if failures is None else Keeper(failures, option, seed, watching.limited)
        again = command_of(option, profile, seed)
        plugin = RunPlugin(backend, requirements, frozenset(only), again, keeper, watching.limited)
        # without a file pytest would collect whatever lies in the working directory
        code = pytest.main(arguments, plugins=[plugin]) if files else pytest.ExitCode.NO_TESTS_COLLECTED
    if code not in ENDINGS and not plugin.interrupted:
        raise RuntimeError(f"the suite itself did not run: pytest ended with {code!r}")
    chosen, known, cut = frozenset(only), known or {}, plugin.interrupted
    return Report(name, claims, profile, seed, requirements, plugin.recorder, chosen, known, cut)
