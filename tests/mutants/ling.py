"""Mutants of chapter 9, the Ling family: Kimi delta attention, latent attention, dense layers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge0_ref import decoder
from edge0_ref.functions import silu
from edge0_ref.mixers import kda, mla
from edge0_ref.mixers.attention import rotate_halves
from edge0_ref.moe import GatedMlp


def the_gate_of_kda_is_silu(patch: pytest.MonkeyPatch) -> None:
    original = kda.sigmoid
    patch.setattr(kda, "sigmoid", lambda z: silu(z) if z.shape[1] > 8 else original(z))


def decay_without_its_floor(patch: pytest.MonkeyPatch) -> None:
    def decay(f: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, lower_bound: float) -> np.ndarray:
        pace = np.logaddexp(0.0, f.astype(np.float64) + dt_bias)
        return np.exp(-np.exp(a_log.astype(np.float64))[:, None] * pace).astype(np.float32)

    patch.setattr(kda, "channel_decay", decay)


def one_decay_for_all_channels(patch: pytest.MonkeyPatch) -> None:
    original = kda.channel_decay
    patch.setattr(kda, "channel_decay", lambda *a: np.repeat(original(*a)[..., :1], a[0].shape[-1], axis=-1))


def the_latent_not_normalized(patch: pytest.MonkeyPatch) -> None:
    original = mla.Mla.__init__

    def initialize(layer: Any, *arguments: Any) -> None:
        original(layer, *arguments)
        layer.latent_norm = np.ones_like(layer.latent_norm)

    patch.setattr(mla.Mla, "__init__", initialize)


def scores_scaled_by_the_plain_part_alone(patch: pytest.MonkeyPatch) -> None:
    original = mla.Mla.__init__

    def initialize(layer: Any, weights: Any, path: str, config: Any, epsilon: float) -> None:
        original(layer, weights, path, config, epsilon)
        layer.reader = replace(layer.reader, scale=config.key_size**-0.5)

    patch.setattr(mla.Mla, "__init__", initialize)


def rotary_pairs_by_halves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mla, "rotate_pairs", lambda x, angles: rotate_halves(x, angles, x.shape[-1]))


def latent_keys_and_values_swapped(patch: pytest.MonkeyPatch) -> None:
    original = mla.LatentReader.absorbed

    def absorbed(reader: Any, *arguments: Any) -> Any:
        return original(replace(reader, w_uk=reader.w_uv, w_uv=reader.w_uk), *arguments)

    patch.setattr(mla.LatentReader, "absorbed", absorbed)


def dense_layers_without_silu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GatedMlp, "__call__", lambda layer, x: layer.down(layer.gate(x) * layer.up(x)))


def expert_bias_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = decoder.Moe.__init__

    def initialize(moe: Any, *arguments: Any) -> None:
        original(moe, *arguments)
        if getattr(moe.spec, "expert_bias", None) is not None:
            moe.spec = replace(moe.spec, expert_bias=None)

    patch.setattr(decoder.Moe, "__init__", initialize)


MUTANTS = {
    the_gate_of_kda_is_silu: "DEC-050",
    decay_without_its_floor: "DEC-051",
    one_decay_for_all_channels: "DEC-051",
    the_latent_not_normalized: "DEC-052",
    scores_scaled_by_the_plain_part_alone: "DEC-052",
    rotary_pairs_by_halves: "DEC-053",
    latent_keys_and_values_swapped: "DEC-054",
    dense_layers_without_silu: "DEC-055",
    expert_bias_forgotten: "DEC-056",
}
