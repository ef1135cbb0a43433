"""One head by hand: forward as the engine computes it, backward as differences say, and learning."""

import numpy as np
import pytest

from edge0_ref.contract import Array, PrerouterHead
from edge0_ref.head_training import backward, forward, no_memory, train_step, warm_start
from edge0_ref.losses import forward_kl
from edge0_ref.prerouter import predict

TOKENS, HIDDEN, EXPERTS, WIDTH = 5, 6, 4, 3
FEATURES = HIDDEN + 2 * EXPERTS
STEP = 1e-5


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def head(random: np.random.Generator) -> PrerouterHead:
    shapes = {"fc1": (WIDTH, FEATURES), "fc2": (EXPERTS, WIDTH), "linear": (EXPERTS, FEATURES)}
    return PrerouterHead(**{name: random.normal(size=shape) for name, shape in shapes.items()})


@pytest.mark.spec("TRN-003")
def test_a_head_starts_as_the_next_layers_router(random: np.random.Generator) -> None:
    router, features = random.normal(size=(EXPERTS, HIDDEN)), random.normal(size=(TOKENS, FEATURES))
    logits, _ = forward(warm_start(router, EXPERTS, WIDTH, seed=1), features)
    wanted = features[:, :HIDDEN] @ router.T
    assert (
        np.abs(logits - wanted).max() <= (2 * FEATURES + 8) * 2.0**-53 * np.abs(features).sum() * np.abs(router).max()
    )


@pytest.mark.spec("TRN-003")
def test_forward_is_what_the_engine_predicts(head: PrerouterHead, random: np.random.Generator) -> None:
    features = random.normal(size=(TOKENS, FEATURES)).astype(np.float32)
    stored = PrerouterHead(*(part.astype(np.float32) for part in vars(head).values()))
    wide = PrerouterHead(*(part.astype(np.float64) for part in vars(stored).values()))
    logits, seen = forward(wide, features.astype(np.float64))
    # float32 sums of FEATURES terms, then of WIDTH terms of what came out of the first, each a few units off
    size = np.abs(features) @ np.abs(stored.linear).T + np.abs(seen.bent) @ np.abs(stored.fc2).T
    size += np.abs(features) @ np.abs(stored.fc1).T @ np.abs(stored.fc2).T
    assert (np.abs(logits - predict(stored, features)) <= 2 * (FEATURES + WIDTH + 8) * 2.0**-24 * size).all()


@pytest.mark.spec("TRN-003")
@pytest.mark.parametrize("name", ["fc1", "fc2", "linear"])
def test_gradients_are_those_of_the_loss(head: PrerouterHead, random: np.random.Generator, name: str) -> None:
    features, wanted = random.normal(size=(TOKENS, FEATURES)), random.normal(size=(TOKENS, EXPERTS))

    def loss(part: Array) -> float:
        moved = PrerouterHead(**{**vars(head), name: part})
        return float(forward_kl(wanted, forward(moved, features)[0])[0].sum())

    logits, seen = forward(head, features)
    gradient = getattr(backward(head, features, seen, forward_kl(wanted, logits)[1]), name)
    part: Array = getattr(head, name)
    # a third derivative of at most (largest feature or weight)^3 a token, and rounding of a loss of about 10
    largest = max(1.0, np.abs(features).max(), np.abs(part).max(), np.abs(head.fc2).max())
    bound = STEP**2 * TOKENS * 10 * largest**3 + 1e3 * 2.0**-53 / STEP
    for place in np.ndindex(*part.shape):
        above, below = part.copy(), part.copy()
        above[place] += STEP
        below[place] -= STEP
        assert abs(gradient[place] - (loss(above) - loss(below)) / (2 * STEP)) <= bound


def test_a_head_learns_what_the_line_cannot_say(random: np.random.Generator) -> None:
    """The wanted routing depends on the product of two features; only the bent part can follow it."""
    features = random.normal(size=(256, FEATURES))
    wanted = np.outer(features[:, 0] * features[:, 1], [3.0, -3.0, 0.0, 0.0])
    head = warm_start(np.zeros((EXPERTS, HIDDEN)), EXPERTS, 16, seed=2)
    first, memory = forward_kl(wanted, forward(head, features)[0])[0].mean(), no_memory(head)
    for _ in range(300):
        head, memory, loss = train_step(head, memory, features, wanted, 0.02)
    assert memory.steps == 300
    assert loss < first / 2
