"""The paths a result may take, as pytest parameters: each executor is judged and reported by itself."""

import pytest
from hypothesis import settings

from edge0_ref.contract import EXECUTOR_KINDS


def kinds(*names: str) -> pytest.MarkDecorator:
    """`kind` runs over these executors; each needs its own claim."""
    return pytest.mark.parametrize("kind", [pytest.param(n, marks=pytest.mark.claim(f"executor:{n}")) for n in names])


every_executor = kinds(*EXECUTOR_KINDS)
every_slot_table = kinds("staged", "hot")


def examples(share: float) -> settings:
    """A share of the profile's examples, for a test whose examples are dear."""
    return settings(max_examples=max(2, round(settings.default.max_examples * share)))
