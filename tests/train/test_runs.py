"""Runs: what stops them, how they go on, what they leave, and what they refuse."""

import errno
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.adapters import adapters_of
from edge0_ref.app import blas, train_files
from edge0_ref.app.cli import leave
from edge0_ref.app.train import open_teacher, run_stage, run_stages
from edge0_ref.app.train_text import Corpus
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.errors import AdapterError, BackendError, NonFiniteError, UsageError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.training import STAGES
from tests.ref.builders import Recipe, build
from tests.train.conftest import SETTINGS, MakeJob
from tests.train.numpy_trainer import SumStage


@pytest.fixture
def stopped(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """Jobs of a run that Ctrl-C ended before its last step."""
    monkeypatch.setattr(SumStage, "interrupted_at", SETTINGS.steps - 1)
    with pytest.raises(KeyboardInterrupt):
        run_stage(job(), SETTINGS)
    monkeypatch.setattr(SumStage, "interrupted_at", None)
    return job


def changed_copy(base: Checkpoint, tensor: str, folder: Path) -> Path:
    """The same model but for the lowest bits of the first bytes of one tensor."""
    folder.mkdir()
    for path in base.folder.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    info = base.info(tensor)
    with (folder / info.path.name).open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(byte ^ 1 for byte in base.read(tensor).tobytes()[:8]))
    return folder


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.spec("TRN-004")
@pytest.mark.parametrize("stop", range(1, SETTINGS.steps))
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Stopped like a process that is killed: nothing but the files of the last checkpoint is left."""
    monkeypatch.setattr("edge0_ref.app.train.STEPS_A_CHECKPOINT", stop)
    run_stages(job(out=tmp_path / "whole"), [SETTINGS])
    save = train_files.RunFolder.save

    def save_and_die(self: train_files.RunFolder, *arguments: object) -> None:
        save(self, *arguments)  # type: ignore[arg-type]
        raise MemoryError("killed")

    monkeypatch.setattr(train_files.RunFolder, "save", save_and_die)
    with pytest.raises(MemoryError):
        run_stage(job(), SETTINGS)
    monkeypatch.setattr(train_files.RunFolder, "save", save)
    told: list[str] = []
    run_stages(job(tell=told.append), [SETTINGS])
    assert told[0] == f"heads: going on after step {stop} of {SETTINGS.steps}"
    assert written(tmp_path / "run" / "heads") == written(tmp_path / "whole" / "heads")
    assert not list((tmp_path / "run").glob("*.checkpoint*"))


@pytest.mark.spec("TRN-004")
def test_a_run_that_was_stopped_trains_no_stage_twice(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [replace(SETTINGS, stage=stage) for stage in STAGES]
    run_stages(job(out=tmp_path / "whole"), stages)
    step, trained = SumStage.step, list[tuple[str, int]]()

    def dies_in_the_last(self: SumStage, number: int) -> float:
        trained.append((self.settings.stage, number))
        if len(trained) == len(stages) * SETTINGS.steps:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(SumStage, "step", dies_in_the_last)
    with pytest.raises(KeyboardInterrupt):
        run_stages(job(), stages)
    run_stages(job(), stages)
    assert trained == [*((stage, n) for stage in STAGES for n in range(SETTINGS.steps)), ("opd", SETTINGS.steps - 1)]
    for stage in STAGES:
        assert written(tmp_path / "run" / stage) == written(tmp_path / "whole" / stage)
    assert not list((tmp_path / "run").glob("*.checkpoint*"))


@pytest.mark.spec("TRN-004")
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_every_window_is_read_once_before_any_is_read_again(count: int, size: int, seed: int) -> None:
    corpus = Corpus(np.arange(count)[:, None], 1.0, "")
    steps = count // min(size, count)
    read = [corpus.batch(step, size, (seed,)) for step in range(steps)]
    assert len(set(np.concatenate(read).ravel().tolist())) == steps * min(size, count)
    again = [corpus.batch(step, size, (seed,)) for step in range(steps)]
    assert all((one == other).all() for one, other in zip(read, again, strict=True))


@pytest.mark.spec("TRN-005")
def test_a_loss_of_nan_ends_the_run_and_the_last_good_state_is_kept(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumStage, "nan_at", SETTINGS.steps - 1)
    told: list[str] = []
    with pytest.raises(NonFiniteError, match="step 4: the loss is nan"):
        run_stage(job(tell=told.append), SETTINGS)
    assert told[-1] == "heads: stopped after step 4 of 5; the same command goes on from there"
    assert (tmp_path / "run" / "heads.checkpoint.safetensors").exists()
    assert not (tmp_path / "run" / "heads").exists()


@pytest.mark.spec("TRN-004")
def test_ctrl_c_leaves_a_checkpoint(stopped: MakeJob) -> None:
    told: list[str] = []
    run_stage(stopped(tell=told.append), SETTINGS)
    assert told[0] == "heads: going on after step 4 of 5"


@pytest.mark.spec("TRN-006")
@pytest.mark.parametrize(
    ("change", "named"), [({"batch": 3}, "batch was 2, not 3"), ({"learning_rate": 0.5}, "learning_rate was 0.001")]
)
def test_a_checkpoint_of_other_settings_is_refused(stopped: MakeJob, change: dict[str, float], named: str) -> None:
    with pytest.raises(UsageError, match=f"of another run, whose {named}"):
        run_stage(stopped(), replace(SETTINGS, **change))


@pytest.mark.spec("TRN-006")
def test_a_checkpoint_of_other_text_is_refused(stopped: MakeJob, text: Path) -> None:
    text.write_text(text.read_text("utf-8") + "And it came to pass.", "utf-8")
    with pytest.raises(UsageError, match="of another run, whose text was"):
        run_stage(stopped(), SETTINGS)


@pytest.mark.spec("TRN-006")
@pytest.mark.parametrize(
    ("role", "tensor"),
    [
        ("student", lambda base: f"{base.config.tensors.experts[0][0]}.gate_proj.weight"),
        ("teacher", lambda base: base.config.final_norm),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    stopped: MakeJob, tmp_path: Path, role: str, tensor: Callable[[Checkpoint], str]
) -> None:
    base = open_checkpoint(stopped().student)
    changed = changed_copy(base, tensor(base), tmp_path / "changed")
    with pytest.raises(UsageError, match=f"of another run, whose {role} was"):
        run_stage(stopped(**{role: changed}), SETTINGS)


@pytest.mark.spec("TRN-006")
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"layers": 5}, "number of layers is 5, the student's 4"),
        ({"experts": 8}, "routed experts is"),
        ({"hidden": 128}, "hidden size is 128, the student's 64"),
    ],
)
def test_a_teacher_of_other_sizes_is_refused(tmp_path: Path, other: dict[str, int], named: str) -> None:
    student = open_checkpoint(build(tmp_path / "student", Recipe(layers=4, experts=4, hidden=64)))
    teacher = build(tmp_path / "teacher", replace(Recipe(layers=4, experts=4, hidden=64), **other))
    with pytest.raises(UsageError, match=f"no teacher of .*: {named}"):
        open_teacher(teacher, student)


@pytest.mark.spec("TRN-006")
def test_a_teacher_of_another_model_is_refused(job: MakeJob, tmp_path: Path) -> None:
    other = build(tmp_path / "other", Recipe())
    with pytest.raises(UsageError, match=r"no teacher of .*: vocabulary is \d+, the student's 1024"):
        run_stage(job(teacher=other), SETTINGS)


@pytest.mark.spec("TRN-006")
def test_a_file_that_is_no_checkpoint_is_refused(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "heads.checkpoint.safetensors").write_bytes(b"not one")
    with pytest.raises(UsageError, match=r"not a checkpoint of edge0 train .*; remove it to start anew"):
        run_stage(job(), SETTINGS)


@pytest.mark.spec("TRN-007")
def test_adapters_say_what_they_were_made_from(job: MakeJob, tmp_path: Path) -> None:
    run_stage(job(), SETTINGS)
    run_stage(job(), replace(SETTINGS, stage="sft", first_consumer=3))
    opened = adapters_of(open_checkpoint(job().student), tmp_path / "run" / "sft")
    told = opened.metadata
    assert (told["K"], told["r"], told["alpha"], told["stage"], told["steps"], told["seed"]) == (
        4,
        2,
        32.0,
        "sft",
        5,
        0,
    )
    assert told["owners"] == [2, 3, 4, 5, 6] == sorted(opened.heads)
    assert set(told["versions"]) == {"edge0", "numpy"}
    assert all(len(told[name]) == 64 for name in ("base", "text"))
    assert next(iter(opened.loras.values())).scale == 16.0


@pytest.mark.spec("TRN-007")
def test_a_lora_that_goes_on_tells_the_scale_it_began_with(job: MakeJob, tmp_path: Path) -> None:
    run_stage(job(), SETTINGS)
    run_stage(job(), replace(SETTINGS, stage="sft", rank=4, alpha=8.0))
    run_stage(job(), replace(SETTINGS, stage="opd"))
    opened = adapters_of(open_checkpoint(job().student), tmp_path / "run" / "opd")
    assert (opened.metadata["r"], opened.metadata["alpha"]) == (4, 8.0)
    assert {lora.scale for lora in opened.loras.values()} == {2.0}


@pytest.mark.spec("TRN-007")
def test_adapters_of_another_base_are_refused(job: MakeJob, tmp_path: Path) -> None:
    """The same geometry, other weights: one expert's bytes differ."""
    run_stage(job(), SETTINGS)
    base = open_checkpoint(job().student)
    tensor = f"{base.config.tensors.experts[0][0]}.gate_proj.weight"
    changed = changed_copy(base, tensor, tmp_path / "changed")
    with pytest.raises(AdapterError, match="trained on the base"):
        adapters_of(open_checkpoint(changed), tmp_path / "run" / "heads")


