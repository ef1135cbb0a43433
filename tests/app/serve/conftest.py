"""One server of each kind for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.serve.parrot import make_model
from tests.app.serve.servers import PARROT, Server, serving

KEY = "let me in"


@pytest.fixture(scope="session")
def parrot_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("serve") / "parrot")


@pytest.fixture(scope="session")
def parrot(parrot_model: Path) -> Iterator[Server]:
    """Says what it is told to."""
    with serving(parrot_model.parent, parrot_model, *PARROT, "--queue", 100) as server:
        yield server


@pytest.fixture(scope="session")
def strict(parrot_model: Path) -> Iterator[Server]:
    """The same, in a hurry, and with a key."""
    limits = ("--queue", 1, "--deadline", 3, "--body-seconds", 1, "--comment-seconds", 0.05, "--max-body", "20KiB")
    with serving(parrot_model.parent, parrot_model, *PARROT, *limits, "--api-key", KEY, key=KEY) as server:
        yield server


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model."""
    with serving(tmp_path_factory.mktemp("real"), "--backend", "numba", "--context", 512) as server:
        yield server


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model without its chat template."""
    folder = tmp_path_factory.mktemp("bare") / "bare"
    make_model(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', "utf-8")
    with serving(folder.parent, folder, "--no-adapters", "--backend", "numba", "--context", 512) as server:
        yield server
