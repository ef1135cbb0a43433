"""The Ling 3 family (BailingMoeV3): Kimi delta attention, latent attention, sigmoid-group routing, dense first layers.

Source: the published config.json files, and the key names of edge0's own checkpoints and of mlx-lm's conversions. An
older family of lightning attention has the same model_type, so the architecture's name decides.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge0_ref.config import (
    DenseConfig,
    HeadStacks,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    QuantizationConfig,
    TensorTable,
)
from edge0_ref.contract import SigmoidGroup
from edge0_ref.errors import CheckpointError, UnsupportedModelError
from edge0_ref.json_files import Fields

ARCHITECTURE = "BailingMoeV3ForCausalLM"
MODEL = "model"
MOST_LAYERS = 4096

# What a variant could change without changing a shape: a field that is there must say this.
ONLY: dict[str, Any] = {
    "kda_safe_gate": True,
    "no_kda_lora": True,
    "rope_interleave": True,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "linear_attention": "kda",
    "gated_attention_proj_granularity_type": "head_wise",
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
}
CLAMPS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def matches(model_type: str, architectures: Sequence[str]) -> bool:
    return ARCHITECTURE in architectures


def read(fields: Fields, quantization: QuantizationConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Raises CheckpointError for missing or impossible fields, UnsupportedModelError for variants not in `ONLY`."""
    _refuse_variants(fields)
    layers = _layers(fields)
    embedding = f"{MODEL}.word_embeddings"
    config = ModelConfig(
        family="bailing_v3",
        hidden_size=fields.positive("hidden_size"),
        vocab_size=fields.positive("vocab_size"),
        norm_epsilon=fields.positive_float("rms_norm_eps", 1e-6),
        layers=layers,
        embedding=embedding,
        head=embedding if fields.get("tie_word_embeddings", bool, False) else "lm_head",
        final_norm=f"{MODEL}.norm.weight",
        tensors=TensorTable({}, {}, {}),
        skipped=_predictor_layers(fields, len(layers)),
        quantization=quantization,
        eos_token_ids=eos_token_ids,
        max_context=fields.positive("max_position_embeddings", 131072),
    )
    return replace(config, tensors=tensor_table(config))


def tensor_table(config: ModelConfig) -> TensorTable:
    """Names and shapes, with the two places of the experts and the two forms of `kv_b_proj`."""
    hidden = config.hidden_size
    linears = {config.embedding: (config.vocab_size, hidden), config.head: (config.vocab_size, hidden)}
    table = TensorTable(linears, {config.final_norm: (hidden,)}, {})
    for number, layer in enumerate(config.layers):
        table.vectors.update({layer.mixer_norm: (hidden,), layer.mlp_norm: (hidden,)})
        match layer.mixer:
            case KdaConfig():
                _kda_tensors(layer.mixer_path, layer.mixer, hidden, table)
            case MlaConfig():
                _mla_tensors(layer.mixer_path, layer.mixer, hidden, table)
        path = layer.mlp_path
        match layer.mlp:
            case DenseConfig():
                _mlp_tensors(path, layer.mlp.inner_size, hidden, table)
            case MoeConfig():
                _mlp_tensors(f"{path}.{layer.mlp.shared_name}", layer.mlp.shared_inner_size, hidden, table)
                table.linears[f"{path}.gate"] = (layer.mlp.num_experts, hidden)
                if layer.mlp.expert_bias:
                    table.vectors[f"{path}.gate.expert_bias"] = (layer.mlp.num_experts,)
                table.experts[number] = (f"{path}.switch_mlp", f"{path}.experts")
    return table


def _kda_tensors(path: str, mixer: KdaConfig, hidden: int, table: TensorTable) -> None:
    width = mixer.heads * mixer.head_size
    for name in ("q", "k", "v", "f", "g"):
        table.linears[f"{path}.{name}_proj"] = (width, hidden)
    for name in ("q", "k", "v"):
        table.vectors[f"{path}.{name}_conv1d.weight"] = (width, mixer.conv_kernel, 1)
    table.linears.update({f"{path}.b_proj": (mixer.heads, hidden), f"{path}.o_proj": (hidden, width)})
    table.vectors.update({f"{path}.A_log": (mixer.heads,), f"{path}.dt_bias": (width,)})
    table.vectors[f"{path}.o_norm.weight"] = (mixer.head_size,)


def _mla_tensors(path: str, mixer: MlaConfig, hidden: int, table: TensorTable) -> None:
    """kv_b_proj: each head's rows are its keys (W_UK) and then its values (W_UV)."""
    heads, latent = mixer.heads, mixer.latent_size
    table.linears.update(
        {
            f"{path}.q_a_proj": (mixer.query_rank, hidden),
            f"{path}.q_b_proj": (heads * (mixer.key_size + mixer.rotary_size), mixer.query_rank),
            f"{path}.kv_a_proj_with_mqa": (latent + mixer.rotary_size, hidden),
            f"{path}.kv_b_proj": (heads * (mixer.key_size + mixer.value_size), latent),
            f"{path}.g_proj": (heads, hidden),
            f"{path}.dense": (hidden, heads * mixer.value_size),
        }
    )
    keys, values = f"{path}.embed_q.weight", f"{path}.unembed_out.weight"
    table.stacks[f"{path}.kv_b_proj"] = HeadStacks(keys, values, heads, mixer.key_size, mixer.value_size)
    table.vectors[f"{path}.q_a_layernorm.weight"] = (mixer.query_rank,)
    table.vectors[f"{path}.kv_a_layernorm.weight"] = (latent,)


