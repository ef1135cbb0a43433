"""A snapshot that leaves its decoder, as arrays, is the same snapshot in another one."""

import numpy as np
import pytest

from edge0_ref.contract import Plan
from edge0_ref.inventory import open_checkpoint
from tests.mlx.conftest import Opened, data


@pytest.mark.spec("ENG-081")
@pytest.mark.parametrize("name", ["small", "ling_mlx4_bf16", "ling_edge0"])
def test_a_state_that_was_arrays_is_the_same_state(small, adapters, opened: Opened, name: str) -> None:
    checkpoint = small if name == "small" else open_checkpoint(data(name))
    given = (checkpoint, Plan(top_k=2, slots=4), adapters if name == "small" else None)
    here, there = opened(*given), opened(*given)
    here.prefill([*range(1, 61)])
    here.step(5)
    there.prefill([8])
    arrays = here.arrays_of(here.snapshot())
    there.restore(there.state_of(arrays))
    assert there.position == here.position == 61
    assert bool(there.state.predicted) == (name == "small")
    for token in range(5, 11):  # beyond 64, where caches grow
        np.testing.assert_array_equal(np.array(there.step(token)), np.array(here.step(token)))
