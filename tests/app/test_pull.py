"""`edge0 pull` against a hub on loopback: whole, interrupted, damaged, refused; what is here in the end runs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from edge0_ref.adapter_headers import BESIDE_A_MODEL
from edge0_ref.app import open_model
from edge0_ref.app import pull as command
from edge0_ref.app.locate import TIERS, locate
from edge0_ref.app.pull import run_pull
from edge0_ref.errors import CheckpointError, UnsupportedModelError, UsageError
from tests.app.command import ROOT, edge0
from tests.app.hub import COMMIT, Hub, serving
from tests.ref.builders import Recipe, build, build_adapters

FIXTURE = ROOT / "tests" / "data" / "qwen_mlx4"
WEIGHTS = "model.safetensors"
CUT = 750_000  # bytes after which a connection breaks
KEPT = 700_000  # of them: the hub's downloader hands on whole pieces
UNWANTED = {"README.md": b"# A model\n", "film.mp4": b"film", "modeling_x.py": b"raise SystemExit", "../x.json": b"{}"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    fixture = {name: content for name, content in contents(FIXTURE).items() if name != "expected.safetensors"}
    tier = build(tmp_path / "tier", Recipe(layers=3), shards=2)
    build_adapters(tmp_path / "heads", Recipe(layers=3), [0, 1], {})
    heads = next((tmp_path / "heads").iterdir()).read_bytes()
    published = {**contents(tier), "prerouter_edge0_35b.safetensors": heads}
    repositories = {"some/model": {**fixture, **UNWANTED}, TIERS["edge0-35b"].repository: published}
    with serving(Hub(repositories)) as running:
        yield running


def pull(hub: Hub, cache: Path, name: str = "some/model", **options: bool) -> dict[str, object]:
    return run_pull(name, lambda text: None, hub=cache, endpoint=hub.endpoint, **options)


def refusal(hub: Hub, cache: Path, name: str = "some/model") -> str:
    with pytest.raises(UsageError) as refused:
        pull(hub, cache, name)
    return str(refused.value)


def partials(cache: Path) -> list[int]:
    return [path.stat().st_size for path in cache.rglob("*.incomplete")]


@pytest.mark.spec("ENG-096")
def test_a_pulled_model_is_the_hubs_files_and_no_others(hub, tmp_path) -> None:
    did = pull(hub, tmp_path / "cache")
    held = hub.repositories["some/model"]
    wanted = {name: content for name, content in held.items() if name not in UNWANTED}
    folder = Path(str(did["folder"]))
    assert contents(folder) == wanted
    assert did["bytes"] == did["bytes_downloaded"] == sum(map(len, wanted.values()))
    assert (did["commit"], did["files"], partials(tmp_path / "cache")) == (COMMIT, len(wanted), [])
    assert locate("some/model", tmp_path / "cache").folder == folder
    assert all(path.is_symlink() and not os.path.isabs(path.readlink()) for path in folder.iterdir())


@pytest.mark.spec("ENG-096")
def test_what_is_here_is_not_downloaded_again(hub, tmp_path) -> None:
    pull(hub, tmp_path)
    hub.asked.clear()
    assert pull(hub, tmp_path)["bytes_downloaded"] == 0
    assert hub.asked == []


@pytest.mark.spec("ENG-096")
def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub, tmp_path) -> None:
    hub.cut[WEIGHTS] = CUT
    pull(hub, tmp_path)
    assert [first for name, first in hub.asked if name == WEIGHTS] == [0, KEPT]
    assert locate("some/model", tmp_path)


@pytest.mark.spec("ENG-095", "ENG-096")
def test_another_run_goes_on_where_one_ended_and_nothing_loads_in_between(hub, tmp_path) -> None:
    hub.cut[WEIGHTS], hub.ill[WEIGHTS] = CUT, 500
    said = refusal(hub, tmp_path)
    assert "500" in said
    assert "goes on" in said
    assert partials(tmp_path) == [KEPT]
    with pytest.raises(CheckpointError, match=f"without {WEIGHTS}.*edge0 pull some/model"):
        locate("some/model", tmp_path)
    hub.ill.clear()
    hub.asked.clear()
    size = len(hub.repositories["some/model"][WEIGHTS])
    assert pull(hub, tmp_path)["bytes_downloaded"] == size - KEPT
    assert hub.asked == [(WEIGHTS, KEPT)]


@pytest.mark.spec("ENG-096")
def test_another_content_of_the_same_size_is_refused_and_thrown_away(hub, tmp_path) -> None:
    content = bytearray(hub.repositories["some/model"][WEIGHTS])
    content[-1] ^= 1
    hub.other[WEIGHTS] = bytes(content)
    assert WEIGHTS in refusal(hub, tmp_path)
    assert partials(tmp_path) == []
    with pytest.raises(CheckpointError):
        locate("some/model", tmp_path)
    hub.other.clear()
    assert pull(hub, tmp_path)


@pytest.mark.spec("ENG-096")
@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_that_was_damaged_here_is_found_and_downloaded_again(hub, tmp_path, name) -> None:
    folder = Path(str(pull(hub, tmp_path)["folder"]))
    content = hub.repositories["some/model"][name]
    (folder / name).resolve().write_bytes(content[:-1] + b"?")
    assert pull(hub, tmp_path)["bytes_downloaded"] == len(content)
    assert (folder / name).read_bytes() == content


@pytest.mark.spec("ENG-065", "ENG-096")
@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (401, "", "401"),
        (401, "RepoNotFound", "shows it only after"),
        (401, "GatedRepo", "gated"),
        (403, "", "403"),
        (403, "GatedRepo", "gated"),
        (404, "RepoNotFound", "no such repository"),
        (503, "", "503"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(hub, tmp_path, status, code, says) -> None:
    hub.refused["some/model"] = status, code
    assert says in refusal(hub, tmp_path)
    assert not (tmp_path / "models--some--model").exists()


@pytest.mark.spec("ENG-065", "ENG-096")
@pytest.mark.parametrize("name", ["model", "../model", "a/b/c", "-a/b", ""])
def test_what_is_no_name_of_a_repository_is_refused(hub, tmp_path, name) -> None:
    assert "OWNER/NAME" in refusal(hub, tmp_path, name)


@pytest.mark.spec("ENG-065", "ENG-096")
@pytest.mark.parametrize("name", ["a--b/c", "a..b/c", f"{'o' * 97}/c"])
def test_names_that_the_hub_itself_forbids_are_refused(hub, tmp_path, name) -> None:
    assert f"{name}: no name that the hub could have" in refusal(hub, tmp_path, name)


@pytest.mark.spec("ENG-065", "ENG-096")
def test_a_hub_that_is_not_there_is_named(tmp_path) -> None:
    with serving(Hub({})) as gone:
        pass
    assert "cannot be reached" in refusal(gone, tmp_path)


@pytest.mark.spec("ENG-096")
def test_a_disk_too_small_is_found_before_anything_is_downloaded(hub, tmp_path, monkeypatch) -> None:
    usage = command.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    said = refusal(hub, tmp_path)
    assert "1.91 MiB free" in said
    assert hub.asked == []


@pytest.mark.spec("ENG-096")
def test_a_model_that_edge0_does_not_run_is_refused_before_its_weights_come(hub, tmp_path) -> None:
    config = b'{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}'
    hub.repositories = {"some/model": {"config.json": config, WEIGHTS: b"weights"}}
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        pull(hub, tmp_path)
    assert [name for name, _ in hub.asked] == ["config.json"]


@pytest.mark.spec("ENG-095", "ENG-096", "PRE-019")
def test_a_tier_is_one_repository_with_its_adapters(hub, tmp_path) -> None:
    pull(hub, tmp_path, "edge0-35b")
    located = locate("edge0-35b", tmp_path)
    assert located.adapters == located.folder
    with open_model(located.folder) as model:
        assert sorted(model.adapters.heads) == [0, 1]


@pytest.mark.spec("ENG-096")
def test_adapters_alone_can_be_pulled(hub, tmp_path) -> None:
    did = pull(hub, tmp_path, "edge0-35b", adapters_only=True)
    assert [path.name for path in Path(str(did["folder"])).iterdir()] == ["prerouter_edge0_35b.safetensors"]
    assert all(Path(name).match(BESIDE_A_MODEL[1]) for name, _ in hub.asked)


@pytest.mark.spec("ENG-065", "ENG-095", "ENG-096", "ENG-097")
def test_the_commands_find_what_was_pulled(hub, tmp_path, monkeypatch) -> None:
    """As a user runs them: the hub's own variables say where it is and where it keeps things."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    pulled = edge0("pull", "some/model", "--json")
    assert pulled.returncode == 0, pulled.stderr
    assert WEIGHTS in pulled.stderr
    assert '"bytes_downloaded"' in pulled.stdout.splitlines()[-1]
    made = edge0("generate", "some/model", "--prompt-ids", "5,6", "--max-tokens", 2, "--json")
    assert made.returncode == 0, made.stderr
    listed = edge0("models")
    assert listed.returncode == 0
    (row,) = [line for line in listed.stderr.splitlines() if "some/model" in line]
    assert "complete" in row
    absent = edge0("generate", "some/other", "--prompt-ids", "5")
    assert absent.returncode == 2
    assert f"not in {tmp_path / 'cache'}; `edge0 pull some/other`" in absent.stderr
