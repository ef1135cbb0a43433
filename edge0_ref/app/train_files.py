"""What a training run leaves in its folder: a checkpoint to go on from, a log, adapters, a picture.

RUN/<stage>/heads.safetensors, lora.safetensors    adapters, for --adapters RUN/<stage>
RUN/<stage>.checkpoint.safetensors                 until all stages of the command are done
RUN/log.jsonl, RUN/curve.svg                       loss of every step
"""

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from edge0_ref.app.picture import COMPUTE, EXPERTS, INK, READ, Picture
from edge0_ref.data import Array
from edge0_ref.errors import CheckpointError, UsageError
from edge0_ref.json_files import parse_object
from edge0_ref.safetensors_header import read_header
from edge0_ref.training import STAGES, TrainSettings

COLORS: dict[str, str] = dict(zip(STAGES, (READ, COMPUTE, EXPERTS), strict=True))


@dataclass(frozen=True)
class Run:
    """What makes a stage's result what it is; a checkpoint of any other is refused."""

    settings: TrainSettings
    student: str
    teacher: str
    text: str
    adapters: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class RunFolder:
    """The files of one run. Everything that is written is complete or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror or error}") from None

    def stage_folder(self, stage: str) -> Path:
        return self.folder / stage

    def _checkpoint(self, stage: str) -> Path:
        return self.folder / f"{stage}.checkpoint.safetensors"

    def save(self, run: Run, done: int, state: Mapping[str, Array]) -> None:
        """[TRN-004] Steps done, and the state after the last. Raises UsageError when the disk is full."""
        path = self._checkpoint(run.settings.stage)
        metadata = {"run": json.dumps(run.as_json(), sort_keys=True), "done": str(done)}
        aside = path.with_name(f"{path.name}.partial")
        try:
            save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, aside, metadata)
            aside.replace(path)
        except Exception as error:  # safetensors has an error of its own
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{path}: not written ({reason}); the checkpoint before it is kept") from None
        finally:
            aside.unlink(missing_ok=True)

    def resume(self, run: Run) -> tuple[int, dict[str, Array]] | None:
        """[TRN-006] What `save` left, or None. Raises UsageError for one of another run, naming what differs."""
        path = self._checkpoint(run.settings.stage)
        if not path.exists():
            return None
        try:
            _, metadata = read_header(path)
            told, done = parse_object(metadata.get("run", "").encode(), f"{path}: the metadata"), int(metadata["done"])
            state = load_file(path)
        except (CheckpointError, KeyError, ValueError) as error:
            raise UsageError(f"{path}: not a checkpoint of edge0 train ({error}); remove it to start anew") from None
        here = run.as_json()
        for name, value in {**here.pop("settings"), **here}.items():
            was = told.get("settings", {}).get(name, told.get(name))
            if was != value:
                raise UsageError(f"{path}: of another run, whose {name} was {was}, not {value}; --out another folder")
        return done, state

    def forget(self, stage: str) -> None:
        self._checkpoint(stage).unlink(missing_ok=True)

    def note(self, entry: Mapping[str, Any]) -> None:
        """A line of the log, below one that a run which was killed, or a full disk, may have cut. Raises UsageError."""
        path = self.folder / "log.jsonl"
        try:
            with path.open("ab+") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 1))
                cut = log.read(1) not in (b"", b"\n")
                log.write(b"\n" * cut + json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise UsageError(f"{path}: not written: {error.strerror}") from None

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """Stage -> (step, loss); of a step that was done twice, the last. A line that was cut tells nothing."""
        found: dict[str, dict[int, float]] = {}
        path = self.folder / "log.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(ValueError):
                entry = json.loads(line)
                found.setdefault(entry["stage"], {})[entry["step"]] = entry["loss"]
        return {stage: sorted(steps.items()) for stage, steps in found.items()}

    def draw(self) -> None:
        """The learning curves, one below the other."""
        curves = self.losses()
        width, height, left = 640.0, 180.0, 60.0
        picture = Picture(width + left + 20, 20 + height * len(curves))
        for row, (stage, points) in enumerate(curves.items()):
            draw_curve(picture, (left, 20 + row * height, width, height - 50), stage, points)
        picture.write(self.folder / "curve.svg")


def draw_curve(
    picture: Picture, place: tuple[float, float, float, float], stage: str, points: list[tuple[int, float]]
) -> None:
    """Each step's loss in its stage's color, and the mean of the steps around it in ink."""
    left, top, width, height = place
    values = np.array([loss for _, loss in points])
    low, high, last = float(values.min()), float(values.max()), max(points[-1][0], 1)
    span = high - low or 1.0

    def at(step: int, loss: float) -> tuple[float, float]:
        return left + width * step / last, top + height * (high - loss) / span

    reach = max(1, len(values) // 40)
    smooth = [float(values[max(0, i - reach) : i + reach + 1].mean()) for i in range(len(values))]
    for heights, color, weight in ((values.tolist(), COLORS.get(stage, INK), 1.0), (smooth, INK, 1.5)):
        places = [at(step, loss) for (step, _), loss in zip(points, heights, strict=True)]
        for (x1, y1), (x2, y2) in itertools.pairwise(places):
            picture.line(x1, y1, x2, y2, color, weight)
    picture.text(left, top - 6, f"{stage}: loss in nats, {len(points)} steps")
    picture.text(left - 6, top + 10, f"{high:.3f}", anchor="end")
    picture.text(left - 6, top + height, f"{low:.3f}", anchor="end")
    picture.text(left + width, top + height + 16, str(last), anchor="end")