def _mlp_tensors(path: str, inner: int, hidden: int, table: TensorTable) -> None:
    table.linears.update({f"{path}.gate_proj": (inner, hidden), f"{path}.up_proj": (inner, hidden)})
    table.linears[f"{path}.down_proj"] = (hidden, inner)


def _layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Latent attention ends each group of `layer_group_size` layers, and makes up a last group that is not whole."""
    count, group = fields.positive("num_hidden_layers", most=MOST_LAYERS), fields.positive("layer_group_size")
    dense = fields.get("first_k_dense_replace", int, 0)
    if not 0 <= dense < count:
        raise CheckpointError(f"{fields.origin}: first_k_dense_replace is {dense}, wanted 0 to {count - 1}")
    kda, mla, moe = _kda(fields), _mla(fields), _moe(fields)
    plain = DenseConfig(fields.positive("intermediate_size")) if dense else None
    whole = count // group * group
    return tuple(
        LayerConfig(
            mixer=mla if number >= whole or (number + 1) % group == 0 else kda,
            mlp=plain if plain is not None and number < dense else moe,
            mixer_path=f"{MODEL}.layers.{number}.attention",
            mlp_path=f"{MODEL}.layers.{number}.mlp",
            mixer_norm=f"{MODEL}.layers.{number}.input_layernorm.weight",
            mlp_norm=f"{MODEL}.layers.{number}.post_attention_layernorm.weight",
        )
        for number in range(count)
    )


def _kda(fields: Fields) -> KdaConfig:
    lower_bound = fields.get("kda_lower_bound", float, -5.0)
    if lower_bound >= 0:
        raise CheckpointError(f"{fields.origin}: kda_lower_bound is {lower_bound}, wanted a number below 0")
    return KdaConfig(
        heads=fields.positive("num_attention_heads"),
        head_size=fields.positive("head_dim"),
        conv_kernel=fields.positive("short_conv_kernel_size", 4),
        lower_bound=lower_bound,
    )


def _mla(fields: Fields) -> MlaConfig:
    rope = fields.section("rope_parameters") if fields.values.get("rope_parameters") else fields
    for section in (rope, fields.section("rope_scaling") if fields.values.get("rope_scaling") else rope):
        kind = section.get("rope_type", str, section.get("type", str, "default"))
        if kind != "default":
            raise UnsupportedModelError(f"{section.origin}: {kind!r} rotary embeddings; edge0 runs the default ones")
    rotary_size = fields.positive("qk_rope_head_dim")
    if rotary_size % 2:
        raise CheckpointError(f"{fields.origin}: qk_rope_head_dim is {rotary_size}, wanted pairs")
    return MlaConfig(
        heads=fields.positive("num_attention_heads"),
        query_rank=fields.positive("q_lora_rank"),
        latent_size=fields.positive("kv_lora_rank"),
        key_size=fields.positive("qk_nope_head_dim"),
        rotary_size=rotary_size,
        value_size=fields.positive("v_head_dim"),
        rope_theta=rope.positive_float("rope_theta", 6e6),
    )


def _moe(fields: Fields) -> MoeConfig:
    experts, top_k = fields.positive("num_experts"), fields.positive("num_experts_per_tok")
    groups, kept = fields.positive("n_group"), fields.positive("topk_group")
    if experts % groups or kept > groups or top_k > kept * (experts // groups):
        raise CheckpointError(
            f"{fields.origin}: {top_k} experts from the best {kept} of {groups} groups of {experts} experts"
        )
    inner = fields.positive("moe_intermediate_size")
    return MoeConfig(
        num_experts=experts,
        inner_size=inner,
        shared_inner_size=fields.positive("moe_shared_expert_intermediate_size", inner)
        * fields.positive("num_shared_experts", 1),
        shared_gate=False,
        router=SigmoidGroup(top_k, groups, kept, fields.get("routed_scaling_factor", float)),
        shared_name="shared_experts",
        expert_bias=fields.get("moe_router_enable_expert_bias", bool, True),
    )


def _refuse_variants(fields: Fields) -> None:
    for name, wanted in ONLY.items():
        value = fields.get(name, type(wanted), wanted)
        if value != wanted:
            raise UnsupportedModelError(f"{fields.origin}: {name} is {reprlib.repr(value)}; edge0 runs {wanted!r}")
    for name in CLAMPS:
        if any(fields.get(name, list, [])):
            raise UnsupportedModelError(f"{fields.origin}: {name} is set; edge0 runs experts without such limits")


def _predictor_layers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Layers after the last one predict several tokens ahead; edge0 does not run them."""
    count = fields.get("num_nextn_predict_layers", int, 0)
    if not 0 <= count <= MOST_LAYERS:
        raise CheckpointError(f"{fields.origin}: num_nextn_predict_layers is {count}, wanted 0 to {MOST_LAYERS}")
    return tuple(f"{MODEL}.layers.{layers + number}." for number in range(max(count, 1)))
