"""Sixteen lanes: compiled instructions against their own Python."""

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref import fast_rows, lanes

SEEDS = st.integers(0, 2**32 - 1)
compiled = pytest.mark.skipif(not hasattr(fast_rows.arrange_token, "py_func"), reason="Numba is switched off")


@numba.njit
def every_instruction(bytes_, words, numbers, index, y):
    """Each on its own row."""
    lanes.store(y, 0, lanes.zeros())
    lanes.store(y, 16, lanes.spread(numbers[index]))
    lanes.store(y, 32, lanes.codes(bytes_, index))
    lanes.store(y, 48, lanes.low_codes(bytes_, index))
    lanes.store(y, 64, lanes.high_codes(bytes_, index))
    lanes.store(y, 80, lanes.bfloat16s(words, index))
    lanes.store(y, 96, lanes.float16s(words, index))
    lanes.store(y, 112, lanes.float32s(words, 2 * index))
    lanes.store(y, 128, lanes.multiply_add(lanes.load(numbers, index), lanes.load(numbers, 0), lanes.load(numbers, 1)))
    for place in range(7):
        lanes.store(y, 144 + 16 * place, lanes.nibbles(bytes_, index, place))
    lanes.store(y, 256, lanes.last_nibbles(bytes_, index))
    lanes.store(y, 272, lanes.quarters(numbers[index], numbers[0], numbers[1], numbers[2]))
    y[18, 0] = lanes.total(lanes.load(numbers, index))
    for kind in range(3):
        y[18, 1 + kind] = lanes.number(words, index, kind)
    lanes.fetch(bytes_, index)  # changes nothing


@compiled
@pytest.mark.spec("NUM-001")
@given(seed=SEEDS, index=st.integers(0, 20))
def test_compiled_lanes_equal_their_own_source_to_the_bit(seed: int, index: int) -> None:
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2**16, 80).astype(np.uint16)
    patterns[(patterns & 0x7C00) == 0x7C00] = 0x3C00  # no NaN or infinity of either kind
    patterns[(patterns & 0x7F80) == 0x7F80] = 0x3F80
    codes = rng.integers(0, 256, 84).astype(np.uint8)
    numbers = (rng.integers(-(2**10), 2**10, 40) / 8).astype(np.float32)  # sums and products are exact
    results = [np.zeros((19, 16), np.float32) for _ in range(2)]
    for run, y in zip((every_instruction, every_instruction.py_func), results, strict=True):
        run(codes, patterns, numbers, index, y)
    assert results[0].tobytes() == results[1].tobytes()
