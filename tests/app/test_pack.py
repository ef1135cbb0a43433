"""`edge0 pack`: resumed where it was interrupted, checked when it is whole, used by itself and told by `inspect`."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edge0_ref.app import pack
from edge0_ref.app.pack import run_pack
from edge0_ref.errors import UsageError
from edge0_ref.packed import SIDECAR
from tests.app.command import edge0_here, refusal
from tests.ref.builders import Recipe, build

RECIPE = Recipe(layers=4, experts=3)
PARTIAL = f"{SIDECAR}.partial"


def silent(text: str) -> None:
    """Nobody is told."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(tmp_path / "model", RECIPE, shards=3)


@pytest.mark.spec("STO-045")
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_packing_goes_on_after_any_interruption_and_ends_in_the_same_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Each run gets five writes: the first a header and a layer of 3 experts and its seal, the others a layer more."""
    write, calls = pack.write_at, [0]
    run_pack(folder, None, silent)
    whole = (folder / SIDECAR).read_bytes()
    (folder / SIDECAR).unlink()

    def failing(descriptor: int, data: memoryview | bytes, offset: int) -> None:
        if calls[0] == 0:
            write(descriptor, memoryview(data)[: len(data) // 2], offset)  # in the middle of it
            raise failure
        calls[0] -= 1
        write(descriptor, data, offset)

    monkeypatch.setattr(pack, "write_at", failing)
    did, runs, stopped = {}, 0, []
    while not did:
        calls[0] = 5  # enough for a layer
        try:
            did = run_pack(folder, None, silent)
        except (KeyboardInterrupt, UsageError) as error:
            stopped.append(str(error))
            assert not (folder / SIDECAR).exists()
            assert (folder / PARTIAL).exists()
        runs += 1
        assert runs <= RECIPE.layers + 1
    assert (did["did"], runs > 2) == ("resumed", True)
    assert all("full" in said for said in stopped) or isinstance(failure, KeyboardInterrupt)
    assert did["bytes_done"] < did["bytes"] == len(whole)
    assert (folder / SIDECAR).read_bytes() == whole
    assert not (folder / PARTIAL).exists()


@pytest.mark.spec("STO-045")
def test_a_part_of_another_checkpoints_sidecar_is_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other", Recipe(layers=4, experts=3, seed=1))
    run_pack(other, None, silent)
    shutil.copy(other / SIDECAR, folder / PARTIAL)
    assert run_pack(folder, None, silent)["did"] == "packed"
    assert run_pack(folder, None, silent)["did"] == "checked"


@pytest.mark.spec("STO-045", "STO-043")
@pytest.mark.parametrize("damage", ["bit", "cut", "other"])
def test_a_second_run_checks_and_makes_a_damaged_file_anew(folder: Path, tmp_path: Path, damage: str) -> None:
    path = folder / SIDECAR
    run_pack(folder, None, silent)
    whole = path.read_bytes()
    match damage:
        case "bit":
            path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        case "cut":
            path.write_bytes(whole[:-1])
        case "other":
            run_pack(build(tmp_path / "other", Recipe(layers=4, experts=3, seed=1)), str(folder), silent)
    told: list[str] = []
    assert run_pack(folder, None, told.append)["did"] == "packed"
    assert len(told) == 1
    assert str(path) in told[0]
    assert path.read_bytes() == whole


@pytest.mark.spec("STO-044")
def test_generate_finds_the_sidecar_and_inspect_tells(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edge0(*arguments: object) -> subprocess.CompletedProcess[str]:
        return edge0_here(capsys, *arguments)

    request = ["generate", folder, "--prompt-ids", "5,6,7", "--max-tokens", 4, "--json"]
    plain = json.loads(edge0(*request).stdout.splitlines()[-1])
    assert json.loads(edge0("inspect", folder, "--json").stdout)["packed"] == {"present": False}
    made = json.loads(edge0("pack", folder, "--out", tmp_path, "--json").stdout)
    assert made["sidecar"] == str(tmp_path / SIDECAR)
    elsewhere = json.loads(edge0(*request, "--packed", tmp_path).stdout.splitlines()[-1])
    os.rename(tmp_path / SIDECAR, folder / SIDECAR)
    for mode in ("mmap", "pread", "direct"):
        beside = json.loads(edge0(*request, "--read-mode", mode).stdout.splitlines()[-1])
        assert beside["token_ids"] == elsewhere["token_ids"] == plain["token_ids"]
        assert (beside["reads"], beside["bytes_read"]) == (plain["reads"], plain["bytes_read"])
    facts = json.loads(edge0("inspect", folder, "--json").stdout)["packed"]
    assert (facts["present"], facts["ranges_an_expert"]) == (True, 1)
    build(folder, Recipe(layers=4, experts=3, seed=1), shards=3)
    assert "other weights" in json.loads(edge0("inspect", folder, "--json").stdout)["packed"]["refused"]
    assert "other weights" in refusal(edge0(*request))
    assert edge0(*request, "--packed", "none").returncode == 0


@pytest.mark.spec("STO-045")
@pytest.mark.parametrize("before", [None, b"damaged"])
def test_a_link_in_the_sidecar_s_place_stays_one_and_what_it_leads_to_is_written(folder, tmp_path, before) -> None:
    elsewhere = tmp_path / "other disk"
    elsewhere.mkdir()
    if before is not None:
        (elsewhere / "packed").write_bytes(before)
    (folder / SIDECAR).symlink_to(elsewhere / "packed")
    assert run_pack(folder, None, silent)["did"] == "packed"
    assert (folder / SIDECAR).is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["packed"]
    assert run_pack(folder, None, silent)["did"] == "checked"


@pytest.mark.spec("STO-042", "ENG-065")
def test_what_cannot_be_packed_or_used_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere" in refusal(edge0_here(capsys, "pack", "nowhere"))
    assert "nowhere" in refusal(edge0_here(capsys, "pack", folder, "--out", "nowhere"))
    assert "edge0 pack" in refusal(edge0_here(capsys, "generate", folder, "--prompt-ids", "5", "--packed", tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UsageError, match=r"needs .* \(\d+ bytes\), the disk has 1000 B free"):
        run_pack(folder, None, silent)
    with (
        pack.writing(folder / PARTIAL),
        pytest.raises(UsageError, match="another process"),
    ):
        run_pack(folder, None, silent)


@pytest.mark.spec("STO-045", "ENG-065")
def test_a_folder_that_cannot_be_written_names_the_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return opener(path, flags, *mode)

    opener = os.open
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UsageError, match=r"Read-only file system; --out DIR puts the file elsewhere"):
        pack.run_pack(folder, None, silent)


@pytest.mark.spec("STO-042", "ENG-065")
def test_a_sidecar_that_this_user_may_not_read_is_no_stale_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pack(folder, None, silent)
    before = (folder / SIDECAR).stat()
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder / SIDECAR)
    with pytest.raises(UsageError, match=f"{SIDECAR}: cannot be read by this user"):
        run_pack(folder, None, silent)
    assert (folder / SIDECAR).stat() == before


@pytest.mark.spec("STO-045", "ENG-065")
def test_a_folder_in_place_of_the_file_that_grows_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / PARTIAL).mkdir()
    assert f"{folder / PARTIAL}: cannot be written: " in refusal(edge0_here(capsys, "pack", folder))
