"""Files of the Ling family: the layouts they come in, the heads they carry, the models they may not hold."""

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_ref.adapters import adapters_of, open_adapters
from edge0_ref.app.api import open_model
from edge0_ref.app.inspect import describe
from edge0_ref.config import KdaConfig, read_config
from edge0_ref.errors import AdapterError, CheckpointError, UnsupportedModelError
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import Tensors, tensor, write_model, write_safetensors
from tests.ref.conftest import Open
from tests.ref.ling import CONFIG, DATA, TOKENS, config_with, floats, head_tensors, metadata, tensors_of

EXPERT_BYTES = 1_327_104  # of the published model


def as_one_matrix(tensors: Tensors) -> Tensors:
    """kv_b out of its two stacks: of each head the key rows, then the value rows."""
    changed = dict(tensors)
    for name in [name for name in tensors if name.endswith("embed_q.weight")]:
        path = name.removesuffix("embed_q.weight")
        keys, values = floats(changed.pop(name)), floats(changed.pop(f"{path}unembed_out.weight"))
        rows = np.concatenate([np.concatenate([keys[h].T, values[h]]) for h in range(keys.shape[0])])
        changed[f"{path}kv_b_proj.weight"] = tensor(rows)
    return changed


def with_experts_renamed(tensors: Tensors) -> Tensors:
    return {name.replace(".switch_mlp.", ".experts."): held for name, held in tensors.items()}


@pytest.mark.spec("DEC-054", "DEC-061", "STO-006")
@pytest.mark.parametrize("change", [dict, as_one_matrix, with_experts_renamed])
@pytest.mark.parametrize("shards", [1, 3])
def test_layouts_of_the_same_weights_give_the_same_bits(
    change: Callable[[Tensors], Tensors], shards: int, opened: Open, tmp_path: Path
) -> None:
    wanted = opened(DATA / "ling_mlx4").all_logits(TOKENS)
    config = json.loads((DATA / "ling_mlx4" / "config.json").read_text("utf-8"))
    folder = write_model(tmp_path / "other", config, change(tensors_of("ling_mlx4")), shards)
    np.testing.assert_array_equal(opened(folder).all_logits(TOKENS), wanted)


@pytest.mark.spec("STO-007", "DEC-061")
@pytest.mark.parametrize("gone", ["embed_q", "unembed_out"])
def test_half_of_two_stacks_is_refused(gone: str, tmp_path: Path) -> None:
    tensors = {name: held for name, held in tensors_of("ling_mlx4").items() if f"3.attention.{gone}" not in name}
    with pytest.raises(CheckpointError, match=rf"layers\.3\.attention\.{gone}\.weight is missing"):
        open_checkpoint(write_model(tmp_path / "half", CONFIG, tensors))


def with_heads(folder: Path, owners: tuple[int, ...] = (2, 4), told: tuple[int, ...] = (2, 4), **more: Any) -> Path:
    """The one-file fixture with heads baked in."""
    tensors = tensors_of("ling_edge0") | head_tensors("model.layers.{}.mlp.prerouter", owners)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", tensors, metadata=metadata(told, **more))
    return folder


def heads_folder(folder: Path, owners: tuple[int, ...], seed: int = 0, **more: Any) -> Path:
    folder.mkdir()
    write_safetensors(
        folder / "a.safetensors", head_tensors("layers.{}", owners, seed), metadata=metadata(owners, **more)
    )
    return folder


@pytest.mark.spec("DEC-063", "PRE-010")
@pytest.mark.parametrize("more", [{}, {"K": 3}])
def test_heads_in_the_models_own_file_are_heads_of_an_adapter_folder(
    more: dict[str, int], opened: Open, tmp_path: Path
) -> None:
    baked = open_checkpoint(with_heads(tmp_path / "baked", **more))
    plain = open_checkpoint(DATA / "ling_edge0")
    inside, outside = (
        adapters_of(baked, None),
        open_adapters(heads_folder(tmp_path / "a", (2, 4), **more), plain.config),
    )
    assert set(inside.heads) == {2, 4}
    assert inside.top_k == outside.top_k == more.get("K")
    runs = []
    for checkpoint, adapters in ((baked, inside), (plain, outside)):
        decoder = opened(checkpoint, adapters, top_k=3)
        decoder.prefill(TOKENS[:4])
        runs.append([decoder.step(token) for token in TOKENS[4:]])
    np.testing.assert_array_equal(*runs)


