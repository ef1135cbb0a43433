"""The Qwen3.5 / Qwen3.6 MoE family: gated delta net, gated attention, softmax-top-k, one gated shared expert.

Source: the published config.json files and the key names of mlx-lm's converted checkpoints.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import replace

from edge0_ref.config import (
    AttentionConfig,
    GatedDeltaConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
    MoeConfig,
    QuantizationConfig,
    TensorTable,
)
from edge0_ref.contract import SoftmaxTopK
from edge0_ref.errors import CheckpointError, UnsupportedModelError
from edge0_ref.json_files import Fields

ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")

SKIPPED = ("vision_tower.", "model.visual.", "mtp.", "language_model.mtp.")
MODEL = "language_model.model"
LAYER_KINDS = ("linear_attention", "full_attention")
MOST_LAYERS = 4096


def matches(model_type: str, architectures: Sequence[str]) -> bool:
    return model_type in MODEL_TYPES


def read(fields: Fields, quantization: QuantizationConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Raises CheckpointError for missing or impossible fields, UnsupportedModelError for variants nobody publishes."""
    text = fields.section("text_config") if "text_config" in fields.values else fields
    if not text.get("norm_topk_prob", bool, True):
        raise UnsupportedModelError(f"{text.origin}: norm_topk_prob is false; edge0 renormalises the chosen experts")
    if text.get("attention_bias", bool, False):
        raise UnsupportedModelError(f"{text.origin}: attention_bias is true; edge0 runs projections without bias")
    if text.get("hidden_act", str, "silu") != "silu":
        raise UnsupportedModelError(
            f"{text.origin}: hidden_act is {reprlib.repr(text.values['hidden_act'])}, wanted 'silu'"
        )
    moe = _moe(text)
    mixers = {"full_attention": _attention(text), "linear_attention": _gated_delta(text)}
    layers = tuple(_layer(number, kind, mixers[kind], moe) for number, kind in enumerate(_layer_types(text)))
    hidden_size, vocab_size = text.positive("hidden_size"), text.positive("vocab_size")
    tied = fields.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, False))
    embedding = f"{MODEL}.embed_tokens"
    config = ModelConfig(
        family="qwen3_5_moe",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        norm_epsilon=text.positive_float("rms_norm_eps", 1e-6),
        layers=layers,
        embedding=embedding,
        head=embedding if tied else "language_model.lm_head",
        final_norm=f"{MODEL}.norm.weight",
        tensors=TensorTable({}, {}, {}),
        skipped=SKIPPED,
        quantization=quantization,
        eos_token_ids=eos_token_ids,
        max_context=text.positive("max_position_embeddings", 32768),
    )
    return replace(config, tensors=tensor_table(config))


def tensor_table(config: ModelConfig) -> TensorTable:
    """Names and shapes, from the checkpoints mlx-lm writes."""
    hidden = config.hidden_size
    linears = {config.embedding: (config.vocab_size, hidden), config.head: (config.vocab_size, hidden)}
    vectors: dict[str, tuple[int, ...]] = {config.final_norm: (hidden,)}
    experts: dict[int, tuple[str, ...]] = {}
    for number, layer in enumerate(config.layers):
        vectors |= {layer.mixer_norm: (hidden,), layer.mlp_norm: (hidden,)}
        match layer.mixer:
            case AttentionConfig():
                _attention_tensors(layer.mixer_path, layer.mixer, hidden, linears, vectors)
            case GatedDeltaConfig():
                _gated_delta_tensors(layer.mixer_path, layer.mixer, hidden, linears, vectors)
        assert isinstance(layer.mlp, MoeConfig)
        shared, path = layer.mlp.shared_inner_size, layer.mlp_path
        linears |= {
            f"{path}.gate": (layer.mlp.num_experts, hidden),
            f"{path}.shared_expert_gate": (1, hidden),
            f"{path}.shared_expert.gate_proj": (shared, hidden),
            f"{path}.shared_expert.up_proj": (shared, hidden),
            f"{path}.shared_expert.down_proj": (hidden, shared),
        }
        experts[number] = (f"{path}.switch_mlp",)
    return TensorTable(linears, vectors, experts)


def _attention_tensors(
    path: str,
    mixer: AttentionConfig,
    hidden: int,
    linears: dict[str, tuple[int, int]],
    vectors: dict[str, tuple[int, ...]],
) -> None:
    queries, keys = mixer.heads * mixer.head_size, mixer.kv_heads * mixer.head_size
    linears |= {
        f"{path}.q_proj": (2 * queries, hidden),  # each head's query, then its gate
        f"{path}.k_proj": (keys, hidden),
        f"{path}.v_proj": (keys, hidden),
        f"{path}.o_proj": (hidden, queries),
    }
    vectors |= {f"{path}.q_norm.weight": (mixer.head_size,), f"{path}.k_norm.weight": (mixer.head_size,)}


