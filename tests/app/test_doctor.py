"""`edge0 doctor`: limits follow from what was measured and from headers, and the read mode is remembered and used."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.adapters import open_adapters
from edge0_ref.app import capacity, read_mode
from edge0_ref.app.capacity import Machine, best_mode
from edge0_ref.app.doctor import (
    EXPECTED,
    checkpoint_load,
    expectation,
    facts_of_adapters,
    preset_load,
)
from edge0_ref.app.presets import PRESETS
from edge0_ref.app.probes import BlockReads
from edge0_ref.app.read_mode import MEASURED, default_read_mode, file_system, measured_mode, write_measured
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import READ_MODES, READER_THREADS, ReadMode
from edge0_ref.engine.memory import resident_bytes
from edge0_ref.errors import ReadError
from edge0_ref.inventory import open_checkpoint
from tests.app.command import ROOT, edge0_here, refusal
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, experts=8, top_k=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = build(tmp_path / "model", RECIPE, shards=3)
    build_adapters(made / "adapters", Recipe(layers=4, experts=8, top_k=2), [0, 2], {})
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command line keeps what it measured; and a doctor who is quick."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(capacity, "ENOUGH_BYTES", 2**22)
    monkeypatch.setattr(capacity, "DEPTHS", (1, READER_THREADS))
    return tmp_path / "cache" / "edge0"


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    done = edge0_here(capsys, *arguments)
    assert done.returncode == 0, done.stderr
    held: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return held


@pytest.mark.spec("STO-046")
def test_limits_follow_from_the_measured_rates(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures have three digits, so two of them give a ratio within 1.1 %; no weight is read."""
    inspected = told(capsys, "inspect", folder, "--json")["experts"]
    monkeypatch.setattr(Checkpoint, "read", None)
    facts = told(capsys, "doctor", folder)
    machine, (model,) = facts["machine"], facts["models"]
    assert machine["read_mode"] in READ_MODES
    assert min(machine["memory_gb_s"], machine["raw_disk_gb_s"]) > 0
    computed = {name: rate for name, rate in machine["experts_gb_s"].items() if not isinstance(rate, str)}
    assert {"reference", "numba"} <= {*computed}
    assert model["backend"] == max(computed, key=lambda name: computed[name])
    assert (model["k"], model["bytes_per_token"]) == (2, inspected["bytes_per_token"])
    rates = {"disk": machine["raw_disk_gb_s"], "memory": machine["memory_gb_s"], "kernels": max(computed.values())}
    for name, rate in rates.items():
        nbytes = model["bytes_per_token" if name == "disk" else "bytes_touched_per_token"]
        limit = model[f"limit_{name}_tok_s"]
        assert abs(rate * 1e9 / nbytes / limit - 1) <= 0.011
    unpredicted = model["bytes_unpredicted_per_token"]
    assert 2 * unpredicted == model["bytes_per_token"]  # layers 1 and 3 of 4 are predicted
    disk, kernels = 1 / model["limit_disk_tok_s"], 1 / model["limit_kernels_tok_s"]
    waited = unpredicted / rates["disk"] / 1e9
    expected = EXPECTED / (max(kernels, disk - waited) + waited)
    assert abs(model["predicted_tok_s"] / expected - 1) <= 0.011  # no term of `expected` is off by more than 0.5 %
    assert [path.name for path in folder.iterdir() if "doctor" in path.name] == []


@pytest.mark.parametrize(
    ("name", "layers", "k", "experts", "resident"),
    [("qwen3.6-35b-a3b", 40, 4, 283_115_520, 1.1e9), ("ling-3.0-tiny", 23, 8, 23 * 8 * 1_327_104, 0.41e9)],
)
def test_a_published_model_needs_no_files(name: str, layers: int, k: int, experts: int, resident: float) -> None:
    """35b: 283 MB a token at K = 4; resident is 1.39 GB less the embedding."""
    load = preset_load(name, PRESETS[name], None)
    assert (load.top_k, load.experts) == (k, experts)
    assert preset_load(name, PRESETS[name], 2 * k).experts == 2 * experts
    assert abs(load.resident / resident - 1) < 0.02
    assert load.unpredicted * layers == load.experts * 7  # the first six or seven that route, and the one behind them


