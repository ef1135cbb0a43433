"""Runs of `edge0 train` on little text, in this process."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge0_ref.app.locate import embedded_model
from edge0_ref.app.train import Job
from edge0_ref.training import TrainSettings

collect_ignore_glob = [] if find_spec("mlx") else ["test_mlx_*.py"]

HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.txt"
SETTINGS = TrainSettings("heads", steps=5, learning_rate=1e-3, batch=2, window=16, prompt=4, rank=2)
MakeJob = Callable[..., Job]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Two chapters of held-out text."""
    path = tmp_path / "text.txt"
    path.write_text(HELD_OUT.read_text("utf-8")[:6000], "utf-8")
    return path


@pytest.fixture
def job(tmp_path: Path, text: Path) -> MakeJob:
    """The embedded model, taught by itself; whatever is named, otherwise."""
    here = Job(
        student=embedded_model(),
        teacher=embedded_model(),
        text=text,
        out=tmp_path / "run",
        backend="tests.train.numpy_trainer:create",
        tell=lambda line: None,
    )
    return lambda **changes: replace(here, **changes)
