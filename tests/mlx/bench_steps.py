"""How long the host takes to build one token's graph, beside mlx-lm, and what MLX's memory follows.

    pytest tests/mlx/bench_steps.py --benchmark-only

mlx-lm is needed by the comparison only. Figures are medians of pairs taken one after the other in one process, in CPU
time of the thread that builds; compare figures of one run with each other. Nothing passes or fails by the clock.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_mlx.backend import create
from edge0_mlx.decoder import MlxDecoder
from edge0_ref.adapters import Adapters
from edge0_ref.contract import Plan, PrerouterHead
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import Recipe, build

PAIRS = 60
WARM = 10
TOP_K = 8
# the graph of a 40-layer model with one attention layer in four, over tensors too small to cost anything
SMALL_TENSORS = Recipe(
    layers=40, attention=4, experts=16, top_k=TOP_K, heads=4, kv_heads=2, key_heads=2, value_heads=4, key_dim=32,
    coefficients="F32",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("forty"), SMALL_TENSORS)


def random_heads(recipe: Recipe) -> Adapters:
    random, features = np.random.default_rng(0), recipe.hidden + 2 * recipe.experts

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (random.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)

    heads = {
        owner: PrerouterHead(matrix(32, features), matrix(recipe.experts, 32), matrix(recipe.experts, features))
        for owner in range(recipe.layers - 1)
    }
    return Adapters(heads, {}, recipe.top_k)


class Timed:
    """A decoder's steps: the thread's seconds before the last evaluation begins, without evaluations and waits."""

    def __init__(self, decoder: MlxDecoder) -> None:
        self.decoder, self._run = decoder, decoder.evaluations.run
        self._evaluating = self._last = 0.0
        decoder.evaluations.run = self._evaluate  # type: ignore[method-assign]

    def _evaluate(self, *arrays: Any) -> None:
        self._last = time.thread_time()
        self._run(*arrays)
        self._evaluating += time.thread_time() - self._last

    def build(self, token: int) -> tuple[float, float]:
        """Seconds of the thread spent on the graph, and seconds of the whole step."""
        self._evaluating, start, began = 0.0, time.thread_time(), time.perf_counter()
        waited = self.decoder.counters.wait_seconds
        self.decoder.step(token)
        whole = time.perf_counter() - began
        waited = self.decoder.counters.wait_seconds - waited
        last = time.thread_time()
        mid_evaluations = self._evaluating - self._final(last)
        return self._last - start - mid_evaluations - waited, whole

    def _final(self, end: float) -> float:
        """Seconds of the evaluation that ended the step; handing predictions over is not counted as building."""
        return min(self._evaluating, end - self._last)


def mlx_lm_steps(folder: Path) -> Any:
    """A function that builds and runs one step of mlx-lm: (seconds of the thread to build, seconds of the whole)."""
    utils = pytest.importorskip("mlx_lm.utils")
    cache_of = pytest.importorskip("mlx_lm.models.cache").make_prompt_cache
    model, _ = utils.load_model(folder)
    cache = cache_of(model)
    mx.eval(model(mx.array([[5, 6, 7]]), cache=cache))

    def step(token: int) -> tuple[float, float]:
        began, start = time.perf_counter(), time.thread_time()
        logits = model(mx.array([[token]]), cache=cache)
        built = time.thread_time() - start
        mx.eval(logits, [layer.state for layer in cache])
        return built, time.perf_counter() - began

    return step


@pytest.mark.parametrize("heads", [True, False], ids=["predicted", "resident"])
def test_building_a_step_beside_mlx_lm(benchmark: Any, folder: Path, heads: bool) -> None:
    """predicted: 39 heads and staged slots; resident: as mlx-lm, no head, every expert in memory."""
    theirs = mlx_lm_steps(folder)
    checkpoint = open_checkpoint(folder)
    kind, adapters = ("staged", random_heads(SMALL_TENSORS)) if heads else ("whole_layer", Adapters())
    plan = Plan(top_k=TOP_K, slots=2 * TOP_K, executor=kind, prefill_executor=kind)  # type: ignore[arg-type]
    decoder = create().decoder(checkpoint, plan, adapters)
    decoder.prefill([5, 6, 7])
    ours = Timed(decoder)
    pairs = [(ours.build(7), theirs(7)) for _ in range(WARM + PAIRS)][WARM:]
    benchmark.extra_info.update(
        build_ms=statistics.median(our[0] for our, _ in pairs) * 1e3,
        mlx_lm_build_ms=statistics.median(their[0] for _, their in pairs) * 1e3,
        build_ratio=statistics.median(our[0] / their[0] for our, their in pairs),
        step_ratio=statistics.median(our[1] / their[1] for our, their in pairs),
    )
    benchmark.pedantic(decoder.step, args=[7], rounds=20)
    decoder.close()


DECODE = """
import json, resource, sys
import mlx.core as mx
from edge0_mlx.backend import create
from edge0_ref.contract import Plan
from edge0_ref.inventory import open_checkpoint

checkpoint = open_checkpoint(sys.argv[1])
decoder = create().decoder(checkpoint, Plan(top_k=8, slots=16))
decoder.prefill([5, 6, 7])
for token in range(30):
    decoder.step(token)
decoder.close()
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"mlx_peak": mx.get_peak_memory(), "rss": rss * (1 if sys.platform == "darwin" else 1024)}))
"""


def test_memory_does_not_follow_the_number_of_experts(benchmark: Any, tmp_path: Path) -> None:
    """MLX's peak and the process's own, decoding with 64, 256 and 1024 experts a layer, 40 layers."""
    assert resource.getpagesize()
    peaks = {}
    for experts in (64, 256, 1024):
        recipe = Recipe(layers=40, attention=4, experts=experts, top_k=8, inner=32)
        model = str(build(tmp_path / str(experts), recipe))
        shown = subprocess.run(
            [sys.executable, "-c", DECODE, model], env=os.environ, check=True, capture_output=True, text=True
        )
        peaks[experts] = json.loads(shown.stdout.splitlines()[-1])
    benchmark.extra_info["peak_mib"] = {
        experts: {name: round(size / 2**20, 1) for name, size in peak.items()} for experts, peak in peaks.items()
    }
    benchmark.pedantic(subprocess.run, args=[[sys.executable, "-c", DECODE, model]], rounds=1)