def test_a_stage_wants_the_one_before_it(job: MakeJob) -> None:
    with pytest.raises(UsageError, match=r"`edge0 train heads --out .*` makes it"):
        run_stage(job(), replace(SETTINGS, stage="sft"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 tokens of text, wanted at least one window of 16"),
        (b"In the beginning", "tokens of text, wanted at least one window of 16"),
        (b"In the beginning \xff", "not UTF-8 at byte 17"),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(job: MakeJob, text: Path, content: bytes, named: str) -> None:
    text.write_bytes(content)
    with pytest.raises(UsageError, match=named):
        run_stage(job(), SETTINGS)


def test_text_that_is_not_there_is_refused(job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        run_stage(job(text=tmp_path / "none.txt"), SETTINGS)


def test_a_folder_of_text_is_its_files_in_order(job: MakeJob, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    whole = text.read_text("utf-8")
    chapters = whole.split("\f")
    for number, chapter in enumerate(chapters):
        (folder / f"{number}.txt").write_text(chapter, "utf-8")
    run_stage(job(), SETTINGS)
    run_stage(job(text=folder, out=tmp_path / "other"), SETTINGS)
    one, other = (adapters_of(open_checkpoint(job().student), tmp_path / name / "heads") for name in ("run", "other"))
    assert all((one.heads[owner].fc1 == other.heads[owner].fc1).all() for owner in one.heads)


def test_a_full_disk_is_an_error_that_keeps_the_checkpoint_before(
    stopped: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "heads.checkpoint.safetensors"
    before = path.read_bytes()

    def full(state: object, aside: Path, metadata: object) -> None:
        aside.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_files, "save_file", full)
    with pytest.raises(UsageError, match=r"not written \(No space left on device\); the checkpoint before it is kept"):
        run_stage(stopped(), SETTINGS)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("run/*.partial"))


def test_a_backend_that_cannot_train_is_refused(job: MakeJob) -> None:
    with pytest.raises(BackendError, match="backend reference does not claim 'train'"):
        run_stage(job(backend="reference"), SETTINGS)


@pytest.mark.parametrize(
    ("preloaded", "variable"), [(None, "LD_PRELOAD=/blas.so"), ("a.so", "LD_PRELOAD=a.so:/blas.so")]
)
def test_a_command_starts_again_with_openblas_and_once(monkeypatch, preloaded, variable) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(blas, "find_openblas", lambda: Path("/blas.so"))
    monkeypatch.setattr(blas.platform, "system", lambda: "Linux")
    blas.restart_with_openblas(["train", "all"], preloaded, "3", pytest.fail, lambda _, words: started.append(words))
    ((_, *words),) = started
    assert words[:2] == [variable, "OPENBLAS_NUM_THREADS=3"]
    assert words[-2:] == ["train", "all"]
    blas.restart_with_openblas(["train", "all"], "/libopenblas.so", "3", pytest.fail, pytest.fail)


@pytest.mark.spec("ENG-065", "TRN-004")
def test_a_signal_leaves_a_checkpoint(job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = SumStage.step

    def ended(self: SumStage, number: int) -> float:
        if number == SETTINGS.steps - 1:
            leave(signal.SIGTERM, None)
        return step(self, number)

    monkeypatch.setattr(SumStage, "step", ended)
    with pytest.raises(SystemExit, match="143"):
        run_stage(job(), SETTINGS)
    assert (tmp_path / "run" / "heads.checkpoint.safetensors").exists()
