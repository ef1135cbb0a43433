"""`python -m tests.mlx.step_pairs FOLDER`: one step of this backend and one of mlx-lm, in turns; a JSON line.

A process of its own, because the signatures that tests check at run time would be part of what is measured.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from edge0_mlx.backend import create
from edge0_mlx.decoder import MlxDecoder
from edge0_ref.adapters import Adapters
from edge0_ref.config import ModelConfig
from edge0_ref.contract import Plan, PrerouterHead
from edge0_ref.inventory import open_checkpoint

PAIRS, WARM = 60, 10


def random_heads(config: ModelConfig) -> Adapters:
    """A head for every layer but the last."""
    experts = next(iter(config.moe_layers.values())).num_experts
    random, features = np.random.default_rng(0), config.hidden_size + 2 * experts

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (random.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)

    owners = range(len(config.layers) - 1)
    heads = {o: PrerouterHead(matrix(32, features), matrix(experts, 32), matrix(experts, features)) for o in owners}
    return Adapters(heads, {}, config.top_k)


class Spent(NamedTuple):
    """Seconds of a step. build: of the thread, up to where the last evaluation begins, without earlier ones.

    host: all that the thread does outside of evaluations; whole: by the clock.
    """

    build: float
    host: float
    whole: float


class Timed:
    """A decoder's steps; waits do not count, except in `whole`."""

    def __init__(self, decoder: MlxDecoder) -> None:
        self.decoder = decoder
        self._evaluations: list[tuple[float, float]] = []  # begin and end of each in a step
        decoder.evaluations.run = self._timed(decoder.evaluations.run, self._evaluations)  # type: ignore[method-assign]

    def _timed(self, function: Any, spans: list[tuple[float, float]]) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = function(*arguments)
            spans.append((begin, time.thread_time()))
            return result

        return timed

    def step(self, token: int) -> Spent:
        self._evaluations.clear()
        start, began = time.thread_time(), time.perf_counter()
        self.decoder.step(token)
        end, whole = time.thread_time(), time.perf_counter() - began
        *earlier, (last, evaluated) = self._evaluations
        build = last - start - sum(end - begin for begin, end in earlier)
        return Spent(build, build + end - evaluated, whole)


def mlx_lm_steps(folder: Path) -> Any:
    """A function that builds and runs one step of mlx-lm: (seconds of the thread to build, seconds of the whole)."""
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[5, 6, 7]]), cache=cache))

    def step(token: int) -> tuple[float, float]:
        began, start = time.perf_counter(), time.thread_time()
        logits = model(mx.array([[token]]), cache=cache)
        built = time.thread_time() - start
        mx.eval(logits, [layer.state for layer in cache])
        return built, time.perf_counter() - began

    return step


def main(folder: Path) -> None:
    theirs = mlx_lm_steps(folder)
    checkpoint = open_checkpoint(folder)
    top_k = checkpoint.config.top_k
    decoder = create().decoder(checkpoint, Plan(top_k=top_k, slots=2 * top_k), random_heads(checkpoint.config))
    decoder.prefill([5, 6, 7])
    ours = Timed(decoder)
    pairs = [(ours.step(7), theirs(7)) for _ in range(WARM + PAIRS)][WARM:]
    decoder.close()
    medians = {
        "build_ms": statistics.median(our.build for our, _ in pairs) * 1e3,
        "mlx_lm_build_ms": statistics.median(their[0] for _, their in pairs) * 1e3,
        "build_ratio": statistics.median(our.build / their[0] for our, their in pairs),
        "host_ratio": statistics.median(our.host / their[0] for our, their in pairs),
        "step_ratio": statistics.median(our.whole / their[1] for our, their in pairs),
    }
    print(json.dumps({name: round(value, 3) for name, value in medians.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
