"""What is told about a run, and routings that a measurement has executed instead of the model's own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edge0_mlx.memory import CACHE_BYTES, WITHOUT_BUDGET, limit_memory
from edge0_ref.adapters import Adapters
from edge0_ref.app.bench_routing import SimulatedRouting, parse_routing
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Measuring, Plan, Routing
from tests.mlx.conftest import RECIPE, Opened
from tests.mlx.peaks import peaks_of
from tests.ref.builders import Recipe, build

PLAN = Plan(top_k=2, slots=4)


@pytest.mark.spec("ENG-070")
def test_a_decoder_tells_what_its_last_steps_took(opened: Opened, small: Checkpoint, adapters: Adapters) -> None:
    decoder = opened(small, PLAN, adapters)
    assert isinstance(decoder, Measuring)
    decoder.prefill([1, 2, 3])
    assert "evaluations_per_token" not in decoder.measures()
    for token in range(4):
        decoder.step(token)
    told = decoder.measures()
    assert told["evaluations_per_token"] == 2  # the first layer asks its router
    assert told["graph_build_ms_per_token"] > 0
    assert told["device_peak_bytes"] >= told["device_active_bytes"] > 0


@pytest.mark.spec("ENG-072")
@pytest.mark.parametrize("heads", [True, False], ids=["predicted", "asked for"])
@pytest.mark.parametrize("text", ["uniform", "replay:reuse=0.45"])
def test_a_simulated_routing_is_what_is_executed(
    opened: Opened, small: Checkpoint, adapters: Adapters, text: str, heads: bool
) -> None:
    seen: dict[int, list[Routing]] = {}

    def observe(point: str, layer: int, value: Any) -> None:
        if point == "routing":
            seen.setdefault(layer, []).append(value)

    decoder = opened(small, PLAN, adapters if heads else Adapters(), observe)
    decoder.prefill([1, 2, 3])
    pool = dict.fromkeys(range(RECIPE.layers), RECIPE.experts)
    first = decoder.position + 1
    decoder.routing_source = SimulatedRouting(parse_routing(text), pool, first, 0, in_turn=False)
    decoder.step(4)
    seen.clear()
    for token in range(6):
        decoder.step(token)
    wanted = SimulatedRouting(parse_routing(text), pool, first, 0, in_turn=False)
    for layer, routings in seen.items():
        for step, routing in enumerate(routings):
            np.testing.assert_array_equal(routing.experts, wanted(layer, first + step, routing).experts)
    assert len(seen) == RECIPE.layers
    assert decoder.counters.drops == 0


@pytest.mark.spec("ENG-030")
def test_the_budget_of_the_newest_plan_bounds_what_mlx_may_keep_and_hold(opened: Opened) -> None:
    limits = []
    for budget in (2**30, None):
        limit_memory(budget, opened.backend.device)
        limits.append((mx.set_cache_limit(CACHE_BYTES), mx.get_memory_limit()))
    assert limits == [(2**30 // 16, 2**30), (CACHE_BYTES, WITHOUT_BUDGET)]
    assert WITHOUT_BUDGET > 2**30


def generate(*options: str) -> "subprocess.CompletedProcess[str]":
    command = ["generate", "--prompt", "In", "--max-tokens", "1", *options]
    code = "import sys; from edge0_ref.app.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)


@pytest.mark.spec("BCK-008", "BCK-012")
@pytest.mark.parametrize(
    ("backend", "dtype", "said"),
    [
        ("reference", "bfloat16", "float32 only"),
        ("numba", "bfloat16", "float32 only"),
        ("mlx", "float16", "float32, bfloat16"),
    ],
)
def test_a_dtype_that_a_backend_does_not_have_is_one_line_and_exit_code_2(backend: str, dtype: str, said: str) -> None:
    run = generate("--backend", backend, "--dtype", dtype)
    assert run.returncode == 2
    assert said in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.spec("BCK-012")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_that_is_asked_for_is_the_one_that_runs(dtype: str) -> None:
    run = generate("--backend", "mlx", "--dtype", dtype, "--stats")
    assert run.returncode == 0
    assert ("rounded to bfloat16" in run.stderr) == (dtype == "bfloat16")
    assert "device peak" in run.stderr


NOISE = 12 * 2**20  # a process differs from its like by a few MiB: threads, allocators, address layout


@pytest.mark.spec("ENG-030")
def test_memory_does_not_follow_the_number_of_experts(tmp_path: Path) -> None:
    """40 layers of 64 and of 256 experts: what grows is the router, a row of `hidden` numbers an expert and layer."""
    peaks, sizes = [], []
    few, many = (Recipe(layers=40, attention=4, experts=e, top_k=4, inner=128, hidden=128) for e in (64, 256))
    for recipe in (few, many):
        folder = build(tmp_path / str(recipe.experts), recipe)
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
        peaks.append(peaks_of(folder))
    routers = 40 * (many.experts - few.experts) * many.hidden * 4
    assert abs(peaks[1]["mlx"] - peaks[0]["mlx"]) <= 2 * routers
    assert abs(peaks[1]["process"] - peaks[0]["process"]) <= NOISE + 2 * routers
    assert sizes[1] - sizes[0] > 4 * (NOISE + 2 * routers)  # as far apart as they would be if experts were held
