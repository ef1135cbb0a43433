"""Texts that a model writes, a batch at a time, one token after the other: each step is the engine's decode step."""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from edge0_mlx.arrays import DeviceHead
from edge0_mlx.train.mixers import NO_LORAS, Loras
from edge0_mlx.train.model import ParallelModel
from edge0_ref.contract import Array


def write_texts(
    model: ParallelModel,
    prompts: Array,
    length: int,
    seed: tuple[int, int],
    heads: Mapping[int, DeviceHead] | None = None,
    loras: Loras = NO_LORAS,
) -> Array:
    """prompts int [batch, tokens], continued to `length` tokens by sampling at temperature 1.

    Prompts are routed by routers and, where there are heads, all that follows by predictions. The same seed, the same
    texts.
    """
    tokens, written = mx.array(prompts), [np.asarray(prompts)]
    key = mx.random.key(seed[0] * 1_000_003 + seed[1])
    carry, prompt = None, prompts.shape[1]
    for _ in range(prompt, length):
        logits, carry = model(tokens, carry, heads=heads, loras=loras, decode_from=prompt if heads else None)
        key, now = mx.random.split(key)
        tokens = mx.random.categorical(logits[:, -1], key=now)[:, None]
        mx.eval(tokens, carry.arrays, key)
        written.append(np.array(tokens))
    return np.concatenate(written, axis=1)