def _gated_delta_tensors(
    path: str,
    mixer: GatedDeltaConfig,
    hidden: int,
    linears: dict[str, tuple[int, int]],
    vectors: dict[str, tuple[int, ...]],
) -> None:
    keys, values = mixer.key_heads * mixer.key_size, mixer.value_heads * mixer.value_size
    linears |= {
        f"{path}.in_proj_qkv": (2 * keys + values, hidden),
        f"{path}.in_proj_z": (values, hidden),
        f"{path}.in_proj_a": (mixer.value_heads, hidden),
        f"{path}.in_proj_b": (mixer.value_heads, hidden),
        f"{path}.out_proj": (hidden, values),
    }
    vectors |= {
        f"{path}.conv1d.weight": (2 * keys + values, mixer.conv_kernel, 1),
        f"{path}.A_log": (mixer.value_heads,),
        f"{path}.dt_bias": (mixer.value_heads,),
        f"{path}.norm.weight": (mixer.value_size,),
    }


def _layer(number: int, kind: str, mixer: MixerConfig, moe: MoeConfig) -> LayerConfig:
    path = f"{MODEL}.layers.{number}"
    return LayerConfig(
        mixer=mixer,
        mlp=moe,
        mixer_path=f"{path}.{'self_attn' if kind == 'full_attention' else 'linear_attn'}",
        mlp_path=f"{path}.mlp",
        mixer_norm=f"{path}.input_layernorm.weight",
        mlp_norm=f"{path}.post_attention_layernorm.weight",
    )


def _layer_types(text: Fields) -> list[str]:
    count = text.positive("num_hidden_layers", most=MOST_LAYERS)
    every = text.positive("full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
    kinds: list[str] = text.get("layer_types", list, default)
    if len(kinds) != count:
        raise CheckpointError(f"{text.origin}: layer_types has {len(kinds)} entries for {count} layers")
    for kind in kinds:
        if kind not in LAYER_KINDS:
            raise CheckpointError(f"{text.origin}: layer_types holds {reprlib.repr(kind)}, wanted one of {LAYER_KINDS}")
    return kinds


def _attention(text: Fields) -> MixerConfig:
    rope = text.section("rope_parameters") if "rope_parameters" in text.values else text
    for section in (rope, text.section("rope_scaling") if text.values.get("rope_scaling") else rope):
        kind = section.get("rope_type", str, section.get("type", str, "default"))
        if kind not in ("default", "mrope"):  # mrope turns text positions as the default does
            raise UnsupportedModelError(f"{section.origin}: {kind!r} rotary embeddings; edge0 runs the default ones")
    heads, kv_heads = text.positive("num_attention_heads"), text.positive("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(f"{text.origin}: {heads} attention heads do not share {kv_heads} key-value heads")
    head_size = text.positive("head_dim", text.positive("hidden_size") // heads)
    share = rope.positive_float("partial_rotary_factor", 0.25)
    rotary_size = int(head_size * min(share, 2.0))
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise CheckpointError(f"{rope.origin}: partial_rotary_factor is {share} of a head of {head_size} dims")
    return AttentionConfig(heads, kv_heads, head_size, rotary_size, rope.positive_float("rope_theta", 1e7))


def _gated_delta(text: Fields) -> MixerConfig:
    key_heads, value_heads = text.positive("linear_num_key_heads"), text.positive("linear_num_value_heads")
    if value_heads % key_heads:
        raise CheckpointError(f"{text.origin}: {value_heads} value heads do not share {key_heads} key heads")
    return GatedDeltaConfig(
        key_heads,
        value_heads,
        text.positive("linear_key_head_dim"),
        text.positive("linear_value_head_dim"),
        text.positive("linear_conv_kernel_dim", 4),
    )


def _moe(text: Fields) -> MoeConfig:
    if text.values.get("num_experts") in (None, 0):
        raise UnsupportedModelError(f"{text.origin}: a dense model (no num_experts); edge0 streams experts")
    num_experts, top_k = text.positive("num_experts"), text.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"{text.origin}: num_experts_per_tok {top_k} of {num_experts} experts")
    return MoeConfig(
        num_experts=num_experts,
        inner_size=text.positive("moe_intermediate_size"),
        shared_inner_size=text.positive("shared_expert_intermediate_size"),
        shared_gate=True,
        router=SoftmaxTopK(top_k),
    )
