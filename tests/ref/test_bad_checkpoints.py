"""What a stranger may put into a model folder: each mistake is a named error that says which, got and wanted."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_ref.errors import CheckpointError, UnsupportedModelError
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import (
    MODEL,
    Recipe,
    Tensor,
    Tensors,
    make_config,
    make_tensors,
    tensor,
    write_model,
)
from tests.ref.sound import CONFIG, EXPERTS, LAYER, NORM, RECIPE, TENSORS, refused, with_config

Change = Callable[[Tensors], None]


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def add(name: str, held: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, held)


def reshape(name: str, shape: tuple[int, ...], dtype: str | None = None) -> Change:
    """The same name with another shape, filled with zeros."""

    def change(tensors: Tensors) -> None:
        kind = dtype or tensors[name].dtype
        size = int(np.prod(shape)) * {"U32": 4, "F32": 4, "BF16": 2, "F16": 2, "I32": 4}[kind]
        tensors[name] = Tensor(kind, shape, bytes(size))

    return change


def rename(old: str, new: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


WRONG_TENSORS: list[tuple[Change, str]] = [
    (drop(f"{MODEL}.norm.weight"), r"norm\.weight is missing"),
    (drop(f"{EXPERTS}.up_proj.biases"), r"up_proj\.biases is missing"),
    (drop(f"{LAYER}.self_attn.q_proj.scales"), r"q_proj\.scales is missing"),
    (
        add(f"{EXPERTS}.extra_proj.weight", tensor(np.ones(3))),
        r"nothing in this architecture uses .*extra_proj\.weight",
    ),
    (add(f"{MODEL}.layers.2.mlp.switch_mlp.up_proj.weight", tensor(np.ones(3))), r"uses the tensor .*layers\.2\."),
    (reshape(f"{MODEL}.norm.weight", (65,)), r"norm\.weight: shape \[65\], config\.json says \[64\]"),
    (reshape(f"{MODEL}.norm.weight", (64,), "I32"), r"norm\.weight: dtype I32, wanted F32"),
    (
        reshape(f"{EXPERTS}.up_proj.weight", (3, 64, 8)),
        r"up_proj\.weight: \[3\] experts, config\.json says 4|3 experts",
    ),
    (
        reshape(f"{EXPERTS}.up_proj.scales", (3, 64, 2)),
        r"up_proj\.scales: shape \[3, 64, 2\], wanted \[4, 64, '\.\.\.'\]",
    ),
    (reshape(f"{EXPERTS}.up_proj.weight", (4, 64, 9)), r"up_proj\.weight: 9 words per row, needs 8 \(int4\) or 16"),
    (reshape(f"{EXPERTS}.up_proj.weight", (4, 64, 16)), r"up_proj: the shapes say 8 bits .* config\.json says 4 bits"),
    (reshape(f"{EXPERTS}.up_proj.weight", (4, 64, 8), "I32"), r"up_proj\.weight: dtype I32, wanted U32"),
    (reshape(f"{EXPERTS}.up_proj.biases", (4, 64, 2), "F32"), r"up_proj\.scales: BF16, biases F32; wanted one of"),
    (reshape(f"{EXPERTS}.up_proj.biases", (4, 64, 1)), r"up_proj\.biases: shape .* scales have \[4, 64, 2\]"),
    (reshape(f"{EXPERTS}.up_proj.weight", ()), r"up_proj\.weight: \[\] experts, config\.json says 4"),
    (rename(f"{EXPERTS}.gate_proj", f"{LAYER}.mlp.experts.0.gate_proj"), r"layer 1: experts are stored one by one"),
    (rename(f"{EXPERTS}.gate_proj", f"{LAYER}.mlp.gate_proj"), r"layer 1 is dense .* promises routed experts"),
    (rename(f"{EXPERTS}.", f"{LAYER}.mlp.elsewhere."), r"layer 1: no routed experts; wanted .*switch_mlp\.gate_proj"),
]


@pytest.mark.spec("STO-005", "STO-007", "STO-010")
@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS, ids=[message for _, message in WRONG_TENSORS])
def test_a_tensor_that_breaks_the_config_is_named_with_what_was_wanted(
    tmp_path: Path, change: Change, message: str
) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    assert re.search(message, refused(write_model(tmp_path / "model", CONFIG, tensors)))


@pytest.mark.spec("STO-005")
def test_both_coefficients_halved_in_number_contradict_the_group_size_of_the_config(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    for part in ("scales", "biases"):
        reshape(f"{EXPERTS}.down_proj.{part}", (4, 64, 1))(tensors)
    message = refused(write_model(tmp_path, CONFIG, tensors))
    assert "the shapes say 4 bits in groups of 64, config.json says 4 bits in groups of 32" in message
    for part in ("scales", "biases"):
        reshape(f"{EXPERTS}.down_proj.{part}", (4, 64, 4))(tensors)
    assert "4 groups per row of 64, wanted groups of 32, 64 or 128" in refused(write_model(tmp_path, CONFIG, tensors))


@pytest.mark.spec("STO-013")
def test_projections_of_one_layer_must_agree_in_dtype(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    for part in ("scales", "biases"):
        reshape(f"{EXPERTS}.down_proj.{part}", (4, 64, 2), "F16")(tensors)
    assert "three projections differ" in refused(write_model(tmp_path, CONFIG, tensors))


@pytest.mark.spec("STO-013")
def test_routed_experts_that_are_not_quantised_are_refused(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    for part in ("scales", "biases"):
        del tensors[f"{EXPERTS}.up_proj.{part}"]
    reshape(f"{EXPERTS}.up_proj.weight", (4, 64, 64), "BF16")(tensors)
    assert "not quantised" in refused(write_model(tmp_path, CONFIG, tensors))


@pytest.mark.spec("STO-007")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts", 5, r"switch_mlp\.gate_proj\.weight: \[4\] experts, config\.json says 5|4 experts"),
        ("num_experts_per_tok", 5, r"num_experts_per_tok 5 of 4 experts"),
        ("num_experts", [4, 6], r"num_experts is \[4, 6\], wanted int"),
        ("moe_intermediate_size", 128, r"wanted \[4, 128, '\.\.\.'\]"),
        ("hidden_size", 100, r"config\.json says 100 weights per row, wanted groups of 32, 64 or 128"),
        ("hidden_size", 128, r"layers\.0\.mlp\.switch_mlp\.gate_proj.*per row"),
        ("vocab_size", 33, r"embed_tokens\.weight: shape .*wanted \[33, '\.\.\.'\]"),
        ("num_hidden_layers", 3, r"layer 2: no routed experts"),
        ("num_hidden_layers", 1, r"uses the tensor .*layers\.1\."),
    ],
)
def test_a_config_that_contradicts_the_shapes_is_refused(tmp_path: Path, field: str, value: Any, message: str) -> None:
    config = with_config(lambda config: config["text_config"].__setitem__(field, value))
    assert re.search(message, refused(write_model(tmp_path, config, TENSORS)))


@pytest.mark.spec("STO-009")
@pytest.mark.parametrize("value", [None, 0, "absent"])
def test_a_dense_model_is_named_as_such(tmp_path: Path, value: Any) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["num_experts"] = value
        if value == "absent":
            del config["text_config"]["num_experts"]

    folder = write_model(tmp_path, with_config(change), TENSORS)
    assert "a dense model (no num_experts)" in refused(folder, UnsupportedModelError)


@pytest.mark.spec("STO-009")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "llama", "'llama'"),
        ("quantization", {"bits": 4, "group_size": 32, "mode": "mxfp4"}, "mode 'mxfp4'"),
        (
            "quantization",
            {"bits": 4, "group_size": 32, "m.gate": {"bits": 4, "group_size": 32, "mode": "x"}},
            "mode 'x'",
        ),
        ("norm_topk_prob", False, "norm_topk_prob is false"),
        ("attention_bias", True, "attention_bias is true"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "'yarn' rotary embeddings"),
    ],
)
def test_an_unsupported_architecture_or_variant_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    def change(config: dict[str, Any]) -> None:
        (config if field in config else config["text_config"])[field] = value

    assert message in refused(write_model(tmp_path, with_config(change), TENSORS), UnsupportedModelError)


@pytest.mark.spec("STO-006")
def test_a_stray_file_beside_an_index_is_ignored(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG, TENSORS, shards=3)
    (tmp_path / "model-00004-of-00003.safetensors").write_bytes(b"garbage")
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    assert set(open_checkpoint(tmp_path).tensors) == set(TENSORS)


@pytest.mark.spec("STO-006")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.clear(), "no weight_map"),
        (lambda index: index.__setitem__("weight_map", []), "no weight_map"),
        (
            lambda index: index["weight_map"].__setitem__("x", "absent.safetensors"),
            "absent.safetensors, which is missing",
        ),
        (lambda index: index["weight_map"].__setitem__("x", "model-00001-of-00002.safetensors"), "does not hold it"),
        (lambda index: index["weight_map"].__setitem__("x", "../model.safetensors"), "wanted a file name"),
        (lambda index: index["weight_map"].__setitem__("x", ""), "wanted a file name"),
        (lambda index: index["weight_map"].__setitem__("x", "n" * 300), "wanted a file name"),
        (lambda index: index["weight_map"].__setitem__("x", "\ud800\0"), "missing"),
        (lambda index: index["weight_map"].__setitem__("x", 5), "5, wanted a file name"),
        (lambda index: index["weight_map"].__delitem__(f"{MODEL}.norm.weight"), "norm.weight is missing"),
    ],
)
def test_an_index_is_held_against_its_shards(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = write_model(tmp_path, CONFIG, TENSORS, shards=2) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    assert message in refused(tmp_path)


@pytest.mark.spec("STO-006")
def test_a_name_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, CONFIG, TENSORS, shards=2) / "model.safetensors.index.json"
    name = f'"{MODEL}.norm.weight": '
    path.write_text(path.read_text().replace(name, f'{name}"model-00001-of-00002.safetensors", {name}'))
    assert "occurs twice" in refused(tmp_path)


@pytest.mark.spec("STO-004")
@pytest.mark.parametrize("gone", ["scales", "biases"])
def test_one_of_scales_and_biases_wants_the_other(tmp_path: Path, gone: str) -> None:
    tensors = dict(TENSORS)
    del tensors[f"{LAYER}.self_attn.q_proj.{gone}"]
    assert f"q_proj.{gone} is missing" in refused(write_model(tmp_path, CONFIG, tensors))


@pytest.mark.spec("STO-004")
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_layer_with_neither_is_read_as_the_numbers_it_holds(tmp_path: Path, dtype: Any) -> None:
    module = f"{LAYER}.self_attn.q_proj"
    values = np.arange(128 * 64, dtype=np.float32).reshape(128, 64) % 256 - 128  # whole numbers of 8 bits
    tensors = {name: held for name, held in TENSORS.items() if not name.startswith(module)}
    tensors[f"{module}.weight"] = tensor(values, dtype)
    np.testing.assert_array_equal(open_checkpoint(write_model(tmp_path, CONFIG, tensors)).matrix(module), values)


@pytest.mark.spec("STO-004", "NUM-009")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [f"{LAYER}.self_attn.q_proj.scales", f"{LAYER}.self_attn.q_proj.biases", NORM])
def test_a_resident_tensor_with_nan_or_infinity_is_refused_when_it_is_read(
    tmp_path: Path, name: str, poison: float
) -> None:
    values = np.ones(TENSORS[name].shape, np.float32)
    values.flat[-1] = poison
    tensors = {**TENSORS, name: tensor(values, "BF16")}
    checkpoint = open_checkpoint(write_model(tmp_path, CONFIG, tensors))
    read, named = (checkpoint.vector, name) if name == NORM else (checkpoint.matrix, name.rpartition(".")[0])
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}: holds NaN or infinity"):
        read(named)


@pytest.mark.spec("STO-006", "STO-007", "STO-008")
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        replace(RECIPE, tied=True, extras=True, coefficients="F16"),
        replace(RECIPE, expert_bits=8, hidden=128, group_size=64, coefficients="F32"),
        replace(RECIPE, overrides={f"{MODEL}.layers.0.mlp.gate": 0, f"{LAYER}.self_attn.o_proj": 8}),
    ],
    ids=["plain", "tied", "int8", "overrides"],
)
def test_every_layout_of_a_sound_model_opens_and_reads_back(tmp_path: Path, recipe: Recipe, shards: int) -> None:
    tensors = make_tensors(recipe)
    checkpoint = open_checkpoint(write_model(tmp_path, make_config(recipe), tensors, shards, layout_seed=shards))
    assert set(checkpoint.tensors) | set(checkpoint.skipped) == set(tensors)
    assert len(checkpoint.skipped) == (3 if recipe.extras else 0)
    for name in checkpoint.tensors:
        assert checkpoint.read(name).tobytes() == tensors[name].data
