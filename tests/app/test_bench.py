"""`edge0 bench`: what its figures mean, that they fit together, and that a cap is a cap."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from edge0_ref.app import bench as command
from edge0_ref.app import bench_case
from edge0_ref.app.bench_case import Measured, Step, decode, figures, raw_rate, run_once
from edge0_ref.app.cgroup import memory_group
from edge0_ref.app.page_cache import cached_bytes, forget_pages
from edge0_ref.app.picture import Picture
from edge0_ref.app.probes import BlockReads
from edge0_ref.app.scenario import Case, open_case
from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import Counters
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.errors import UsageError
from tests.app.command import edge0, edge0_here, refusal
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


def knows_its_machine(line: dict[str, object]) -> bool:
    named = all(line[part] in line["machine"] for part in ("chip", "os"))
    return named and bool(line["versions"]["edge0"]) and "commit" in line


@pytest.mark.spec("ENG-070", "ENG-075")
def test_a_step_is_its_wait_and_its_compute_and_limits_and_machine_are_of_what_was_measured(folder) -> None:
    (line,) = bench(folder, "--scenario", "on-demand", "--k", 3, "--read-mode", "pread", *SHORT)
    assert (line["k"], line["routing"], line["routing_is_simulated"]) == (3, "model", False)
    assert knows_its_machine(line)
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
@pytest.mark.parametrize("read_mode", ["pread", "mmap"])
def test_cold_steps_begin_without_what_the_raw_reads_left_in_the_page_cache(tmp_path, monkeypatch, read_mode) -> None:
    made = build(tmp_path, RECIPE)
    os.sync()
    cached = []

    def decoding(running, token, count, advance=None):
        cached.append(cached_bytes(running.files()))
        return decode(running, token, count, *([advance] if advance else []))

    monkeypatch.setattr(bench_case, "decode", decoding)
    with open_case(Case("on-demand", str(made), read_mode=read_mode, tokens=4), 80, lambda text: None) as running:
        try:
            forget_pages(running.files())
            if cached_bytes(running.files()):
                pytest.skip("this system cannot be asked to drop pages")
        except OSError as error:
            pytest.skip(f"this system does not say what is in its page cache: {error}")
        run_once(running, Measured(1.0), lambda count: None)
    before_blocks = cached[::2]  # a block is a step that is not counted, then those that are
    assert before_blocks == [0] * len(before_blocks)


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
        (["--picture", "spec"], "spec: cannot be written, it is a folder"),
    ],
)
@pytest.mark.spec("ENG-065")
def test_what_cannot_be_measured_is_refused(capsys, folder, arguments, says) -> None:
    done = edge0_here(capsys, "bench", folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.spec("ENG-065", "ENG-077")
def test_a_picture_that_cannot_be_written_is_a_named_error(tmp_path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}: cannot be written"):
        Picture(9.0, 9.0).write(tmp_path)


@pytest.mark.spec("ENG-065", "ENG-071")
def test_nothing_is_called_prefetch_without_heads(capsys, tmp_path) -> None:
    assert "heads" in refusal(edge0_here(capsys, "bench", build(tmp_path, RECIPE), *SHORT))


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
        assert knows_its_machine(line)
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


OWN = {"graph_build_ms_per_token": 1.25, "device_peak_bytes": 3e6}
TELLING = "tests.app.test_bench:TellingBackend"


class TellingDecoder(ReferenceDecoder):
    """The reference's, with figures of its own."""

    def measures(self) -> dict[str, float]:
        return OWN


class TellingBackend(ReferenceBackend):
    """Evaluates one graph a token, and has figures that no other backend has."""

    name = "telling"

    def decoder(self, *arguments: object, **named: object):
        made = super().decoder(*arguments, **named)
        made.__class__ = TellingDecoder
        step = made.step

        def counted(token: int):
            made.counters.evaluations += 1
            return step(token)

        made.step = counted
        return made


@pytest.mark.spec("ENG-079")
@pytest.mark.parametrize(("backend", "evaluations", "own"), [(TELLING, 1, OWN), ("reference", 0, {})])
def test_a_backends_own_figures_are_told(folder, backend, evaluations, own) -> None:
    measured = Measured(memory=1.0)
    with open_case(Case("prefetch", str(folder), backend=backend, prompt_tokens=2), 60, lambda text: None) as running:
        run_once(running, measured, lambda count: None)
        told = figures(running, measured)
    assert (told["evaluations_per_token"], told["measures"]) == (evaluations, own)


@pytest.mark.spec("ENG-079")
def test_a_table_has_a_row_for_each_of_them(folder) -> None:
    done = edge0("bench", folder, "--backend", TELLING, *SHORT[:-1])
    assert json.loads(done.stdout)["measures"] == OWN
    for what, figure in (("evaluations", "1"), ("graph build", "1.25"), ("device peak", "2.86 MiB")):
        (row,) = [row for row in done.stderr.splitlines() if what in row]
        assert f" {figure}" in row
