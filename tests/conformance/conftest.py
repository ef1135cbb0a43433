"""The suite as its users run it: signatures of the reference are not checked at run time."""

from collections.abc import Iterator

import pytest

from tests.conftest import checks_off


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it() -> Iterator[None]:
    with checks_off():
        yield
