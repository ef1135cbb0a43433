"""Small random Qwen3.5-MoE checkpoints, written as real folders in every layout that real ones have.

Nothing here uses edge0 to write: files are laid out by hand, so that a reader's mistake is not mirrored by a writer.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

Dtype = Literal["F32", "F16", "BF16"]
MODEL = "language_model.model"


@dataclass(frozen=True)
class Tensor:
    """A tensor as a file holds it; dtype is the file's own word."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]


def tensor(values: np.ndarray, dtype: Dtype = "F32") -> Tensor:
    """float32 values in `dtype`; bfloat16 by cutting the lower half off."""
    values = np.ascontiguousarray(values, np.float32)
    match dtype:
        case "F32":
            data = values.tobytes()
        case "F16":
            data = values.astype(np.float16).tobytes()
        case "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return Tensor(dtype, values.shape, data)


@dataclass(frozen=True)
class Recipe:
    """A model of a few layers. attention: every how many layers full attention comes; overrides: module -> bits."""

    layers: int = 2
    attention: int = 2
    hidden: int = 64
    vocab: int = 96
    experts: int = 6
    top_k: int = 2
    inner: int = 64
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 32
    group_size: int = 32
    expert_bits: int = 4
    coefficients: Dtype = "BF16"
    tied: bool = False
    extras: bool = False  # vision and multi-token-prediction tensors, to be skipped
    seed: int = 0
    overrides: Mapping[str, int] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        return ["linear" if (layer + 1) % self.attention else "full" for layer in range(self.layers)]


def make_config(recipe: Recipe) -> dict[str, Any]:
    """config.json as a converter writes it, `text_config` and all."""
    quantization: dict[str, Any] = {"group_size": recipe.group_size, "bits": 4, "mode": "affine"}
    for layer in range(recipe.layers):
        mlp = f"{MODEL}.layers.{layer}.mlp"
        for name in ("gate", "shared_expert_gate"):
            quantization[f"{mlp}.{name}"] = {"group_size": recipe.group_size, "bits": 8}
        if recipe.expert_bits != 4:
            for name in ("gate_proj", "up_proj", "down_proj"):
                override = {"group_size": recipe.group_size, "bits": recipe.expert_bits}
                quantization[f"{mlp}.switch_mlp.{name}"] = override
    for module, bits in recipe.overrides.items():
        quantization[module] = bits > 0 and {"group_size": recipe.group_size, "bits": bits}
    text = {
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "full_attention_interval": recipe.attention,
        "vocab_size": recipe.vocab,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "linear_num_key_heads": recipe.key_heads,
        "linear_num_value_heads": recipe.value_heads,
        "linear_key_head_dim": recipe.key_dim,
        "linear_value_head_dim": recipe.value_dim,
        "linear_conv_kernel_dim": 4,
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "moe_intermediate_size": recipe.inner,
        "shared_expert_intermediate_size": recipe.inner,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 4096,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": [0, 1],
        "tie_word_embeddings": recipe.tied,
        "text_config": text,
        "quantization": quantization,
    }


