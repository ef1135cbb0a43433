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

from tests.ref.builders import Recipe, build

ROOT = Path(__file__).parents[2]
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


def run(*arguments: str) -> dict[str, Any]:
    """The last line a Python process prints, as JSON."""
    shown = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return result


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_building_a_step_beside_mlx_lm(benchmark: Any, tmp_path: Path) -> None:
    """Ours with 39 heads and staged slots, theirs with all weights resident."""
    folder = str(build(tmp_path / "forty", SMALL_TENSORS))
    runs: list[dict[str, float]] = []
    benchmark.pedantic(lambda: runs.append(run("-m", "tests.mlx.step_pairs", folder)), rounds=3)
    benchmark.extra_info.update(sorted(runs, key=lambda each: each["build_ratio"])[1])


DECODE = """
import json, sys
import mlx.core as mx
from edge0_mlx.backend import create
from edge0_ref.contract import Plan
from edge0_ref.engine.memory import peak_bytes
from edge0_ref.inventory import open_checkpoint

checkpoint = open_checkpoint(sys.argv[1])
decoder = create().decoder(checkpoint, Plan(top_k=8, slots=16))
decoder.prefill([5, 6, 7])
for token in range(30):
    decoder.step(token)
decoder.close()
print(json.dumps({"mlx_peak": mx.get_peak_memory(), "process_peak": peak_bytes()}))
"""


def test_memory_does_not_follow_the_number_of_experts(benchmark: Any, tmp_path: Path) -> None:
    """MLX's peak and the process's own, decoding with 64, 256 and 1024 experts a layer, 40 layers."""
    peaks = {}
    for experts in (64, 256, 1024):
        recipe = Recipe(layers=40, attention=4, experts=experts, top_k=8, inner=32)
        folder = str(build(tmp_path / str(experts), recipe))
        peaks[experts] = run("-c", DECODE, folder)
    benchmark.extra_info["peak_mib"] = {
        experts: {name: round(size / 2**20, 1) for name, size in peak.items()} for experts, peak in peaks.items()
    }
    benchmark.pedantic(run, args=["-c", DECODE, folder], rounds=1)
