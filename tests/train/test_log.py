"""The log of a run, and its picture."""

import json
from pathlib import Path

import pytest

from edge0_ref.app import train_files
from edge0_ref.app.train import run_stage
from edge0_ref.errors import UsageError
from tests.train.conftest import SETTINGS, MakeJob


def test_the_log_and_the_picture_hold_every_step(job: MakeJob, tmp_path: Path) -> None:
    run_stage(job(), SETTINGS)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [("heads", step) for step in range(5)]
    assert "heads: loss in nats, 5 steps" in (tmp_path / "run" / "curve.svg").read_text("utf-8")


@pytest.mark.spec("TRN-004")
def test_a_log_that_was_cut_within_a_line_keeps_its_other_lines(job: MakeJob, tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.jsonl"
    log.parent.mkdir()
    log.write_text('{"stage": "lora", "step": 3, "loss": 1.0}\n{"stage": "lora", "step": 4, "lo', "utf-8")
    run_stage(job(), SETTINGS)
    losses = train_files.RunFolder(log.parent).losses()
    assert losses["lora"] == [(3, 1.0)]
    assert [step for step, _ in losses["heads"]] == [*range(SETTINGS.steps)]
    assert (log.parent / "curve.svg").exists()


@pytest.mark.spec("TRN-004")
def test_a_log_that_cannot_be_written_is_named(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "run" / "log.jsonl").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"log\.jsonl: not written: Is a directory"):
        run_stage(job(), SETTINGS)