@pytest.mark.parametrize("k", [2, 4])
def test_reads_that_nobody_predicts_are_waited_for(folder: Path, k: int) -> None:
    """A model without adapters has no predictions, and takes as long as its compute and its reads together."""
    checkpoint = open_checkpoint(folder)
    heads = facts_of_adapters(checkpoint, folder / "adapters")
    assert (heads.top_k, heads.owners) == (2, {0, 2})
    assert heads.nbytes == open_adapters(folder / "adapters", checkpoint.config).nbytes
    loads = [
        checkpoint_load(checkpoint, k, facts) for facts in (None, heads, replace(heads, owners=frozenset({0, 1, 2})))
    ]
    assert [load.unpredicted * 4 / load.experts for load in loads] == [4, 2, 1]
    assert [load.touched - loads[0].touched for load in loads] == [0, heads.nbytes, heads.nbytes]
    machine = Machine(1e9, {"abacus": 1e9}, {"direct": {4: 1e9}}, "direct", "a disk", "a file")
    told = [expectation(load, machine) for load in loads]
    alone = loads[0]
    assert told[0]["predicted_tok_s"] == pytest.approx(EXPECTED * 1e9 / (alone.touched + alone.experts), rel=0.006)
    assert told[0]["predicted_tok_s"] < told[1]["predicted_tok_s"] < told[2]["predicted_tok_s"]


def test_heads_in_a_models_own_files_predict_too(folder: Path) -> None:
    info = next(iter(open_checkpoint(folder).tensors.values()))
    heads = {f"model.layers.{owner}.mlp.prerouter.fc1.weight": info for owner in (1, 2)}
    baked = replace(open_checkpoint(folder), heads=heads)
    facts = [facts_of_adapters(replace(baked, metadata=metadata), None) for metadata in ({}, {"K": "3"})]
    assert [(each.top_k, each.owners, each.nbytes) for each in facts] == [
        (None, {1, 2}, 2 * info.nbytes),
        (3, {1, 2}, 2 * info.nbytes),
    ]


def test_what_a_token_meets_is_every_weight_but_other_experts_and_other_rows_of_the_embedding(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    load = checkpoint_load(checkpoint, None)
    embedding = checkpoint.config.embedding
    everything = sum(info.nbytes for info in checkpoint.tensors.values())
    looked_up = sum(info.nbytes for name, info in checkpoint.tensors.items() if name.startswith(f"{embedding}."))
    assert load.resident == everything - load.all_experts - looked_up
    assert load.experts * RECIPE.experts == load.all_experts * load.top_k


@pytest.mark.spec("STO-046")
def test_the_mode_is_remembered_for_the_file_system_and_generate_uses_it(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = told(capsys, "doctor", folder)
    assert facts["remembered"] == str(cache / MEASURED)
    held = json.loads((cache / MEASURED).read_text())
    assert held[facts["machine"]["file_system"]]["mode"] == facts["machine"]["read_mode"]
    write_measured(cache, "another disk", {"mode": "pread"})
    request = ["generate", folder, "--prompt-ids", "5,6", "--max-tokens", 2, "--json"]
    room = resident_bytes() + 2**30  # this process may be of any age
    for mode in READ_MODES:
        write_measured(cache, file_system(folder), {"mode": mode})
        assert told(capsys, *request, "--memory", room)["plan"]["read_mode"] == mode
        assert told(capsys, *request)["plan"]["read_mode"] == "pread"  # the page cache can hold all of it
        assert told(capsys, *request, "--read-mode", "mmap")["plan"]["read_mode"] == "mmap"
    assert json.loads((cache / MEASURED).read_text())["another disk"] == {"mode": "pread"}


@pytest.mark.spec("STO-046")
def test_a_file_system_whose_place_has_a_space_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = (tmp_path / "My Passport").resolve()
    place.mkdir()
    device = os.stat(place).st_dev
    escaped = str(place).replace(" ", "\\040")
    mounts = f"36 35 {os.major(device)}:{os.minor(device)} / {escaped} rw shared:1 - ext4 /dev/sdb1 rw\n"
    monkeypatch.setattr(Path, "read_text", lambda path, *encoding, **errors: mounts)
    assert file_system(place) == f"/dev/sdb1 on {place}"


@pytest.mark.spec("STO-046")
@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}', '{"HERE": {"mode": "osmosis"}}', '{"HERE": 7}'])
def test_a_cache_that_says_nothing_is_no_measurement(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / MEASURED).write_text(content.replace("HERE", file_system(folder)))
    assert measured_mode(tmp_path, folder) is None
    assert default_read_mode(open_checkpoint(folder), 2**30, tmp_path) in ("direct", "pread")


@pytest.mark.spec("STO-046")
@pytest.mark.parametrize("measured", [None, *READ_MODES])
@pytest.mark.parametrize("refuses", [True, False])
def test_a_mode_that_is_refused_is_not_the_default(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: ReadMode | None, refuses: bool
) -> None:
    """As on a file system without direct reads."""
    checkpoint = open_checkpoint(folder)
    if measured is not None:
        write_measured(tmp_path, file_system(folder), {"mode": measured})
    monkeypatch.setattr(read_mode, "opens", lambda path, mode: not (refuses and mode == "direct"))
    wanted = measured or "direct"
    expected = "pread" if refuses and wanted == "direct" else wanted
    assert default_read_mode(checkpoint, 2**30, tmp_path) == expected
    monkeypatch.setattr(read_mode, "machine_bytes", lambda: 2**16)
    assert default_read_mode(checkpoint, None, tmp_path) == expected
    monkeypatch.setattr(read_mode, "machine_bytes", lambda: 2**40)
    assert default_read_mode(checkpoint, None, tmp_path) == "pread"


@pytest.mark.spec("STO-046")
def test_the_best_mode_is_the_fastest_or_direct_where_it_is_as_fast() -> None:
    slow, fast = {1: 1.0, READER_THREADS: 1.0}, {1: 1.0, READER_THREADS: 2.0}
    assert best_mode({"mmap": slow, "pread": fast, "direct": slow}) == "pread"
    assert best_mode({"mmap": fast, "pread": slow, "direct": "refused"}) == "mmap"
    assert best_mode({"mmap": fast, "pread": fast, "direct": {1: 0.1, READER_THREADS: 1.95}}) == "direct"
    with pytest.raises(ReadError, match="no read mode works"):
        best_mode({"mmap": "a", "pread": "b", "direct": "c"})


def test_no_block_is_read_twice_and_none_beyond_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * 4096 + 17))
    places: list[int] = []

    class Reader:
        def read_into(self, offset: int, buffer: memoryview) -> None:
            places.append(offset)

        def close(self) -> None:
            pass

    monkeypatch.setattr("edge0_ref.app.probes.open_reader", lambda path, mode: Reader())
    assert BlockReads(path, 4096).rate("pread", depth=2) > 0
    assert sorted(places) == [4096 * place for place in range(10)]


