"""MODEL: a folder, a tier, or a repository in the hub's cache; and that every way of reading follows its links."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from edge0_ref.adapter_headers import adapter_files, default_adapters
from edge0_ref.app import embedded_model, open_model
from edge0_ref.app.locate import TIERS, locate
from edge0_ref.app.models import find_models
from edge0_ref.app.pack import run_pack
from edge0_ref.contract import READ_MODES
from edge0_ref.errors import CheckpointError, ReadError
from edge0_ref.packed import SIDECAR
from tests.app.command import edge0
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=3)
TIER = TIERS["edge0-35b"]
IDS = [5, 6, 7]


def put(cache: Path, repository: str, folder: Path, commit: str = "1" * 40, *, main: bool = True) -> Path:
    """A folder's files as the hub's cache has them: contents once, links to them under their names."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
        blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    if main:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build(tmp_path / "model", RECIPE, shards=2)


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """Adapters as they are published, beside what they are for."""
    build_adapters(tmp_path / "made", RECIPE, [0], {})
    (tmp_path / "heads").mkdir()
    next((tmp_path / "made").iterdir()).rename(tmp_path / "heads" / "prerouter_edge0_35b.safetensors")
    return tmp_path / "heads"


def refusal(name: str, cache: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        locate(name, cache)
    return str(refused.value)


@pytest.mark.spec("ENG-095")
def test_a_folder_comes_first_and_nothing_is_the_embedded_model(model, tmp_path, monkeypatch) -> None:
    put(tmp_path / "cache", "some/model", build(tmp_path / "other", RECIPE))
    monkeypatch.chdir(tmp_path)
    model.rename(tmp_path / "some")
    (tmp_path / "some" / "model").mkdir()
    assert locate("some/model", tmp_path / "cache").folder == Path("some/model")
    assert locate(None).folder == embedded_model()


@pytest.mark.spec("ENG-095")
@pytest.mark.parametrize("mode", READ_MODES)
def test_a_repository_in_the_cache_is_read_through_its_links_in_every_mode(model, tmp_path, monkeypatch, mode) -> None:
    snapshot = put(tmp_path / "cache", "some/model", model)
    monkeypatch.setattr("edge0_ref.app.locate.hub_cache", lambda: tmp_path / "cache")
    with open_model(model) as opened:
        wanted = opened.logits(IDS)
    try:
        for expected in ("packed", "checked"):
            with open_model("some/model", read_mode=mode) as opened:
                assert opened.checkpoint.folder == snapshot
                assert np.array_equal(opened.logits(IDS), wanted)
            assert run_pack("some/model", None, lambda text: None)["did"] == expected
            assert (snapshot / SIDECAR).exists()
    except ReadError as error:
        pytest.skip(f"this file system has no {mode} reads: {error}")
    with open_model("some/model", read_mode=mode) as opened:
        assert opened.checkpoint.packed == snapshot / SIDECAR
        assert np.array_equal(opened.logits(IDS), wanted)


@pytest.mark.spec("ENG-095")
def test_a_repository_is_what_main_is_and_without_one_the_newest(model, tmp_path) -> None:
    named = put(tmp_path / "cache", "some/model", model, "2" * 40)
    other = put(tmp_path / "cache", "some/model", model, "3" * 40, main=False)
    for older, newer in ((named, other), (other, named)):
        os.utime(older, (1, 1))
        os.utime(newer, (2, 2))
        assert locate("some/model", tmp_path / "cache").folder == named
        (named.parents[1] / "refs" / "main").rename(tmp_path / "main")
        assert locate("some/model", tmp_path / "cache").folder == newer
        (tmp_path / "main").rename(named.parents[1] / "refs" / "main")


@pytest.mark.spec("ENG-095")
def test_a_tier_is_its_own_repository_with_its_adapters(model, heads, tmp_path) -> None:
    (heads / "prerouter_edge0_35b.safetensors").rename(model / "prerouter_edge0_35b.safetensors")
    snapshot = put(tmp_path / "cache", TIER.repository, model)
    located = locate("edge0-35b", tmp_path / "cache")
    assert (located.folder, located.adapters, located.note) == (snapshot, snapshot, "")


@pytest.mark.spec("ENG-095")
def test_a_tiers_adapters_go_with_the_same_weights_from_elsewhere(model, heads, tmp_path, monkeypatch) -> None:
    weights = put(tmp_path / "cache", TIER.bases[0], model)
    assert "edge0 pull edge0-35b" in refusal("edge0-35b", tmp_path / "cache")
    adapters = put(tmp_path / "cache", TIER.repository, heads)
    located = locate("edge0-35b", tmp_path / "cache")
    assert (located.folder, located.adapters) == (weights, adapters)
    monkeypatch.setattr("edge0_ref.app.locate.hub_cache", lambda: tmp_path / "cache")
    notes: list[str] = []
    with open_model("edge0-35b", notify=notes.append) as opened:
        assert sorted(opened.adapters.heads) == [0]
    assert any(TIER.bases[0] in note and TIER.repository in note for note in notes)


@pytest.mark.spec("ENG-065", "ENG-095")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "edge0-35b, edge0-8b"),
        ("./some/model", "no such folder"),
        ("some/model", "edge0 pull some/model"),
        ("edge0-8b", "edge0 pull edge0-8b"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_with_where_was_looked(tmp_path, name, says) -> None:
    said = refusal(name, tmp_path)
    assert name in said
    assert says in said
    if "pull" in said:
        assert str(tmp_path) in said


@pytest.mark.spec("ENG-095")
def test_weights_that_lack_a_file_are_refused_by_its_name(model, tmp_path) -> None:
    snapshot = put(tmp_path / "cache", "some/model", model)
    last = sorted(snapshot.glob("*.safetensors"))[-1]
    last.resolve().unlink()  # a link to nothing is left
    said = refusal("some/model", tmp_path / "cache")
    assert last.name in said
    assert "edge0 pull some/model" in said


@pytest.mark.spec("PRE-019")
def test_adapters_beside_a_models_weights_are_known_by_their_names(model, heads, tmp_path) -> None:
    assert default_adapters(model) is None
    adapters = heads / "prerouter_edge0_35b.safetensors"
    assert adapter_files(heads) == [adapters]
    beside = adapters.rename(model / adapters.name)
    assert (default_adapters(model), adapter_files(model)) == (model, [beside])
    with open_model(model) as opened:
        assert sorted(opened.adapters.heads) == [0]
    build_adapters(model / "adapters", RECIPE, [1], {})
    with open_model(model) as opened:
        assert sorted(opened.adapters.heads) == [1]


@pytest.mark.spec("ENG-097")
def test_models_tells_what_is_here_and_what_gets_the_rest(model, tmp_path) -> None:
    put(tmp_path, "some/model", model)
    snapshot = put(tmp_path, TIER.repository, model)
    sorted(snapshot.glob("*.safetensors"))[0].unlink()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "mamba"}')
    put(tmp_path, "some/mamba", tmp_path / "foreign")
    found = {one.name: one for one in find_models(tmp_path)}
    assert [*found] == ["(none)", "edge0-35b", "edge0-8b", "some/model"]
    assert found["(none)"].folder == str(embedded_model())
    assert (found["some/model"].state, found["some/model"].command) == ("complete", None)
    assert found["some/model"].nbytes == sum(path.stat().st_size for path in model.iterdir())
    assert found["edge0-35b"].state == "incomplete: 1 file missing"
    assert found["edge0-35b"].command == "edge0 pull edge0-35b"
    assert (found["edge0-8b"].state, found["edge0-8b"].nbytes) == ("not here", 0)


@pytest.mark.spec("ENG-065", "ENG-095")
@pytest.mark.parametrize("command", ["generate", "logits", "inspect", "step", "doctor", "pack", "bench", "trace"])
def test_every_command_looks_in_the_same_places(tmp_path, command, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    options = {"trace": ["--out", str(tmp_path / "x.json")], "logits": ["--out", str(tmp_path / "x.safetensors")]}
    if command in ("generate", "logits", "step"):
        options[command] = [*options.get(command, []), "--prompt-ids", "5"]
    done = edge0(command, "some/model", *options.get(command, []))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"not in {tmp_path}; `edge0 pull some/model`" in done.stderr.splitlines()[-1]
