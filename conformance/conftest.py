"""Fixtures of the suite. `python -m conformance` sets the run up; `pytest conformance --backend NAME` works too."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from conformance.compare import Judge
from conformance.driven import Driven
from conformance.loading import load_backend
from conformance.plugin import PLUGIN, RunPlugin, cited
from conformance.profiles import profile_of
from conformance.requirements import Requirement, read_requirements
from conformance.runner import profile_settings
from conformance.watched import WatchedBackend
from edge0_ref.errors import BackendError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="reference", help="a name from edge0.backends, or package.module:factory")


def pytest_configure(config: pytest.Config) -> None:
    if find_run(config) is None:
        name = config.getoption("--backend")
        try:
            backend = load_backend(name)
        except BackendError as error:
            raise pytest.UsageError(str(error)) from None
        settings.register_profile("conformance-ci", profile_settings("ci", seed=None))
        settings.load_profile("conformance-ci")  # tests take their settings from it when they are imported
        plugin = RunPlugin(backend, read_requirements(), again=f"python -m conformance --backend {name}")
        config.pluginmanager.register(plugin, PLUGIN)
        plugin.pytest_configure(config)


def find_run(config: pytest.Config) -> RunPlugin | None:
    return next((plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, RunPlugin)), None)


@pytest.fixture(scope="session")
def current_run(pytestconfig: pytest.Config) -> RunPlugin:
    found = find_run(pytestconfig)
    assert found is not None
    return found


@pytest.fixture
def judge(request: pytest.FixtureRequest, current_run: RunPlugin) -> Judge:
    """Compares and records for the requesting test."""
    ids = cited(request.node)
    known = [current_run.requirements.get(id_, Requirement(id_, "?", "", "not in spec/")) for id_ in ids]
    callspec = getattr(request.node, "callspec", None)
    path = str(callspec.params.get("kind", "")) if callspec else ""
    return Judge(known, path, current_run.recorder, current_run.again, profile_of(current_run.backend))


@pytest.fixture
def driven(request: pytest.FixtureRequest, current_run: RunPlugin, judge: Judge) -> Iterator[Driven]:
    """The backend under test, with NumPy on both sides."""
    watched = WatchedBackend(current_run.backend, current_run.memory, current_run.limit, request.node.nodeid)
    driver = Driven(watched, judge)
    yield driver
    driver.close()