def test_a_read_that_fails_while_measuring_is_told_and_the_other_modes_count(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = BlockReads.rate

    def refusing(reads: BlockReads, mode: ReadMode, depth: int) -> float:
        if mode == "direct":
            raise ReadError("no direct reads here")
        return rate(reads, mode, depth)

    monkeypatch.setattr(BlockReads, "rate", refusing)
    machine = told(capsys, "doctor", folder)["machine"]
    assert machine["disk_gb_s"]["direct"] == "no direct reads here"
    assert machine["read_mode"] != "direct"


def test_a_backend_that_is_not_here_says_why_and_the_others_count(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(backend: Any, layout: Any, top_k: int) -> float:
        if backend.name == "numba":
            raise ValueError("no beads")
        return measured(backend, layout, top_k)

    measured = capacity.kernel_rate
    monkeypatch.setattr(capacity, "kernel_rate", rate)
    monkeypatch.setattr(capacity, "known_backends", lambda: ["abacus", "numba", "reference"])
    facts = told(capsys, "doctor", folder)
    rates = facts["machine"]["experts_gb_s"]
    assert "'abacus' is not known" in rates["abacus"]
    assert rates["numba"] == "fails: ValueError: no beads"
    assert [model["backend"] for model in facts["models"]] == ["reference"]
    for known in (["abacus", "numba"], list[str]()):
        monkeypatch.setattr(capacity, "known_backends", known.copy)
        assert "no backend computes experts here" in refusal(edge0_here(capsys, "doctor", folder))


def test_a_named_backend_is_measured_alone(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(capsys, "doctor", folder, "--backend", "reference")
    assert [*facts["machine"]["experts_gb_s"]] == [model["backend"] for model in facts["models"]] == ["reference"]


def test_without_a_model_the_published_ones_are_told_about(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [model["model"] for model in told(capsys, "doctor")["models"]] == [*PRESETS]
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.write_text("not a folder")
    assert told(capsys, "doctor", folder)["remembered"] is None


@pytest.mark.spec("ENG-065")
@pytest.mark.parametrize(
    ("arguments", "says"), [(["nowhere"], "nowhere"), (["--k", "0"], "--k"), (["--backend", "abacus"], "abacus")]
)
def test_a_wrong_request_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert says in refusal(edge0_here(capsys, "doctor", *arguments))
