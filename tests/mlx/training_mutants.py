"""Training on MLX, broken in one way each, and the test that has to notice."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from edge0_mlx.train import delta, losses, model, stages
from tests.mutants.replacing import wrapped

Patch = pytest.MonkeyPatch


def predictions_routed_where_they_are_made(patch: Patch) -> None:
    def predict_next(original: Any, call: Any, owner: Any, x: mx.array, executed: mx.array) -> None:
        original(call, owner, x, executed)
        shifted, last = call.predicted[owner.number + 1], call.after.predicted[owner.number + 1]
        call.predicted[owner.number + 1] = mx.concatenate([shifted[:, 1:], last[:, None]], axis=1)

    wrapped(patch, model.Call, "predict_next", predict_next)


def heads_trained_on_one_token_twice(patch: Patch) -> None:
    wrapped(patch, model, "build_features", lambda original, x, now, _, count: original(x, now, now, count))


def tokens_of_a_chunk_unaware_of_each_other(patch: Patch) -> None:
    patch.setattr(delta, "off_diagonal", lambda size, block: mx.zeros((size, size)))


def logits_taken_for_log_probabilities(patch: Patch) -> None:
    patch.setattr(losses, "log_softmax", lambda logits: logits)


def a_resumed_optimizer_begins_anew(patch: Patch) -> None:
    def load(original: Any, stage: Any, state: Any) -> None:
        fresh = stage.optimizer.state
        original(stage, state)
        stage.optimizer.state = fresh

    wrapped(patch, stages.Stage, "load", load)


MUTANTS: dict[Callable[[Patch], None], str] = {
    predictions_routed_where_they_are_made: "tests/train/test_mlx_parallel.py",
    heads_trained_on_one_token_twice: "tests/train/test_mlx_parallel.py",
    tokens_of_a_chunk_unaware_of_each_other: "tests/train/test_mlx_pieces.py",
    logits_taken_for_log_probabilities: "tests/train/test_mlx_pieces.py",
    a_resumed_optimizer_begins_anew: "tests/train/test_mlx_stages.py",
}
