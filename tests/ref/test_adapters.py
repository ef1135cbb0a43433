"""Adapter files: what is written is read back, what belongs to another model is refused by name."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.adapters import Adapters, open_adapters, write_adapters
from edge0_ref.config import ModelConfig
from edge0_ref.contract import Lora, PrerouterHead
from edge0_ref.errors import AdapterError
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import (
    MODEL,
    Recipe,
    Tensors,
    adapter_metadata,
    adapter_tensors,
    build,
    tensor,
    write_safetensors,
)

RECIPE = Recipe(layers=4, experts=4, vocab=32)
OWNERS = [0, 1, 2]
Q_PROJ = f"{MODEL}.layers.1.self_attn.q_proj"
TARGETS = {Q_PROJ: (128, 64), f"{MODEL}.layers.0.mlp.shared_expert.down_proj": (64, 64)}
TENSORS = adapter_tensors(RECIPE, OWNERS, TARGETS)
METADATA = json.loads(adapter_metadata(RECIPE, OWNERS)["__metadata__"])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_checkpoint(build(tmp_path_factory.mktemp("model"), RECIPE)).config


def write(folder: Path, tensors: Tensors = TENSORS, **metadata: Any) -> Path:
    """An adapter folder; a metadata value of None leaves the field out."""
    values = {key: value for key, value in {**METADATA, **metadata}.items() if value is not None}
    write_safetensors(folder / "a.safetensors", tensors, metadata={"__metadata__": json.dumps(values)})
    return folder


def refused(folder: Path, config: ModelConfig) -> str:
    with pytest.raises(AdapterError) as caught:
        open_adapters(folder, config)
    return str(caught.value)


def changed(**parts: Any) -> Tensors:
    """Tensors with some replaced (shape), added (Tensor) or left out (None); `__` in a name stands for `.`."""
    tensors = dict(TENSORS)
    for name, value in parts.items():
        full = name.replace("__", ".").replace("Q_PROJ", Q_PROJ)
        if value is None:
            del tensors[full]
        else:
            tensors[full] = tensor(np.ones(value)) if isinstance(value, tuple) else value
    return tensors


def renamed(old: str, new: str) -> Tensors:
    return {name.replace(old, new): held for name, held in TENSORS.items()}


def values_of(adapters: Adapters) -> dict[str, np.ndarray]:
    heads = {f"{n}.{part}": getattr(h, part) for n, h in adapters.heads.items() for part in ("fc1", "fc2", "linear")}
    return heads | {f"{m}.{part}": getattr(x, part) for m, x in adapters.loras.items() for part in ("down", "up")}


@pytest.mark.spec("PRE-010", "PRE-013", "LOR-002")
@given(rank=st.integers(1, 5), width=st.integers(1, 9), alpha=st.floats(0.125, 64), seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_back_to_the_bit(
    tmp_path: Path, config: ModelConfig, rank: int, width: int, alpha: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)

    def half(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float16).astype(np.float32)

    features = RECIPE.hidden + 2 * RECIPE.experts
    heads = {n: PrerouterHead(half(width, features), half(4, width), half(4, features)) for n in OWNERS}
    loras = {name: Lora(half(rank, cols), half(rows, rank), alpha / rank) for name, (rows, cols) in TARGETS.items()}
    metadata = {"K": 3, "r": rank, "alpha": alpha, "owners": OWNERS, "source": "a test"}
    write_adapters(tmp_path / "a.safetensors", heads, loras, metadata)
    opened = open_adapters(tmp_path, config)
    wanted, got = values_of(Adapters(heads, loras)), values_of(opened)
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(got[name], values)
    assert {lora.scale for lora in opened.loras.values()} == {alpha / rank}
    assert opened.top_k == 3
    assert opened.metadata == metadata
    assert opened.widened_bytes == 2 * opened.nbytes == sum(values.nbytes for values in wanted.values())
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.spec("PRE-013")
@pytest.mark.parametrize("poison", [70000.0, np.inf, np.nan])
def test_what_float16_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path, poison: float) -> None:
    lora = Lora(np.full((1, 64), poison, np.float32), np.ones((128, 1), np.float32), 1.0)
    with pytest.raises(AdapterError, match=f"{Q_PROJ}.lora_A holds NaN, infinity"):
        write_adapters(tmp_path / "a.safetensors", {}, {Q_PROJ: lora}, {"alpha": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("PRE-013")
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_ends_half_way_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = write(tmp_path) / "a.safetensors"
    before = path.read_bytes()

    def half(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(before[: len(before) // 2])
        raise error

    monkeypatch.setattr("edge0_ref.adapters.save_file", half)
    with pytest.raises(error):
        write_adapters(path, {}, {Q_PROJ: Lora(np.ones((1, 64)), np.ones((128, 1)), 1.0)}, {"alpha": 1})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.spec("PRE-010", "LOR-006")
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_every_dtype_and_both_spellings_of_a_head_and_of_a_target_are_read(
    tmp_path: Path, config: ModelConfig, dtype: Any
) -> None:
    tensors = adapter_tensors(RECIPE, OWNERS, TARGETS, dtype=dtype)
    published = {re.sub(r"^(layers\.\d+)\.", r"\1.mlp.prerouter.", name): held for name, held in tensors.items()}
    shorter = {name.removeprefix("language_model."): held for name, held in published.items()}
    first, second = (open_adapters(write(tmp_path, held), config) for held in (tensors, shorter))
    got, wanted = values_of(second), values_of(first)
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.spec("PRE-010", "PRE-015", "PRE-017")
def test_heads_and_lora_may_be_in_two_files_that_agree(tmp_path: Path, config: ModelConfig) -> None:
    heads = {name: held for name, held in TENSORS.items() if name.startswith("layers.")}
    loras = {name: held for name, held in TENSORS.items() if name not in heads}
    write_safetensors(tmp_path / "heads.safetensors", heads, metadata={"K": "2", "owners": json.dumps(OWNERS)})
    write_safetensors(tmp_path / "loras.safetensors", loras, metadata=adapter_metadata(RECIPE, OWNERS))
    assert set(open_adapters(tmp_path, config).heads) == set(OWNERS)
    write_safetensors(tmp_path / "heads.safetensors", heads, metadata={"K": "3"})
    assert "loras.safetensors: K is 2, another file of the folder says 3" in refused(tmp_path, config)
    write_safetensors(tmp_path / "heads.safetensors", TENSORS)
    assert "occurs twice in the folder" in refused(tmp_path, config)


@pytest.mark.spec("PRE-010", "LOR-005")
def test_settings_have_one_name_each(tmp_path: Path, config: ModelConfig) -> None:
    """Of two names for one thing, two files of a folder could use one each, and disagree."""
    assert open_adapters(write(tmp_path, K=None, k=3, top_k=3, rank=1000), config).top_k is None
    assert "does not say alpha" in refused(write(tmp_path, alpha=None, lora_alpha=4), config)


@pytest.mark.spec("PRE-011")
def test_a_k_that_differs_from_the_config_is_said_aloud(tmp_path: Path, config: ModelConfig) -> None:
    opened = open_adapters(write(tmp_path, K=3), config)
    assert opened.top_k == 3
    assert re.search(r"K = 3 .* config\.json says 2", " ".join(opened.notes))
    assert open_adapters(write(tmp_path, K=2), config).notes == ()
    assert open_adapters(write(tmp_path, K=None), config).top_k is None


WRONG: list[tuple[Callable[[Path], Path], str]] = [
    (lambda f: write(f, changed(layers__1__fc1__weight=(8, 73))), r"layer 1: fc1 is \[8, 73\], .* needs \[8, 72\]"),
    (lambda f: write(f, changed(layers__1__fc2__weight=(5, 8))), r"layer 1: fc2 is \[5, 8\], .* needs \[4, 8\]"),
    (lambda f: write(f, changed(layers__1__linear_init__weight=(72, 4))), r"linear_init is \[72, 4\]"),
    (lambda f: write(f, changed(layers__1__fc2__weight=None)), r"head of layer 1: fc2 missing"),
    (lambda f: write(f, changed(layers__1__fc1__weight=(8, 9, 1))), r"fc1\.weight: shape \[8, 9, 1\], wanted a matrix"),
    (lambda f: write(f, changed(layers__1__fc1__weight=(0, 72))), r"fc1\.weight: shape \[0, 72\], wanted a matrix"),
    (lambda f: write(f, changed(layers__1__fc1__bias=(8,))), r"layers\.1\.fc1\.bias is neither .* head nor a LoRA"),
    (
        lambda f: write(f, renamed("layers.2.", "layers.3."), owners=[0, 1, 3]),
        r"layer 3: layer 4 has no .* 4 layers",
    ),
    (lambda f: write(f, renamed("layers.2.", "layers.9."), owners=[0, 1, 9]), r"its own layer 9 has no routed experts"),
    (lambda f: write(f, owners=[0, 1, 2, 3]), r"names the owners \[0, 1, 2, 3\], the files hold heads of \[0, 1, 2\]"),
    (lambda f: write(f, owners=[0, 1]), r"names the owners \[0, 1\]"),
    (lambda f: write(f, owners="many"), r"owners is 'many', wanted a list of layers"),
    (lambda f: write(f, owners=[0, 1, 2.5]), r"owners is \[0, 1, 2\.5\], wanted a list of layers"),
    (lambda f: write(f, changed(Q_PROJ__lora_A=(4, 65))), r"q_proj: lora_A is \[4, 65\], this model needs \[4, 64\]"),
    (
        lambda f: write(f, changed(Q_PROJ__lora_B=(128, 5))),
        r"q_proj: lora_B is \[128, 5\], .* needs \[128, 4\]",
    ),
    (lambda f: write(f, changed(Q_PROJ__lora_B=None)), r"q_proj: only lora_A; wanted lora_A and lora_B"),
    (lambda f: write(f, r=8), r"rank 4, the metadata says r = 8"),
    (lambda f: write(f, alpha=None), r"does not say alpha"),
    (lambda f: write(f, alpha=0), r"alpha is 0, wanted a number above 0"),
    (lambda f: write(f, alpha="much"), r"alpha is 'much', wanted a number above 0"),
    (lambda f: write(f, K=5), r"K is 5, wanted 1 to 4"),
    (lambda f: write(f, K=2.5), r"K is 2\.5, wanted 1 to 4"),
    (
        lambda f: write(f, renamed("self_attn.q_proj", "self_attn.x_proj")),
        r"x_proj: .* no such linear layer",
    ),
    (
        lambda f: write(f, renamed("1.self_attn.q_proj", "1.mlp.switch_mlp.up_proj")),
        r"LoRA on the routed experts",
    ),
    (
        lambda f: write(f, renamed("layers.1.self_attn.q_proj", "embed_tokens")),
        r"the embedding is looked up",
    ),
]


@pytest.mark.spec("PRE-012", "PRE-014", "PRE-015", "LOR-003", "LOR-004", "LOR-005")
@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_adapters_that_do_not_belong_to_the_model_are_refused_by_name(
    tmp_path: Path, config: ModelConfig, make: Callable[[Path], Path], message: str
) -> None:
    assert re.search(message, refused(make(tmp_path), config))


@pytest.mark.spec("PRE-012")
def test_adapters_of_another_model_are_refused(tmp_path: Path, config: ModelConfig) -> None:
    for other in (replace(RECIPE, hidden=128), replace(RECIPE, experts=5)):
        folder = write(tmp_path, adapter_tensors(other, OWNERS, {}))
        assert "head of layer 0: fc1 is" in refused(folder, config)


@pytest.mark.spec("PRE-016", "NUM-009")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["layers.1.fc1.weight", f"{Q_PROJ}.lora_B"])
def test_nan_and_infinity_are_refused(tmp_path: Path, config: ModelConfig, name: str, poison: float) -> None:
    values = np.ones(TENSORS[name].shape, np.float32)
    values.flat[-1] = poison
    assert f"{name}: holds NaN or infinity" in refused(write(tmp_path, {**TENSORS, name: tensor(values)}), config)


@pytest.mark.spec("PRE-010")
def test_a_folder_without_adapters_and_a_damaged_file_are_named(tmp_path: Path, config: ModelConfig) -> None:
    assert "no adapter files" in refused(tmp_path, config)
    assert "absent: no such folder" in refused(tmp_path / "absent", config)
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    assert "link: not a folder" in refused(tmp_path / "link", config)
    path = write(tmp_path) / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in refused(tmp_path, config)
    write_safetensors(path, TENSORS, metadata={"__metadata__": "{"})
    assert "the metadata: not readable as JSON" in refused(tmp_path, config)
