"""How long the host takes to build one token's graph, beside mlx-lm, and what memory follows.

    pytest tests/mlx/bench_steps.py --benchmark-only

mlx-lm is needed by the comparison only. Figures are medians of pairs taken in turns in one process, in CPU time of the
thread that builds; compare figures of one run with each other. Nothing passes or fails by the clock.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.mlx.peaks import ROOT, peaks_of
from tests.ref.builders import Recipe, build

# the graph of a 40-layer model with one attention layer in four, over tensors too small to cost anything
SMALL_TENSORS = Recipe(
    layers=40,
    attention=4,
    experts=16,
    top_k=8,
    heads=4,
    kv_heads=2,
    key_heads=2,
    value_heads=4,
    key_dim=32,
    coefficients="F32",
)


def step_pairs(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.mlx.step_pairs", str(folder)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(shown.splitlines()[-1])
    return result


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_building_a_step_beside_mlx_lm(benchmark: Any, tmp_path: Path) -> None:
    """Ours with 39 heads and staged slots, theirs with all weights resident."""
    folder = build(tmp_path / "forty", SMALL_TENSORS)
    runs: list[dict[str, float]] = []
    benchmark.pedantic(lambda: runs.append(step_pairs(folder)), rounds=3)
    benchmark.extra_info.update(sorted(runs, key=lambda each: each["build_ratio"])[1])


def test_memory_does_not_follow_the_number_of_experts(benchmark: Any, tmp_path: Path) -> None:
    """MLX's peak and the process's own, decoding with 64, 256 and 1024 experts a layer, 40 layers."""
    peaks = {}
    for experts in (64, 256, 1024):
        recipe = Recipe(layers=40, attention=4, experts=experts, top_k=8, inner=32)
        folder = build(tmp_path / str(experts), recipe)
        peaks[experts] = peaks_of(folder)
    benchmark.extra_info["peak_mib"] = {
        experts: {name: round(size / 2**20, 1) for name, size in peak.items()} for experts, peak in peaks.items()
    }
    benchmark.pedantic(peaks_of, args=[folder], rounds=1)
