"""The two published models as `config.json` says them: every name and shape of their tensors follows from here."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from edge0_ref.config import ModelConfig, config_of, read_quantization
from edge0_ref.errors import UsageError
from edge0_ref.json_files import Fields

GROUP_SIZE = 64
GIB = 2**30


@dataclass(frozen=True)
class Preset:
    """A published checkpoint, without its weights.

    config: its config.json, without `quantization`. eight_bit, unquantized: linear layers, by the end of their path,
    that are not int4. experts_name: the module its routed experts are in. shard_bytes: a file is begun before one
    grows beyond this; None is one file. first_owner, adapter_top_k, rank, alpha, head_width: its published adapters.
    """

    config: Mapping[str, Any]
    eight_bit: tuple[str, ...]
    unquantized: tuple[str, ...]
    experts_name: str
    shard_bytes: int | None
    first_owner: int
    adapter_top_k: int
    head_width: int = 512
    rank: int = 16
    alpha: int = 32


QWEN = Preset(
    config={
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": [248044, 248046],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "full_attention_interval": 4,
            "vocab_size": 248320,
            "rms_norm_eps": 1e-6,
            "attn_output_gate": True,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            },
            "max_position_embeddings": 262144,
        },
    },
    eight_bit=("mlp.gate", "mlp.shared_expert_gate"),
    unquantized=(),
    experts_name="switch_mlp",
    shard_bytes=5 * GIB,
    first_owner=6,
    adapter_top_k=4,
)

LING = Preset(
    config={
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "eos_token_id": 156895,
        "pad_token_id": 156892,
        "tie_word_embeddings": False,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "layer_group_size": 4,
        "vocab_size": 157184,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "rope_theta": 6000000.0,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "no_kda_lora": True,
        "first_k_dense_replace": 1,
        "intermediate_size": 4608,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 512,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 512,
        "max_position_embeddings": 131072,
    },
    eight_bit=(),
    unquantized=("mlp.gate",),
    experts_name="experts",
    shard_bytes=None,
    first_owner=7,
    adapter_top_k=8,
)

PRESETS: Mapping[str, Preset] = MappingProxyType({"qwen3.6-35b-a3b": QWEN, "ling-3.0-tiny": LING})


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise UsageError(f"a model {name!r} is not known; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def make_config(preset: Preset, changes: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """config.json with some whole numbers changed, and its quantization. Raises UsageError for an unknown field."""
    config: dict[str, Any] = deepcopy(dict(preset.config))
    for name, value in changes.items():
        section = next((part for part in (config, config.get("text_config", {})) if name in part), {})
        if type(section.get(name)) is not int:
            numbers = {**config, **config.get("text_config", {})}
            fields = ", ".join(sorted(field for field, held in numbers.items() if type(held) is int))
            raise UsageError(f"{name!r} is no field with a whole number; those are {fields}")
        section[name] = value
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    for module in model_of(config, "the changed config").tensors.linears:
        if module.endswith(preset.eight_bit):
            quantization[module] = {"group_size": GROUP_SIZE, "bits": 8}
    return {**config, "quantization": quantization, "quantization_config": quantization}


def model_of(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """The model that a config.json describes. Raises CheckpointError."""
    fields = Fields(dict(config), origin)
    return config_of(fields, read_quantization(fields), ())
