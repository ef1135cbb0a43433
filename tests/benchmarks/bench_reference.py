"""How fast the reference is, and that its memory does not follow the number of experts.

    pytest tests/benchmarks/bench_reference.py --benchmark-only

Each figure is a whole process or a whole decode of this machine; compare figures of one run with each other, not with
another machine's. Nothing here passes or fails by the clock.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ref.builders import Recipe, build

TOKENS = 64

DECODE = """
import json, sys, time
from edge0_ref.backend import create
from edge0_ref.contract import Plan
from edge0_ref.engine.memory import peak_bytes
from edge0_ref.inventory import open_checkpoint

checkpoint = open_checkpoint(sys.argv[1])
top_k = checkpoint.config.top_k
decoder = create().decoder(checkpoint, Plan(top_k=top_k, slots=2 * top_k))
token = int(decoder.prefill([5, 6, 7]).argmax())
start = time.perf_counter()
for _ in range(int(sys.argv[2])):
    token = int(decoder.step(token).argmax())
seconds = time.perf_counter() - start
decoder.close()
print(json.dumps({"tokens_per_second": int(sys.argv[2]) / seconds, "peak_bytes": peak_bytes()}))
"""


def run(*command: str, **environment: str) -> dict[str, Any]:
    """The last line a command prints, as JSON."""
    shown = subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return result


def generate(folder: str, **environment: str) -> dict[str, Any]:
    command = "from edge0_ref.app.cli import main; main()"
    options = ["generate", folder, "--prompt", "In the beginning", "--max-tokens", "1", "--json"]
    return run(sys.executable, "-c", command, *options, **environment)


@pytest.fixture(scope="session")
def kjv() -> str:
    return str(Path(__file__).parents[2] / "edge0_ref" / "assets" / "kjv-moe")


def test_first_token_with_compiled_kernels(benchmark, kjv) -> None:
    """Process start to first token and exit, everything cached."""
    generate(kjv)
    benchmark.pedantic(generate, args=[kjv], rounds=5)


def test_first_token_of_the_very_first_run(benchmark, kjv, tmp_path) -> None:
    """The same with an empty cache of compiled kernels."""
    caches = iter(range(100))
    benchmark.pedantic(lambda: generate(kjv, NUMBA_CACHE_DIR=str(tmp_path / str(next(caches)))), rounds=2)


def test_decode_speed(benchmark, kjv) -> None:
    """Tokens a second of the embedded model, 2K slots, after a prompt of three."""
    runs: list[float] = []
    benchmark.pedantic(
        lambda: runs.append(run(sys.executable, "-c", DECODE, kjv, "300")["tokens_per_second"]), rounds=5
    )
    benchmark.extra_info["median_tokens_per_second"] = sorted(runs)[len(runs) // 2]


def test_memory_does_not_follow_the_number_of_experts(benchmark, tmp_path) -> None:
    """Peak of decoding with 64, 256 and 1024 experts a layer, 40 layers: the ratios to the first."""
    peaks = {}
    for experts in (64, 256, 1024):
        recipe = Recipe(layers=40, attention=4, experts=experts, top_k=8, inner=32)
        folder = build(tmp_path / str(experts), recipe)
        peaks[experts] = run(sys.executable, "-c", DECODE, str(folder), str(TOKENS))["peak_bytes"]
    benchmark.extra_info["peak_mib"] = {experts: round(peak / 2**20, 1) for experts, peak in peaks.items()}
    benchmark.extra_info["ratio_to_64"] = {experts: round(peak / peaks[64], 3) for experts, peak in peaks.items()}
    benchmark.pedantic(run, args=[sys.executable, "-c", DECODE, str(folder), str(TOKENS)], rounds=1)
