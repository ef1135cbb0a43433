"""Tests of the MLX backend: they run where MLX is installed, on whatever device it finds."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.adapters import Adapters, open_adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import Recipe, build, build_adapters

collect_ignore_glob = [] if find_spec("mlx") else ["test_*.py", "bench_*.py"]

RECIPE = Recipe(layers=4, attention=4, experts=8, top_k=2, value_heads=2)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Three delta nets, one attention, eight experts of which two run."""
    return open_checkpoint(build(tmp_path_factory.mktemp("small"), RECIPE))


@pytest.fixture(scope="session")
def adapters(small: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """A head for every layer but the last, and a LoRA beside every projection."""
    targets = {module: shape for module, shape in small.config.tensors.linears.items() if "proj" in module}
    folder = build_adapters(tmp_path_factory.mktemp("adapters"), RECIPE, range(RECIPE.layers - 1), targets)
    return open_adapters(folder, small.config)


class Opened:
    """Makes decoders of the MLX backend and closes them: in float32, whose bounds tests have, also on a GPU."""

    def __init__(self) -> None:
        from edge0_mlx.backend import in_float32

        self.backend, self.decoders = in_float32(), list[Any]()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.decoders.append(self.backend.decoder(*arguments, **named))
        return self.decoders[-1]


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    for decoder in opened.decoders:
        decoder.close()


def data(name: str) -> Path:
    return Path(__file__).parents[1] / "data" / name
