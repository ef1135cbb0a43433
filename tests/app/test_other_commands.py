"""`edge0 logits`, `inspect` and `step`."""

import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge0_ref.app import open_model
from tests.app.command import ROOT, edge0_here, refusal
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, experts=8, top_k=2, extras=True)
LORA = {"language_model.model.layers.0.mlp.shared_expert.up_proj": (64, 64)}


@pytest.mark.spec("ENG-062")
def test_logits_are_those_of_mlx_lm(capsys, tmp_path) -> None:
    folder = ROOT / "tests" / "data" / "qwen_mlx4"
    expected = load_file(folder / "expected.safetensors")
    ids = expected["token_ids"].tolist()
    out = tmp_path / "out.safetensors"
    done = edge0_here(capsys, "logits", folder, "--prompt-ids", ",".join(map(str, ids)), "--out", out)
    assert done.returncode == 0, done.stderr
    written = load_file(out)
    assert written["logits"].dtype == np.float32
    assert written["token_ids"].tolist() == ids
    assert np.abs(written["logits"] - expected["logits_full"]).max() <= 2.5e-4
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


@pytest.mark.spec("ENG-062")
def test_logits_that_cannot_be_written_whole_leave_what_was_there(tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")

    def half(tensors, file) -> None:
        file.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("edge0_ref.app.logits.save_file", half)
    assert "the disk is full" in refusal(edge0_here(capsys, "logits", "--prompt-ids", "5", "--out", out))
    assert (out.read_bytes(), list(tmp_path.iterdir())) == (b"before", [out])


@pytest.mark.spec("ENG-062")
@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe", "looping link"])
def test_logits_take_the_place_of_nothing_but_a_file(tmp_path, capsys, kind) -> None:
    out, pipe = tmp_path / "out.safetensors", tmp_path / "pipe"
    os.mkfifo(pipe)
    match kind:
        case "folder":
            out.mkdir()
        case "pipe":
            out = pipe
        case "link to a pipe":
            out.symlink_to(pipe)
        case "looping link":
            out.symlink_to(out)
    before = {path: path.lstat().st_mode for path in tmp_path.iterdir()}
    assert f"{out}: cannot be written" in refusal(edge0_here(capsys, "logits", "--prompt-ids", "5", "--out", out))
    assert {path: path.lstat().st_mode for path in tmp_path.iterdir()} == before


@pytest.mark.spec("ENG-062")
def test_a_link_to_logits_stays_one_and_modes_are_as_those_of_any_file(tmp_path, capsys) -> None:
    link, out, other = (tmp_path / name for name in ("link", "out.safetensors", "other"))
    link.symlink_to(out)
    for asked in (link, link):
        assert edge0_here(capsys, "logits", "--prompt-ids", "5", "--out", asked).returncode == 0
        other.touch()
        assert (link.readlink(), out.stat().st_mode) == (out, other.stat().st_mode)
        assert load_file(out)["token_ids"].tolist() == [5]
        out.chmod(0o640)  # is kept
        other.chmod(0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "other", "out.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = build(tmp_path_factory.mktemp("model"), RECIPE, shards=3)
    build_adapters(made / "adapters", RECIPE, [0, 2], LORA)
    return str(made)


@pytest.mark.spec("ENG-063", "PRE-018")
def test_inspect_tells_what_the_folder_holds(capsys, folder) -> None:
    done = edge0_here(capsys, "inspect", folder, "--json")
    facts = json.loads(done.stdout)
    matrix = RECIPE.inner * RECIPE.hidden  # elements
    expert = 3 * matrix // 2 + 3 * 2 * 2 * matrix // RECIPE.group_size  # int4 codes, two bfloat16 a group
    assert facts["experts"]["bytes_per_expert"] == expert
    assert facts["experts"]["bytes_per_token"] == expert * RECIPE.top_k * RECIPE.layers
    assert facts["architecture"]["layers"] == RECIPE.layers
    assert facts["quantization"]["default"] == f"4 bits in groups of {RECIPE.group_size}"
    overrides = {"mlp.gate": RECIPE.layers, "mlp.shared_expert_gate": RECIPE.layers}
    assert facts["quantization"]["overrides"] == {f"8 bits in groups of {RECIPE.group_size}": overrides}
    assert len(facts["files"]["shards"]) == 3
    assert facts["skipped"]["tensors"] == sum(facts["skipped"]["by_prefix"].values()) > 0
    adapters = facts["adapters"]
    assert (adapters["K"], adapters["owners"], adapters["loras"]) == (2, [0, 2], 1)
    assert (adapters["ranks"], adapters["alpha"], adapters["scales"]) == ([4], 8, [2.0])


@pytest.mark.spec("ENG-063")
def test_inspect_tells_people_the_same(capsys, folder) -> None:
    facts = json.loads(edge0_here(capsys, "inspect", folder, "--json").stdout)
    shown = edge0_here(capsys, "inspect", folder).stdout
    assert all(name in shown for section in facts.values() for name in section)
    assert f"{facts['experts']['bytes_per_expert']:,}" in shown


@pytest.mark.spec("ENG-063")
def test_inspect_without_adapters_does_not_open_them(capsys, folder) -> None:
    assert json.loads(edge0_here(capsys, "inspect", folder, "--no-adapters", "--json").stdout)["adapters"] == {
        "present": False
    }


@pytest.mark.spec("ENG-064")
@pytest.mark.parametrize(("layer", "source"), [(1, "predicted one token ago"), (2, "router")])
def test_step_shows_the_routing_that_is_executed(capsys, folder, layer, source) -> None:
    """Layers 0 and 2 own heads, so layers 1 and 3 consume predictions."""
    done = edge0_here(capsys, "step", folder, "--prompt-ids", "5,6,7", "--layer", layer)
    assert done.returncode == 0, done.stderr
    seen = {}
    with open_model(folder, observe=lambda point, at, value: seen.update({(point, at): value})) as model:
        text = model.generate([5, 6, 7], 2)
        first = next(text).token_id
        next(text)
    routing = seen["routing", layer]
    line = next(line for line in done.stdout.splitlines() if line.split()[0] == "routing")
    chosen = [(int(expert), float(weight)) for expert, weight in re.findall(r"(\d+): ([\d.]+)", line)]
    pairs = zip(routing.experts[-1].tolist(), routing.weights[-1].tolist(), strict=True)
    assert chosen == [(expert, round(weight, 4)) for expert, weight in pairs]
    assert source in line
    assert done.stdout.startswith(f"token {first} ")
    assert "0 dropped" in done.stdout
    resident = next(line for line in done.stdout.splitlines() if line.split()[0] == "resident")
    assert {expert for expert, _ in chosen} <= {int(number) for number in re.findall(r"\d+", resident)[1:]}