@pytest.mark.spec("DEC-063", "PRE-018")
def test_baked_heads_are_used_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    with open_model(with_heads(tmp_path / "baked", K=3), notify=said.append) as model:
        facts = describe(model)
        ids = [piece.token_id for piece in model.generate([5, 6, 7], max_tokens=4)]
    assert facts["adapters"]["owners"] == [2, 4]
    assert facts["experts"]["top_k"] == 3
    assert any("2 prerouter heads" in line and "own files" in line for line in said)
    assert ids
    with open_model(tmp_path / "baked", use_adapters=False) as model:
        assert describe(model)["adapters"] == {"present": False}


@pytest.mark.spec("DEC-063")
def test_heads_of_a_folder_replace_baked_ones_and_its_lora_joins_them(tmp_path: Path) -> None:
    baked = open_checkpoint(with_heads(tmp_path / "baked", K=3))
    replaced = adapters_of(baked, heads_folder(tmp_path / "heads", (5,), seed=1))
    assert set(replaced.heads) == {5}
    assert any("replace" in note for note in replaced.notes)
    down, up = tensor(np.ones((2, 128)), "F16"), tensor(np.ones((128, 2)), "F16")
    lora = {"layers.0.attention.q_proj.lora_A": down, "layers.0.attention.q_proj.lora_B": up}
    (tmp_path / "lora").mkdir()
    write_safetensors(tmp_path / "lora" / "a.safetensors", lora, metadata={"r": "2", "alpha": "4"})
    joined = adapters_of(baked, tmp_path / "lora")
    assert set(joined.heads) == {2, 4}
    assert set(joined.loras) == {"model.layers.0.attention.q_proj"}
    assert joined.top_k == 3
    write_safetensors(tmp_path / "lora" / "a.safetensors", lora, metadata={"r": "2", "alpha": "4", "K": "2"})
    with pytest.raises(AdapterError, match="K is 2"):
        adapters_of(baked, tmp_path / "lora")


@pytest.mark.spec("DEC-063", "PRE-012", "PRE-014")
@pytest.mark.parametrize(
    ("owners", "told", "names"), [((7,), (7,), "layer 8"), ((0,), (0,), "layer 0"), ((2,), (3,), "owners")]
)
def test_baked_heads_are_checked_like_others(owners: Any, told: Any, names: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(with_heads(tmp_path / "baked", owners, told))
    with pytest.raises(AdapterError, match=names):
        adapters_of(checkpoint, None)


@pytest.mark.spec("DEC-064", "STO-009")
def test_the_architecture_decides_not_the_model_type(tmp_path: Path) -> None:
    wanted = read_config(config_with(tmp_path)).tensors
    assert read_config(config_with(tmp_path, model_type=...)).tensors == wanted
    for older in (["BailingMoeV2_5ForCausalLM"], ["BailingMoeLinearForCausalLM"], ...):
        named = "bailing_hybrid" if older is ... else older[0]
        with pytest.raises(UnsupportedModelError, match=named):
            read_config(config_with(tmp_path, architectures=older))


@pytest.mark.spec("DEC-064")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kda_safe_gate", False),
        ("no_kda_lora", False),
        ("rope_interleave", False),
        ("norm_topk_prob", False),
        ("score_function", "softmax"),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("use_qkv_bias", True),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("expert_swiglu_limit_list", [None, 7.0]),
    ],
)
def test_variants_are_refused_by_the_name_of_their_field(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="rope_scaling|rotary" if field == "rope_scaling" else field):
        read_config(config_with(tmp_path, **{field: value}))


