"""`edge0 bench`: what its figures mean, that they fit together, and that a cap is a cap."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app import bench as command
from edge0_ref.app.bench_case import Measured, Step, figures, raw_rate
from edge0_ref.app.bench_routing import SimulatedRouting, parse_routing
from edge0_ref.app.cgroup import memory_group
from edge0_ref.app.page_cache import cached_bytes, forget_pages
from edge0_ref.app.probes import BlockReads
from edge0_ref.app.scenario import Case, open_case
from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import Counters, Routing
from edge0_ref.engine.session import counters_between
from edge0_ref.errors import UsageError
from tests.app.command import edge0, refused
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, experts=16, top_k=2)
OWNERS = [1, 2]
EXPERT_BYTES = 3 * RECIPE.inner * RECIPE.hidden // 2 + 3 * 4 * RECIPE.inner * RECIPE.hidden // RECIPE.group_size
SHORT = ("--tokens", 5, "--prompt-tokens", 6, "--json")
TIMES = ["decode_tok_s", "prefill_tok_s", "ttft_s", "wait_ms_per_token", "compute_ms_per_token", "limit_tok_s"]
RATES = ["disk_gb_s", "raw_disk_gb_s", "kernel_gb_s", "memory_gb_s"]
NUMBERS = [*TIMES, *RATES, "bytes_per_token", "reads_per_token", "hit_rate", "peak_bytes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = build(tmp_path_factory.mktemp("model"), RECIPE)
    build_adapters(made / "adapters", RECIPE, OWNERS, {})
    return made


def bench(*arguments: object) -> list[dict[str, object]]:
    """The lines of a run that succeeds."""
    done = edge0("bench", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.spec("ENG-070", "ENG-075")
def test_a_step_is_its_wait_and_its_compute_and_limits_are_of_what_was_measured(folder) -> None:
    (line,) = bench(folder, "--scenario", "on-demand", "--k", 3, "--read-mode", "pread", *SHORT)
    assert (line["k"], line["routing"], line["routing_is_simulated"]) == (3, "model", False)
    assert len(line["steps"]) == line["tokens"] == 5
    assert all(0 <= wait <= whole for whole, wait, _ in line["steps"])
    whole = sorted(step[0] for step in line["steps"])
    assert 1e3 / line["decode_tok_s"] == pytest.approx(whole[2], rel=1e-4)
    assert line["bytes_per_token"] == pytest.approx(np.mean([step[2] for step in line["steps"]]), rel=1e-4)
    assert line["raw_disk_gb_s"] == pytest.approx(np.median(line["raw_disk_gb_s_each"]), rel=1e-4)
    slower = min(line["limit_disk_tok_s"], line["limit_compute_tok_s"])
    assert line["limit_tok_s"] == pytest.approx(slower, rel=1e-4)
    assert line["limit_disk_tok_s"] == pytest.approx(line["raw_disk_gb_s"] * 1e9 / line["bytes_per_token"], rel=1e-4)


@pytest.mark.spec("ENG-072")
def test_simulated_routing_is_labelled(folder) -> None:
    done = edge0("bench", folder, "--routing", "replay:reuse=0.5", *SHORT[:-1])
    line = json.loads(done.stdout)
    assert (line["routing"], line["routing_is_simulated"]) == ("replay:reuse=0.5", True)
    assert "replay:reuse=0.5 (simulated)" in done.stderr


@pytest.mark.spec("ENG-074")
def test_warm_runs_everything_before(folder) -> None:
    """With slots for all experts a first run reads, a second one does not."""
    slots = ("--slots", RECIPE.experts, "--scenario", "on-demand", "--routing", "uniform")
    (cold,), (warm,) = bench(folder, "--cold", *slots, *SHORT), bench(folder, "--warm", *slots, *SHORT)
    assert (cold["cold"], warm["cold"]) == (True, False)
    assert cold["reads_per_token"] > 0
    assert warm["reads_per_token"] == 0


@pytest.mark.spec("ENG-074")
def test_dropped_pages_are_gone_and_read_ones_are_there(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2**20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet cannot be dropped
        file.read()
    try:
        assert cached_bytes([path]) == 2**20
    except OSError as error:
        pytest.skip(f"this system does not say what is in its page cache: {error}")
    if not forget_pages([path]):
        pytest.skip("this system cannot be asked to drop pages")
    assert cached_bytes([path]) == 0


@pytest.mark.spec("ENG-072")
@given(
    experts=st.integers(1, 40),
    k=st.integers(1, 8),
    reuse=st.sampled_from([None, 0.0, 0.45, 1.0]),
    seed=st.integers(0, 9),
    in_turn=st.booleans(),
)
def test_simulated_tokens_use_k_distinct_experts_and_are_known_ahead(experts, k, reuse, seed, in_turn) -> None:
    k = min(k, experts)
    rule = parse_routing("uniform" if reuse is None else f"replay:reuse={reuse}")
    model = Routing(np.zeros((1, k), np.int64), np.full((1, k), 0.25, np.float32))
    sources = [SimulatedRouting(rule, {3: experts}, 7, seed, in_turn=in_turn) for _ in range(2)]
    assert sources[0](3, 6, model) is model
    ahead = sources[1](3, 16, model)
    tokens = [sources[0](3, position, model) for position in range(7, 17)]
    assert np.array_equal(ahead.experts, tokens[-1].experts)
    for token in tokens:
        assert token.weights is model.weights
        chosen = set(token.experts[0].tolist())
        assert len(chosen) == k
        assert chosen <= set(range(experts))
    if in_turn:
        covering = tokens[: -(-experts // k)]
        assert {expert for token in covering for expert in token.experts[0].tolist()} >= set(
            range(min(experts, k * len(covering)))
        )
    for before, after in pairwise(tokens):
        kept = set(before.experts[0].tolist()) & set(after.experts[0].tolist())
        if not in_turn and reuse == 1:
            assert len(kept) == k
        if not in_turn and reuse == 0 and experts >= 2 * k:
            assert not kept


@pytest.mark.spec("ENG-072")
@pytest.mark.parametrize(("routing", "share"), [("uniform", 8 / 64), ("replay:reuse=0.45", 0.45)])
def test_the_share_of_reused_experts_is_what_the_rule_says(routing, share) -> None:
    """Over n choices the share of a fair draw is off by more than 5 sqrt(p (1 - p) / n) once in a million times."""
    k, tokens = 8, 1000
    source = SimulatedRouting(parse_routing(routing), {0: 64}, 0, seed=0, in_turn=False)
    model = Routing(np.zeros((1, k), np.int64), np.ones((1, k), np.float32))
    chosen = [set(source(0, position, model).experts[0].tolist()) for position in range(tokens)]
    reused = sum(len(before & after) for before, after in pairwise(chosen))
    choices = k * (tokens - 1)
    assert abs(reused / choices - share) <= 5 * (share * (1 - share) / choices) ** 0.5
    used = Counter(expert for one in chosen for expert in one)
    assert len(used) == 64


@pytest.mark.spec("ENG-070", "ENG-075")
def test_figures_are_medians_and_means_and_the_limit_is_the_slower_of_disk_and_compute(folder) -> None:
    """Steps of 4, 5 and 9 s, of which 1, 3 and 2 are waits, and 30 bytes are read in all; raw reads of 1, 4, 5 B/s."""
    steps = [
        Step(seconds, Counters(bytes_read=read, reads=1, hits=3, on_demand=1, wait_seconds=wait))
        for seconds, wait, read in ((4.0, 1.0, 9), (5.0, 3.0, 9), (9.0, 2.0, 12))
    ]
    measured = Measured(memory=100.0, prefill=Step(2.0, Counters()), steps=steps, raw=[1.0, 5.0, 4.0])
    with open_case(Case("prefetch", str(folder), prompt_tokens=8), 40, lambda text: None) as running:
        told = figures(running, measured)
        alone = figures(running, replace(measured, alone=[Step(1.0, Counters())] * 3))
    assert (told["step_ms"], told["wait_ms_per_token"], told["compute_ms_per_token"]) == (5e3, 2e3, 3e3)
    assert (told["bytes_per_token"], told["reads_per_token"], told["hit_rate"]) == (10, 1, 0.75)
    assert (told["prefill_tok_s"], told["ttft_s"], told["decode_tok_s"]) == (4, 2, 1 / 5)
    assert (told["limit_disk_tok_s"], told["limit_compute_tok_s"], told["limit_tok_s"]) == (4 / 10, 1 / 3, 1 / 3)
    assert (alone["limit_compute_tok_s"], alone["limit_tok_s"]) == (1, 4 / 10)


@pytest.mark.spec("ENG-075")
@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_raw_reads_are_those_of_the_engine(folder, mode, monkeypatch) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(BlockReads, "rate", lambda reads, *how: seen.append((reads, *how[:2])) or 1.0)
    with open_case(Case("prefetch", str(folder), read_mode=mode), 40, lambda text: None) as running:
        raw_rate(running, 0)
        ((reads, read_mode, threads),) = seen
        assert (read_mode, threads) == (mode, running.plan.plan.reader_threads)
        assert reads.path in running.files()
        assert EXPERT_BYTES <= reads.block < EXPERT_BYTES + 4096  # an expert, in whole blocks of the disk


@pytest.mark.spec("ENG-071")
@pytest.mark.parametrize(("scenario", "ahead"), [("on-demand", False), ("prefetch", True)])
def test_only_what_is_predicted_is_read_ahead(folder, scenario, ahead) -> None:
    case = Case(scenario, str(folder), slots=2 * RECIPE.top_k, routing="uniform")
    with open_case(case, 40, lambda text: None) as running:
        running.decoder.prefill(running.prompt()[:6])
        running.simulate(case.rule, cached=False)
        before = replace(running.decoder.counters)
        for token in range(6):
            running.decoder.step(token)
        spent = counters_between(before, running.decoder.counters)
    assert (spent.read_ahead > 0) == ahead
    assert spent.on_demand > 0  # in layers that nobody predicts for


@pytest.mark.spec("ENG-071", "ENG-072")
def test_what_is_simulated_is_what_is_executed(folder) -> None:
    """Predicted layers and routed ones alike; the first simulated token is routed by the model, as it was predicted."""
    seen: dict[tuple[int, int], list[int]] = {}
    case = Case("prefetch", str(folder), routing="uniform")
    holder: list[object] = []

    def observe(point: str, layer: int, value: object) -> None:
        if point == "routing" and holder:
            seen[layer, holder[0].position] = value.experts[0].tolist()

    with open_case(case, 40, lambda text: None, observe) as running:
        running.decoder.prefill(running.prompt()[:6])
        running.simulate(case.rule, cached=False)
        holder.append(running.decoder)
        for token in range(5):
            running.decoder.step(token)
    pool = dict.fromkeys(range(RECIPE.layers), RECIPE.experts)
    wanted = SimulatedRouting(case.rule, pool, 7, 0, in_turn=False)
    model = Routing(np.zeros((1, RECIPE.top_k), np.int64), np.ones((1, RECIPE.top_k), np.float32))
    for layer in pool:
        for position in range(7, 11):
            assert seen[layer, position] == wanted(layer, position, model).experts[0].tolist()


@pytest.mark.spec("ENG-072")
def test_a_decoder_that_asks_no_source_of_routing_is_refused(folder) -> None:
    case = Case("prefetch", str(folder), routing="uniform")
    with open_case(case, 40, lambda text: None) as running:
        del running.decoder.routing_source
        with pytest.raises(UsageError, match="reference"):
            running.simulate(case.rule, cached=False)


def needs_cgroup() -> None:
    try:
        with memory_group(2**30):
            pass
    except OSError as error:
        pytest.skip(f"no memory cgroup here: {error}")


@pytest.mark.spec("ENG-073")
def test_a_cap_is_a_cap_and_counts_the_page_cache(folder) -> None:
    needs_cgroup()
    (line,) = bench(folder, "--cap", "1GiB", *SHORT)
    assert (line["cap_bytes"], line["cap_is_enforced"]) == (2**30, True)
    assert "page cache" in line["peak_is"]
    assert 0 < line["peak_bytes"] <= line["cap_bytes"]


@pytest.mark.spec("ENG-073")
def test_the_group_counts_pages_that_its_process_reads(tmp_path) -> None:
    needs_cgroup()
    size = 32 * 2**20
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    peaks = []
    for code in (
        "pass",
        f"import os; f = os.open({str(path)!r}, 0); [os.read(f, 4096) for _ in range({size // 4096})]",
    ):
        forget_pages([path])
        with memory_group(None) as group:
            subprocess.run(group.command([sys.executable, "-c", code]), check=True)
            peaks.append(group.peak_bytes)
        assert not group.folder.exists()
    if peaks[0] is None:
        pytest.skip("this kernel does not tell a group's peak")
    assert peaks[1] - peaks[0] >= size * 3 // 4


class HungryBackend(ReferenceBackend):
    """Takes more memory than any cap of these tests as soon as a decoder is wanted."""

    name = "hungry"

    def decoder(self, *arguments: object, **named: object):
        self.eaten = np.ones(2**30, np.uint8)
        return super().decoder(*arguments, **named)


@pytest.mark.spec("ENG-073")
def test_a_case_killed_at_its_cap_is_a_named_error(folder) -> None:
    needs_cgroup()
    done = edge0("bench", folder, "--cap", "900MiB", "--backend", "tests.app.test_bench:HungryBackend", *SHORT)
    assert (done.returncode, done.stdout) == (2, "")
    says = done.stderr.splitlines()[-1]
    assert "killed" in says
    assert "900 MiB" in says


@pytest.mark.spec("ENG-073")
def test_without_a_cgroup_that_is_said_and_the_case_runs_all_the_same(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(command, "memory_group", lambda cap: memory_group(cap, root=tmp_path))
    notes: list[str] = []
    told = command.run_case(Case("prefetch", str(folder), tokens=2, prompt_tokens=2, cap=2**30), notes.append)
    assert told["cap_is_enforced"] is False
    assert told["peak_bytes"] > 0
    assert any("no memory cgroup" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scenario", "psychic"], "on-demand"),
        (["--k", "0"], "'0'"),
        (["--k", "17"], "16"),
        (["--routing", "replay:reuse=2"], "0 to 1"),
        (["--tokens", "0"], "tokens"),
        (["--cap", "1MiB"], "1.00 MiB"),
        (["--picture", "no/such/folder/x.svg"], "no/such/folder"),
    ],
)
@pytest.mark.spec("ENG-065")
def test_what_cannot_be_measured_is_refused(folder, arguments, says) -> None:
    done = edge0("bench", folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.spec("ENG-065", "ENG-071")
def test_nothing_is_called_prefetch_without_heads(tmp_path) -> None:
    assert "heads" in refused("bench", build(tmp_path, RECIPE), *SHORT)


@pytest.mark.spec("ENG-070", "ENG-071")
def test_every_scenario_has_every_figure_and_reads_what_its_name_says(folder, tmp_path) -> None:
    names = ["on-demand", "prefetch", "resident", "exact", "oracle"]
    picture = tmp_path / "steps.svg"
    done = edge0(
        "bench", folder, "--scenario", ",".join(names), "--routing", "uniform", "--picture", picture, *SHORT[:-1]
    )
    assert done.returncode == 0, done.stderr
    told = {line["scenario"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(told) == names
    assert all(name in done.stderr for name in names)
    for line in told.values():
        assert all(isinstance(line[name], int | float) and np.isfinite(line[name]) for name in NUMBERS)
        assert (line["k"], line["drops"], line["cap_bytes"]) == (RECIPE.top_k, 0, None)
        assert line["machine"]
        assert line["versions"]["edge0"]
        assert "commit" in line
        assert line["command"].startswith("edge0 bench ")
        assert line["bytes_per_token"] == pytest.approx(line["reads_per_token"] * EXPERT_BYTES, rel=1e-5)
    assert told["exact"]["reads_per_token"] == RECIPE.layers * RECIPE.top_k
    assert told["oracle"]["reads_per_token"] == told["resident"]["reads_per_token"] == 0
    assert told["oracle"]["hit_rate"] == 1
    assert told["on-demand"]["reads_per_token"] > 0
    assert told["prefetch"]["speedup_over_on_demand"] == pytest.approx(
        told["prefetch"]["decode_tok_s"] / told["on-demand"]["decode_tok_s"], rel=1e-4
    )
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
