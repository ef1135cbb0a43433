"""The losses against a float64 oracle, and their gradients against differences of themselves."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge0_ref.contract import Array
from edge0_ref.errors import ShapeError
from edge0_ref.losses import forward_kl, tail_reverse_kl
from tests.train.oracles import chances, divergence, likeliest, with_tail

CLASSES = 7
LOGITS = hnp.arrays(np.float64, (3, CLASSES), elements=st.floats(-8, 8, width=32))
# logits within 8 of 0: each of some 4n terms of a sum over n classes is off by a few units in the last place, and the
# logarithms of the ratios are at most 16 + log n
BOUND = 64 * CLASSES * 20 * 2.0**-53
STEP = 1e-5
# a central difference is off by step^2 / 6 times a third derivative (below 2 * 20 here), and by rounding / step
SLOPE_BOUND = STEP**2 * 40 + BOUND / STEP


def slope_by_differences(loss: Callable[[Array], Array], student: Array) -> Array:
    slopes = np.empty_like(student)
    for place in np.ndindex(*student.shape):
        above, below = student.copy(), student.copy()
        above[place] += STEP
        below[place] -= STEP
        slopes[place] = (loss(above)[place[0]] - loss(below)[place[0]]) / (2 * STEP)
    return slopes


@pytest.mark.spec("TRN-001")
@given(LOGITS, LOGITS)
def test_forward_kl_is_the_divergence_from_teacher_to_student(teacher: Array, student: Array) -> None:
    losses, slopes = forward_kl(teacher, student)
    for loss, theirs, ours in zip(losses, teacher, student, strict=True):
        assert abs(loss - divergence(chances(theirs), chances(ours))) <= BOUND
    wanted = slope_by_differences(lambda moved: forward_kl(teacher, moved)[0], student)
    assert np.abs(slopes - wanted).max() <= SLOPE_BOUND


@pytest.mark.spec("TRN-002")
@given(LOGITS, LOGITS, st.integers(1, CLASSES - 1))
def test_the_tail_counts_as_one_class(teacher: Array, student: Array, k: int) -> None:
    losses, slopes = tail_reverse_kl(teacher, student, k)
    for loss, theirs, ours in zip(losses, teacher, student, strict=True):
        kept = likeliest(theirs.tolist(), k)
        q, p = (with_tail(chances(row), kept) for row in (ours, theirs))
        assert abs(loss - divergence(q, p)) <= BOUND
        assert -BOUND <= loss <= divergence(chances(ours), chances(theirs)) + BOUND
    wanted = slope_by_differences(lambda moved: tail_reverse_kl(teacher, moved, k)[0], student)
    assert np.abs(slopes - wanted).max() <= SLOPE_BOUND


@pytest.mark.spec("TRN-002")
def test_agreeing_on_the_top_and_on_the_tails_mass_costs_nothing() -> None:
    teacher, student = np.log([[0.5, 0.3, 0.1, 0.1]]), np.log([[0.5, 0.3, 0.02, 0.18]])
    losses, slopes = tail_reverse_kl(teacher, student, 2)
    assert np.abs(losses).max() <= BOUND
    assert np.abs(slopes).max() <= BOUND


@pytest.mark.spec("TRN-002")
def test_a_tail_of_next_to_nothing_keeps_its_logarithm() -> None:
    teacher, student = np.array([[200.0, 0.0, -1.0]]), np.array([[400.0, 0.0, -1.0]])
    losses, _ = tail_reverse_kl(teacher, student, 1)
    assert np.isfinite(losses).all()
    with pytest.raises(ShapeError, match="top k of 3, wanted 1 to 2 of 3 classes"):
        tail_reverse_kl(teacher, student, 3)
