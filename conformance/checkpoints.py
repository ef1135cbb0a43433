"""Random checkpoints of the Qwen3.5-MoE family, written the way converters write them.

Sharded or not, header unpadded, tensors in any order, an expert's ranges in different shards, 8-bit routers among
4-bit layers, vision tensors that nobody runs.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance import cases
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.inventory import open_checkpoint

PREFIX = "language_model."
WORDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}
Tensor = tuple[str, np.ndarray]  # dtype as the file says it, values
VALUE_SIZE, KEY_SIZE, HEAD_SIZE, VOCAB = 16, 16, 32, 40


@dataclass(frozen=True)
class CheckpointRecipe:
    """A model. layers: "full" or "linear" attention, one word a layer; character "tiny keys": keys near epsilon."""

    layers: tuple[str, ...]
    experts: int
    top_k: int
    width: int = 64
    group_size: int = 32
    coefficient: str = "float32"
    router_bits: int = 8
    shards: int = 1
    tied: bool = False
    character: str = "plain"
    seed: int = 0

    @property
    def kv_heads(self) -> int:
        """Two query heads share one."""
        return self.width // HEAD_SIZE // 2

    def modules(self) -> dict[str, tuple[int, int]]:
        """Every resident linear layer but embedding and head: module path -> (rows, cols)."""
        width, found = self.width, dict[str, tuple[int, int]]()
        for number, kind in enumerate(self.layers):
            path = f"{PREFIX}model.layers.{number}"
            if kind == "full":
                keys = (self.kv_heads * HEAD_SIZE, width)
                shapes = {"q_proj": (2 * width, width), "k_proj": keys, "v_proj": keys}
                found |= {f"{path}.self_attn.{n}": s for n, s in (shapes | {"o_proj": (width, width)}).items()}
            else:
                heads = width // VALUE_SIZE
                shapes = {"in_proj_qkv": (width + width, width), "in_proj_z": (width, width)}
                shapes |= {"in_proj_a": (heads, width), "in_proj_b": (heads, width), "out_proj": (width, width)}
                found |= {f"{path}.linear_attn.{name}": shape for name, shape in shapes.items()}
            found |= {f"{path}.mlp.gate": (self.experts, width), f"{path}.mlp.shared_expert_gate": (1, width)}
            found |= {f"{path}.mlp.shared_expert.{n}_proj": (width, width) for n in ("gate", "up", "down")}
        return found

    def config(self) -> dict[str, Any]:
        kinds = {"full": "full_attention", "linear": "linear_attention"}
        text = {
            "hidden_size": self.width, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
            "num_hidden_layers": len(self.layers), "layer_types": [kinds[kind] for kind in self.layers],
            "num_attention_heads": self.width // HEAD_SIZE, "num_key_value_heads": self.kv_heads, "head_dim": HEAD_SIZE,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "type": "default"},
            "linear_num_key_heads": self.width // (2 * KEY_SIZE), "linear_key_head_dim": KEY_SIZE,
            "linear_num_value_heads": self.width // VALUE_SIZE, "linear_value_head_dim": VALUE_SIZE,
            "linear_conv_kernel_dim": 4,
            "num_experts": self.experts, "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.width, "shared_expert_intermediate_size": self.width,
            "max_position_embeddings": 512,
        }  # fmt: skip
        quantization: dict[str, Any] = {"group_size": self.group_size, "bits": 4, "mode": "affine"}
        for module in self.modules():
            if module.endswith(".mlp.gate"):
                quantization[module] = {"group_size": self.group_size, "bits": self.router_bits}
        return {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "tie_word_embeddings": self.tied, "quantization": quantization, "text_config": text}  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        random, width = np.random.default_rng(self.seed), self.width
        heads, channels = width // VALUE_SIZE, 2 * width
        taps = 1e-3 if self.character == "tiny keys" else 0.5
        found: dict[str, Tensor] = {"vision_tower.patch.weight": ("F32", np.ones((2, 2), np.float32))}

        def quantized(module: str, rows: int, cols: int, bits: int = 4, stack: int = 0) -> None:
            scale = 1.7 * cols**-0.5
            form = (cols, bits, self.group_size, self.coefficient, "mixed")
            matrix = cases.MatrixRecipe(max(stack, 1) * rows, *form, int(random.integers(2**32)), scale).build()
            leading = (stack, rows) if stack else (rows,)
            parts = {"weight": matrix.packed, "scales": matrix.scales, "biases": matrix.biases}
            for part, values in parts.items():
                word = "U32" if part == "weight" else WORDS[self.coefficient]
                found[f"{module}.{part}"] = word, values.reshape(*leading, -1)

        def vector(name: str, values: np.ndarray) -> None:
            found[name] = "F32", values.astype(np.float32)

        def norm(name: str, size: int) -> None:
            vector(name, random.uniform(0.5, 1.5, size))

        for module, (rows, cols) in self.modules().items():
            quantized(module, rows, cols, self.router_bits if module.endswith(".mlp.gate") else 4)
        quantized(f"{PREFIX}model.embed_tokens", VOCAB, width)
        if not self.tied:
            quantized(f"{PREFIX}lm_head", VOCAB, width)
        norm(f"{PREFIX}model.norm.weight", width)
        for number, kind in enumerate(self.layers):
            path = f"{PREFIX}model.layers.{number}"
            norm(f"{path}.input_layernorm.weight", width)
            norm(f"{path}.post_attention_layernorm.weight", width)
            if kind == "full":
                norm(f"{path}.self_attn.q_norm.weight", HEAD_SIZE)
                norm(f"{path}.self_attn.k_norm.weight", HEAD_SIZE)
            else:
                vector(f"{path}.linear_attn.conv1d.weight", random.standard_normal((channels, 4, 1)) * taps)
                vector(f"{path}.linear_attn.A_log", random.uniform(-1, 1, heads))
                vector(f"{path}.linear_attn.dt_bias", random.uniform(-1, 1, heads))
                norm(f"{path}.linear_attn.norm.weight", VALUE_SIZE)
            for name in ("gate_proj", "up_proj", "down_proj"):
                quantized(f"{path}.mlp.switch_mlp.{name}", width, width, stack=self.experts)
        return found

    def write(self, folder: Path) -> None:
        """config.json, shards, and an index if there is more than one shard."""
        random, tensors = np.random.default_rng(self.seed + 1), self.tensors()
        (folder / "config.json").write_text(json.dumps(self.config()), "utf-8")
        names = random.permutation(sorted(tensors)).tolist()
        files = [f"model-{i + 1:05}-of-{self.shards:05}.safetensors" for i in range(self.shards)]
        files = files if self.shards > 1 else ["model.safetensors"]
        places = {name: files[i % len(files)] for i, name in enumerate(names)}
        for file in files:
            write_safetensors(folder / file, {name: tensors[name] for name in names if places[name] == file})
        if self.shards > 1:
            index = json.dumps({"metadata": {}, "weight_map": places})
            (folder / "model.safetensors.index.json").write_text(index, "utf-8")

    @contextmanager
    def opened(self) -> Iterator[tuple[Path, Checkpoint]]:
        """The checkpoint in a folder of its own, for the length of a `with`."""
        with TemporaryDirectory(prefix="conformance-") as name:
            folder = Path(name)
            self.write(folder)
            yield folder, open_checkpoint(folder)


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """8 bytes of header length, the header without padding, the data in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (word, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": word, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@dataclass(frozen=True)
class AdaptersRecipe:
    """Heads for these owners, and LoRA on about this share of the resident linear layers."""

    owners: tuple[int, ...]
    lora_share: float
    seed: int

    def build(self, model: CheckpointRecipe) -> Adapters:
        random = np.random.default_rng(self.seed)
        features = model.width + 2 * model.experts
        heads = {
            owner: cases.head_of(model.experts, features, 8, int(random.integers(2**32)), 2.0) for owner in self.owners
        }
        loras = {
            module: cases.lora_of(rows, cols, 2, 0.5, int(random.integers(2**32)))
            for module, (rows, cols) in model.modules().items()
            if random.random() < self.lora_share and not module.endswith(("mlp.gate", "shared_expert_gate"))
        }
        return Adapters(heads, loras)


MIXES = (("full",), ("linear",), ("linear", "full"), ("full", "linear", "linear"))


@st.composite
def checkpoints(
    draw: Any, mixes: tuple[tuple[str, ...], ...] = MIXES, counts: tuple[int, ...] = (1, 2, 3, 5, 8)
) -> CheckpointRecipe:
    experts = draw(st.sampled_from(counts))
    width = draw(st.sampled_from((64, 64, 128)))
    return CheckpointRecipe(
        layers=draw(st.sampled_from(mixes)),
        experts=experts,
        top_k=draw(st.sampled_from(sorted({1, min(2, experts), experts}))),
        width=width,
        group_size=draw(st.sampled_from([g for g in (32, 64, 128) if g <= width])),
        coefficient=draw(cases.COEFFICIENTS),
        router_bits=draw(st.sampled_from((4, 8))),
        shards=draw(st.sampled_from((1, 3))),
        tied=draw(st.booleans()),
        character=draw(st.sampled_from(("plain", "tiny keys"))),
        seed=draw(cases.SEEDS),
    )


@st.composite
def adapters_for(draw: Any, model: CheckpointRecipe) -> AdaptersRecipe:
    possible = range(len(model.layers) - 1)
    owners = st.one_of(st.just(set(possible)), st.sets(st.sampled_from(possible), min_size=1))
    return AdaptersRecipe(tuple(sorted(draw(owners))), draw(st.sampled_from((0.0, 0.5))), draw(cases.SEEDS))