@pytest.mark.spec("DEC-064")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_k_dense_replace", 8),
        ("first_k_dense_replace", -1),
        ("kda_lower_bound", 0.0),
        ("qk_rope_head_dim", 15),
        ("n_group", 3),
        ("topk_group", 5),
        ("num_experts_per_tok", 9),
        ("num_nextn_predict_layers", -1),
    ],
)
def test_impossible_numbers_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(value)):
        read_config(config_with(tmp_path, **{field: value}))


@pytest.mark.spec("DEC-056")
@pytest.mark.parametrize(("count", "group"), [(8, 4), (24, 4), (7, 3), (3, 1), (2, 5)])
def test_each_group_ends_in_latent_attention_and_so_does_what_is_left_over(
    count: int, group: int, tmp_path: Path
) -> None:
    config = read_config(config_with(tmp_path, num_hidden_layers=count, layer_group_size=group))
    kda = [number for number, layer in enumerate(config.layers) if isinstance(layer.mixer, KdaConfig)]
    assert kda == [n for g in range(count // group) for n in range(g * group, g * group + group - 1)]
    assert list(config.moe_layers) == list(range(1, count))


@pytest.mark.spec("STO-008")
def test_layers_that_predict_tokens_ahead_are_skipped_and_listed(tmp_path: Path) -> None:
    ahead = {"model.layers.8.enorm.weight": tensor(np.ones(3))}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", CONFIG, tensors_of("ling_edge0") | ahead))
    assert checkpoint.skipped == tuple(ahead)


TRUE_SIZE = {
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "head_dim": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 4608,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
}


def write_hollow(folder: Path) -> Path:
    """A model of the published sizes, all zeros: a header over a hole of 4 GB that occupies no disk."""
    config = read_config(config_with(folder, **TRUE_SIZE))
    entries: dict[str, Any] = {}
    end = 0

    def add(name: str, dtype: str, *shape: int) -> None:
        nonlocal end
        first, end = end, end + prod(shape) * {"U32": 4, "BF16": 2}[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}

    def add_quantized(module: str, *shape: int) -> None:
        *rows, cols = shape
        add(f"{module}.weight", "U32", *rows, cols // 8)
        for part in ("scales", "biases"):
            add(f"{module}.{part}", "BF16", *rows, cols // 64)

    for module, shape in config.tensors.linears.items():
        add_quantized(module, *shape)
    for name, sizes in config.tensors.vectors.items():
        add(name, "BF16", *sizes)
    for _, module in config.tensors.experts.values():
        for name, rows, cols in (("gate_proj", 512, 1536), ("up_proj", 512, 1536), ("down_proj", 1536, 512)):
            add_quantized(f"{module}.{name}", 128, rows, cols)
    header = json.dumps(entries).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return folder


def bytes_this_process_read() -> int:
    return int(Path("/proc/self/io").read_text("ascii").split()[1])


@pytest.mark.spec("STO-003")
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs a system that counts reads")
def test_opening_reads_headers_and_no_weights(tmp_path: Path) -> None:
    path = write_hollow(tmp_path) / "model.safetensors"
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    before = bytes_this_process_read()
    open_checkpoint(tmp_path)
    read = bytes_this_process_read() - before
    assert header < read < 2 * header < path.stat().st_size / 1000


@pytest.mark.spec("STO-010", "STO-011")
def test_at_the_published_size_a_step_reads_k_experts_a_layer(opened: Open, tmp_path: Path) -> None:
    """The vocabulary alone is small: embeddings are not streamed."""
    decoder = opened(write_hollow(tmp_path))
    logits = decoder.step(5)
    assert decoder.counters.bytes_read == EXPERT_BYTES * 8 * 23
    assert decoder.counters.reads == 8 * 23
    np.testing.assert_array_equal(logits, 0.0)
