"""Frozen descriptions of a model, read from `config.json`.

A model is a list of layers, each a mixer and a feed-forward part; a *family* (`edge0_ref/families`) knows how its
config.json says that and what its tensors are called.
"""

import reprlib
from dataclasses import dataclass, field
from pathlib import Path

from edge0_ref.contract import RouterSpec
from edge0_ref.errors import CheckpointError, UnsupportedModelError
from edge0_ref.json_files import LARGEST, Fields, is_there, read_json


@dataclass(frozen=True)
class AttentionConfig:
    """Gated softmax attention with grouped key-value heads; rotary embedding on the first `rotary_size` dims."""

    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    rope_theta: float


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated delta net: a causal convolution, then a matrix state for each value head."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int


@dataclass(frozen=True)
class KdaConfig:
    """Kimi delta attention: the gated delta net with a decay for each key channel, at least `exp(lower_bound)`."""

    heads: int
    head_size: int
    conv_kernel: int
    lower_bound: float


@dataclass(frozen=True)
class MlaConfig:
    """Latent attention: a position is remembered as one latent and one rotated key, whatever the number of heads."""

    heads: int
    query_rank: int
    latent_size: int
    key_size: int
    rotary_size: int
    value_size: int
    rope_theta: float


MixerConfig = AttentionConfig | GatedDeltaConfig | KdaConfig | MlaConfig


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts and one shared expert, whose module is `shared_name` beside the router.

    shared_gate: the shared expert is scaled by a sigmoid of its own; expert_bias: the router has one, in its tensor
    `gate.expert_bias`.
    """

    num_experts: int
    inner_size: int
    shared_inner_size: int
    shared_gate: bool
    router: RouterSpec
    shared_name: str = "shared_expert"
    expert_bias: bool = False


@dataclass(frozen=True)
class DenseConfig:
    """A plain gated feed-forward layer."""

    inner_size: int


@dataclass(frozen=True)
class LayerConfig:
    """One layer and where its tensors are: `mixer_path`, `mlp_path` are module paths, the norms tensor names."""

    mixer: MixerConfig
    mlp: MoeConfig | DenseConfig
    mixer_path: str
    mlp_path: str
    mixer_norm: str
    mlp_norm: str


@dataclass(frozen=True)
class HeadStacks:
    """The other form of a linear layer whose rows are, head by head, keys and then values: two stacks of heads.

    keys: tensor [heads, cols, key_size], each head's key rows transposed; values: [heads, value_size, cols].
    """

    keys: str
    values: str
    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class TensorTable:
    """Every tensor a model must have, and no other: written by its family, from which files are checked.

    linears: module path -> (rows, cols); vectors: tensor name -> shape. Layouts differ between converters: experts:
    layer -> module paths under which the stacked routed experts may be found; stacks: module path of a linear layer
    -> the stacks that may be there in its place.
    """

    linears: dict[str, tuple[int, int]]
    vectors: dict[str, tuple[int, ...]]
    experts: dict[int, tuple[str, ...]]
    stacks: dict[str, HeadStacks] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizationConfig:
    """`config["quantization"]`: a default and overrides by module path. Shapes decide; this is cross-checked."""

    bits: int | None
    group_size: int | None
    overrides: dict[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int, int] | None:
        """(bits, group_size) promised for a module, or None when the config promises nothing."""
        if module in self.overrides:
            return self.overrides[module]
        return None if self.bits is None or self.group_size is None else (self.bits, self.group_size)


@dataclass(frozen=True)
class ModelConfig:
    """embedding and head are module paths (the same one when tied), final_norm a tensor name.

    skipped: prefixes of tensors that belong to parts edge0 does not run (vision, multi-token prediction).
    """

    family: str
    hidden_size: int
    vocab_size: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    embedding: str
    head: str
    final_norm: str
    tensors: TensorTable
    skipped: tuple[str, ...]
    quantization: QuantizationConfig
    eos_token_ids: tuple[int, ...]
    max_context: int

    @property
    def outer_prefix(self) -> str:
        """The first name of every module path, with its dot; published adapters may leave it out."""
        return self.embedding.partition(".")[0] + "."

    @property
    def moe_layers(self) -> dict[int, MoeConfig]:
        """Layer index -> its MoE description, in order."""
        return {i: layer.mlp for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeConfig)}

    @property
    def top_k(self) -> int:
        return next(iter(self.moe_layers.values())).router.top_k


def read_config(folder: Path) -> ModelConfig:
    """The model in a folder. Raises CheckpointError; UnsupportedModelError names the architecture."""
    path = folder / "config.json"
    fields = Fields(read_json(path), str(path))
    return config_of(fields, read_quantization(fields), read_eos(folder, fields))


def config_of(fields: Fields, quantization: QuantizationConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The model that a config.json describes, read by its family."""
    from edge0_ref.families import FAMILIES

    architectures = [str(name) for name in fields.get("architectures", list, [])]
    model_type = fields.get("model_type", str, "")
    for family in FAMILIES:
        if family.matches(model_type, architectures):
            model: ModelConfig = family.read(fields, quantization, eos_token_ids)
            return model
    named = reprlib.repr([*architectures, model_type])
    known = ", ".join(family.ARCHITECTURE for family in FAMILIES)
    raise UnsupportedModelError(f"{fields.origin}: architecture {named}; edge0 runs {known}")


def read_quantization(fields: Fields) -> QuantizationConfig:
    values = fields.get("quantization", dict, None)
    if values is None:
        return QuantizationConfig(None, None)
    section = Fields(values, f"{fields.origin}: quantization")
    mode = section.get("mode", str, "affine")
    if mode != "affine":
        raise UnsupportedModelError(f"{section.origin}: mode {mode!r}, edge0 reads 'affine'")
    overrides = {}
    for module, override in values.items():
        if not isinstance(override, dict) and ("." not in module or isinstance(override, bool)):
            continue  # a setting of the whole, or a module left as it was, for which converters write false
        part = section.section(module)
        if part.get("mode", str, mode) != mode:
            raise UnsupportedModelError(f"{part.origin}: mode {part.values['mode']!r}, edge0 reads {mode!r}")
        overrides[module] = (part.positive("bits"), part.positive("group_size"))
    return QuantizationConfig(section.positive("bits"), section.positive("group_size"), overrides)


def read_eos(folder: Path, fields: Fields) -> tuple[int, ...]:
    """Every id that ends a text, from generation_config.json and config.json."""
    sources = [fields.values.get("eos_token_id"), fields.values.get("text_config", {})]
    sources[1] = sources[1].get("eos_token_id") if isinstance(sources[1], dict) else None
    generation = folder / "generation_config.json"
    if is_there(generation):
        sources.append(read_json(generation).get("eos_token_id"))
    ids: list[int] = []
    for source in sources:
        ids += source if isinstance(source, list) else [] if source is None else [source]
    if not all(type(token) is int and 0 <= token <= LARGEST for token in ids):
        raise CheckpointError(f"{folder}: eos_token_id is {reprlib.repr(ids)}, wanted token ids")
    return tuple(sorted(set(ids)))
