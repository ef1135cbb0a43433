"""Mutants of chapter 9, the Ling family: Kimi delta attention, latent attention, dense layers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge0_ref import adapters, decoder
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.families import bailing_v3
from edge0_ref.functions import silu
from edge0_ref.mixers import kda, mla
from edge0_ref.mixers.attention import rotate_halves
from edge0_ref.moe import GatedMlp
from edge0_ref.weights import Weights


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
    patch.setattr(GatedMlp, "__call__", lambda layer, x: layer.down(np.prod(layer.gate_up(x), axis=0)))


def expert_bias_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = decoder.Moe.__init__

    def initialize(moe: Any, *arguments: Any) -> None:
        original(moe, *arguments)
        if getattr(moe.spec, "expert_bias", None) is not None:
            moe.spec = replace(moe.spec, expert_bias=None)

    patch.setattr(decoder.Moe, "__init__", initialize)


def values_before_keys_in_two_stacks(patch: pytest.MonkeyPatch) -> None:
    def from_stacks(opened: Checkpoint, stacks: Any) -> np.ndarray:
        keys, values = opened.vector(stacks.keys).swapaxes(1, 2), opened.vector(stacks.values)
        return np.concatenate([values, keys], axis=1).reshape(-1, values.shape[2])

    patch.setattr(Checkpoint, "_from_stacks", from_stacks)


def lora_on_kv_b_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = Weights.dense

    def dense(weights: Weights, module: str) -> np.ndarray:
        return original(replace(weights, adapters=Adapters()), module)

    patch.setattr(Weights, "dense", dense)


def keys_and_values_kept_as_well(patch: pytest.MonkeyPatch) -> None:
    original = mla.Mla.new_state

    def new_state(layer: Any) -> Any:
        cache = original(layer)
        cache.keys = np.zeros((len(cache.rows), layer.config.heads * layer.config.key_size), np.float32)
        return cache

    patch.setattr(mla.Mla, "new_state", new_state)


def heads_in_the_models_own_files_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapters, "baked_adapters", lambda opened: Adapters())


def variants_of_no_shape_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bailing_v3, "_refuse_variants", lambda fields: None)


def the_routed_scale_left_out(patch: pytest.MonkeyPatch) -> None:
    original = decoder.Moe.__init__

    def initialize(moe: Any, *arguments: Any) -> None:
        original(moe, *arguments)
        if getattr(moe.spec, "scale", 1.0) != 1.0:
            moe.spec = replace(moe.spec, scale=1.0)

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
    keys_and_values_kept_as_well: "DEC-057",
    values_before_keys_in_two_stacks: "DEC-061",
    lora_on_kv_b_forgotten: "DEC-062",
    heads_in_the_models_own_files_ignored: "DEC-063",
    variants_of_no_shape_accepted: "DEC-064",
    the_routed_scale_left_out: "DEC-065",
}