class _Maker:
    """Draws tensors in one fixed order."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.rng, self.tensors = recipe, np.random.default_rng(recipe.seed), Tensors()

    def linear(self, module: str, rows: int, cols: int, bits: int = 4, leading: tuple[int, ...] = ()) -> None:
        """Random codes, scales of both signs, biases near the middle of the range; bits 0: unquantised."""
        bits = self.recipe.overrides.get(module, bits)
        shape = (*leading, rows)
        if bits == 0:
            weights = self.rng.normal(0, cols**-0.5, (*shape, cols))
            self.tensors[f"{module}.weight"] = tensor(weights, self.recipe.coefficients)
            return
        words = self.rng.integers(0, 2**32, (*shape, cols * bits // 32), np.uint32)
        self.tensors[f"{module}.weight"] = Tensor("U32", words.shape, words.tobytes())
        groups = (*shape, cols // self.recipe.group_size)
        scales = self.rng.choice([-1, 1], groups) * self.rng.uniform(0.5, 1.5, groups) * 4 / 2**bits * cols**-0.5
        self.tensors[f"{module}.scales"] = tensor(scales, self.recipe.coefficients)
        biases = -scales * (2**bits / 2) * self.rng.uniform(0.9, 1.1, groups)
        self.tensors[f"{module}.biases"] = tensor(biases, self.recipe.coefficients)

    def vector(self, name: str, values: np.ndarray) -> None:
        self.tensors[name] = tensor(values, self.recipe.coefficients)

    def norm(self, name: str, size: int) -> None:
        self.vector(name, self.rng.uniform(0.7, 1.3, size))

    def attention(self, path: str) -> None:
        r = self.recipe
        self.linear(f"{path}.q_proj", 2 * r.heads * r.head_dim, r.hidden)
        self.linear(f"{path}.k_proj", r.kv_heads * r.head_dim, r.hidden)
        self.linear(f"{path}.v_proj", r.kv_heads * r.head_dim, r.hidden)
        self.linear(f"{path}.o_proj", r.hidden, r.heads * r.head_dim)
        self.norm(f"{path}.q_norm.weight", r.head_dim)
        self.norm(f"{path}.k_norm.weight", r.head_dim)

    def gated_delta(self, path: str) -> None:
        r = self.recipe
        keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
        self.linear(f"{path}.in_proj_qkv", 2 * keys + values, r.hidden)
        self.linear(f"{path}.in_proj_z", values, r.hidden)
        self.linear(f"{path}.in_proj_a", r.value_heads, r.hidden)
        self.linear(f"{path}.in_proj_b", r.value_heads, r.hidden)
        self.linear(f"{path}.out_proj", r.hidden, values)
        self.vector(f"{path}.conv1d.weight", self.rng.normal(0, 0.5, (2 * keys + values, 4, 1)))
        self.vector(f"{path}.A_log", np.log(self.rng.uniform(0.5, 4, r.value_heads)))
        self.vector(f"{path}.dt_bias", self.rng.normal(0, 0.5, r.value_heads))
        self.norm(f"{path}.norm.weight", r.value_dim)

    def moe(self, path: str) -> None:
        r = self.recipe
        self.linear(f"{path}.gate", r.experts, r.hidden, bits=8)
        self.linear(f"{path}.shared_expert_gate", 1, r.hidden, bits=8)
        for module, leading, bits in (("shared_expert", (), 4), ("switch_mlp", (r.experts,), r.expert_bits)):
            self.linear(f"{path}.{module}.gate_proj", r.inner, r.hidden, bits, leading)
            self.linear(f"{path}.{module}.up_proj", r.inner, r.hidden, bits, leading)
            self.linear(f"{path}.{module}.down_proj", r.hidden, r.inner, bits, leading)


def make_tensors(recipe: Recipe) -> Tensors:
    """Every tensor of the model, by name."""
    maker = _Maker(recipe)
    maker.linear(f"{MODEL}.embed_tokens", recipe.vocab, recipe.hidden)
    if not recipe.tied:
        maker.linear("language_model.lm_head", recipe.vocab, recipe.hidden)
    for number, kind in enumerate(recipe.kinds):
        path = f"{MODEL}.layers.{number}"
        if kind == "full":
            maker.attention(f"{path}.self_attn")
        else:
            maker.gated_delta(f"{path}.linear_attn")
        maker.norm(f"{path}.input_layernorm.weight", recipe.hidden)
        maker.norm(f"{path}.post_attention_layernorm.weight", recipe.hidden)
        maker.moe(f"{path}.mlp")
    maker.norm(f"{MODEL}.norm.weight", recipe.hidden)
    if recipe.extras:
        for name in ("vision_tower.patch_embed.weight", "model.visual.merger.weight", "mtp.layers.0.fc.weight"):
            maker.vector(name, maker.rng.normal(size=(3, 5)))
    return maker.tensors


def make_header(tensors: Mapping[str, Tensor], order: Sequence[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    """A safetensors header for tensors laid end to end in `order`; the header itself lists them by name."""
    entries, offset = {}, 0
    for name in order:
        held = tensors[name]
        end = offset + len(held.data)
        entries[name] = {"dtype": held.dtype, "shape": list(held.shape), "data_offsets": [offset, end]}
        offset = end
    return {**({"__metadata__": dict(metadata)} if metadata else {}), **dict(sorted(entries.items()))}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], order: Sequence[str] = (), metadata: Mapping[str, str] = {}, pad: int = 0
) -> None:
    """A safetensors file; `pad` more spaces after the header, whose length is otherwise whatever it is."""
    order = order or list(tensors)
    write_raw(path, make_header(tensors, order, metadata), b"".join(tensors[name].data for name in order), pad)


def write_raw(path: Path, header: Any, data: bytes, pad: int = 0) -> None:
    """Any header over any bytes; a header given as bytes is written as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1, layout_seed: int = 0
) -> Path:
    """A model folder. More than one shard: an index, tensors dealt out at random, so an expert's ranges are apart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(layout_seed)
    names = [str(name) for name in rng.permutation(list(tensors))]
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, names, {"format": "mlx"}, pad=int(rng.integers(8)))
        return folder
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        held = [name for name in names if weight_map[name] == file]
        write_safetensors(folder / file, {name: tensors[name] for name in held}, pad=int(rng.integers(8)))
    total = sum(len(held.data) for held in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def build(folder: Path, recipe: Recipe, shards: int = 1, layout_seed: int = 0) -> Path:
    return write_model(folder, make_config(recipe), make_tensors(recipe), shards, layout_seed)


def expert_bytes(tensors: Mapping[str, Tensor], layer: int, expert: int) -> bytes:
    """What a slot must hold, cut out of the tensors by hand: codes of gate, up, down, then their coefficients."""
    names = ("gate_proj", "up_proj", "down_proj")
    parts = [f"{name}.weight" for name in names] + [f"{name}.{part}" for name in names for part in ("scales", "biases")]
    pieces = []
    for part in parts:
        held = tensors[f"{MODEL}.layers.{layer}.mlp.switch_mlp.{part}"]
        size = len(held.data) // held.shape[0]
        assert size * held.shape[0] == prod(held.shape) * {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}[held.dtype]
        pieces.append(held.data[expert * size : (expert + 1) * size])
    return b"".join(pieces)


def adapter_tensors(
    recipe: Recipe,
    owners: Sequence[int],
    targets: Mapping[str, tuple[int, int]],
    rank: int = 4,
    width: int = 8,
    dtype: Dtype = "F16",
    seed: int = 0,
) -> Tensors:
    """Random heads for `owners` and LoRA for `targets` (module -> rows, cols), under the published names."""
    rng = np.random.default_rng(seed)
    features = recipe.hidden + 2 * recipe.experts
    shapes = {"fc1": (width, features), "fc2": (recipe.experts, width), "linear_init": (recipe.experts, features)}
    made = Tensors()
    for owner in owners:
        for part, shape in shapes.items():
            made[f"layers.{owner}.{part}.weight"] = tensor(rng.normal(0, 2 * shape[1] ** -0.5, shape), dtype)
    for module, (rows, cols) in targets.items():
        made[f"{module}.lora_A"] = tensor(rng.normal(0, cols**-0.5, (rank, cols)), dtype)
        made[f"{module}.lora_B"] = tensor(rng.normal(0, 0.3 * rank**-0.5, (rows, rank)), dtype)
    return made


def adapter_metadata(
    recipe: Recipe, owners: Sequence[int], rank: int = 4, alpha: float = 8, **more: Any
) -> dict[str, str]:
    """Metadata as published: one key literally named `__metadata__`, a JSON string."""
    values = {"K": recipe.top_k, "r": rank, "alpha": alpha, "owners": list(owners), "source": "random", **more}
    return {"__metadata__": json.dumps(values)}


def build_adapters(folder: Path, recipe: Recipe, owners: Sequence[int], targets: Mapping[str, tuple[int, int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    metadata = adapter_metadata(recipe, owners)
    write_safetensors(folder / "adapters.safetensors", adapter_tensors(recipe, owners, targets), metadata=metadata)
    return folder
