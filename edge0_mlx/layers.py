"""The layers of a model: which pieces each is made of."""

from edge0_mlx.blocks import AttentionBlock, Block, DeltaBlock, DenseFinish, MoeFinish, Norms
from edge0_mlx.mixers.attention import Attention
from edge0_mlx.mixers.gated_delta import GatedDelta
from edge0_mlx.mixers.kda import Kda
from edge0_mlx.mixers.mla import Mla
from edge0_mlx.moe import GatedMlp, Moe
from edge0_mlx.weights import Weights
from edge0_ref.config import (
    AttentionConfig,
    DenseConfig,
    GatedDeltaConfig,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    MoeConfig,
)


class Layer:
    """Weights of one decoder layer, as graphs; the executors of its experts are the decoder's."""

    def __init__(self, weights: Weights, number: int, config: LayerConfig, epsilon: float, top_k: int) -> None:
        self.number = number
        norms = Norms(weights.vector(config.mixer_norm), weights.vector(config.mlp_norm), epsilon)
        mixer, mlp = make_mixer(weights, config, epsilon), make_mlp(weights, number, config, top_k)
        self.block: Block = (
            DeltaBlock(mixer, norms) if isinstance(mixer, GatedDelta | Kda) else AttentionBlock(mixer, norms)
        )
        self.finish = MoeFinish(mlp) if isinstance(mlp, Moe) else DenseFinish(mlp)


def make_mixer(weights: Weights, config: LayerConfig, epsilon: float) -> Attention | GatedDelta | Kda | Mla:
    match config.mixer:
        case AttentionConfig():
            return Attention(weights, config.mixer_path, config.mixer, epsilon)
        case GatedDeltaConfig():
            return GatedDelta(weights, config.mixer_path, config.mixer, epsilon)
        case KdaConfig():
            return Kda(weights, config.mixer_path, config.mixer, epsilon)
        case MlaConfig():
            return Mla(weights, config.mixer_path, config.mixer, epsilon)


def make_mlp(weights: Weights, number: int, config: LayerConfig, top_k: int) -> Moe | GatedMlp:
    match config.mlp:
        case MoeConfig():
            return Moe(weights, number, config.mlp_path, config.mlp, top_k)
        case DenseConfig():
            return GatedMlp(weights, config.mlp_path)
