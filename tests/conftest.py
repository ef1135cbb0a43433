"""Hypothesis profiles and run-time checked signatures, for every test."""

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import pytest
from hypothesis import HealthCheck, Phase, settings
from jaxtyping import install_import_hook

# Shapes and dtypes in edge0_ref's signatures are checked at each call; this must come before its first import.
install_import_hook("edge0_ref", "beartype.beartype")

# A shell that starts tests in the background has everything they start ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("ci", derandomize=True, max_examples=40, database=None, **COMMON)
settings.register_profile("deep", max_examples=1000, print_blob=True, **COMMON)
settings.register_profile(
    "no-shrink", derandomize=True, max_examples=40, database=None, phases=[Phase.explicit, Phase.generate], **COMMON
)
settings.load_profile("ci")  # `--hypothesis-profile deep` on the command line overrides this


def pytest_collection_finish() -> None:
    """What has been imported stays: garbage collections, of which every run of the suite makes some, pass it by."""
    gc.freeze()


@contextmanager
def checks_off() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For tests of many tokens: ten times faster; their signatures are checked by tests of few tokens."""
    with checks_off():
        yield
