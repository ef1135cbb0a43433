"""`edge0 train`: a stage from its first step, or from where it was stopped, to its adapters.

[TRN-004] A run that was interrupted after any step and is started again ends as if it had not been.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge0_ref.adapters import Adapters, adapters_of, write_adapters
from edge0_ref.app.backends import find_backend
from edge0_ref.app.progress import loss_bar
from edge0_ref.app.train_files import Run, RunFolder
from edge0_ref.app.train_text import Corpus, read_corpus
from edge0_ref.checkpoint import Checkpoint, read_shards
from edge0_ref.config import read_config
from edge0_ref.errors import NonFiniteError, UsageError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.packed import fingerprint
from edge0_ref.tokens import open_tokenizer
from edge0_ref.training import STAGES, Stage, Trainer, TrainSettings

STEPS_A_CHECKPOINT = 20


@dataclass(frozen=True)
class Job:
    """Where a run finds what it needs. start: adapters to begin from, if not those of the stage before."""

    student: Path
    teacher: Path
    text: Path
    out: Path
    backend: str
    tell: Callable[[str], None]
    start: Path | None = None


def find_trainer(backend: str) -> Trainer:
    """Raises BackendError for a backend that does not claim `train`."""
    made: Any = find_backend(backend, needs="train")
    trainer: Trainer = made.trainer()
    return trainer


def open_teacher(folder: Path, student: Checkpoint) -> Checkpoint:
    """[TRN-006] A model whose experts may be floats. Raises UsageError when it is no teacher of this student."""
    tensors, metadata = read_shards(folder)
    config = read_config(folder)
    kept = {name: info for name, info in tensors.items() if not name.startswith(config.skipped)}
    pairs = {
        "vocabulary": (config.vocab_size, student.config.vocab_size),
        "number of layers": (len(config.layers), len(student.config.layers)),
        "routed experts": (experts_of(config.moe_layers), experts_of(student.config.moe_layers)),
        "hidden size": (config.hidden_size, student.config.hidden_size),
    }
    for what, (teacher, wanted) in pairs.items():
        if teacher != wanted:
            raise UsageError(f"{folder}: no teacher of {student.folder}: {what} is {teacher}, the student's {wanted}")
    return Checkpoint(folder, config, kept, (), metadata)


def experts_of(layers: Mapping[int, Any]) -> dict[int, int]:
    return {layer: moe.num_experts for layer, moe in layers.items()}


def run_stages(job: Job, stages: Sequence[TrainSettings]) -> None:
    """[TRN-004] One after the other. Their checkpoints stay until all are done: no stage is trained twice."""
    for settings in stages:
        run_stage(job, settings)
        job.tell(f"{settings.stage}: done, {job.out / settings.stage}")
    for settings in stages:
        RunFolder(job.out).forget(settings.stage)


def run_stage(job: Job, settings: TrainSettings) -> Adapters:
    """Train one stage; its adapters, which are in the run's folder too, beside the checkpoint of the last step."""
    student = open_checkpoint(job.student)
    teacher, folder = open_teacher(job.teacher, student), RunFolder(job.out)
    corpus = read_corpus(job.text, open_tokenizer(job.student), student.config, settings.window)
    earlier = earlier_adapters(job, settings, student)
    base = fingerprint(student)
    run = Run(settings, base, teacher_fingerprint(teacher), corpus.fingerprint, adapters_fingerprint(earlier))
    trainer = find_trainer(job.backend)
    seed = (settings.seed, STAGES.index(settings.stage))
    stage = trainer.stage(
        settings, teacher, student, earlier, lambda number: corpus.batch(number, settings.batch, seed)
    )
    run_steps(folder, run, stage, job.tell)
    trained = finish(folder, run, stage, earlier, corpus, trainer, student)
    folder.draw()
    return trained


def earlier_adapters(job: Job, settings: TrainSettings, student: Checkpoint) -> Adapters:
    """What the stage before left. Raises UsageError when there is none."""
    number = STAGES.index(settings.stage)
    if not number:
        return Adapters()
    before = job.start or job.out / STAGES[number - 1]
    if not before.is_dir():
        raise UsageError(f"{before}: no such folder; `edge0 train {STAGES[number - 1]} --out {job.out}` makes it")
    opened = adapters_of(student, before)
    heads = {owner: head for owner, head in opened.heads.items() if owner + 1 >= settings.first_consumer}
    return replace(opened, heads=heads)


def teacher_fingerprint(teacher: Checkpoint) -> str:
    """Names, shapes and dtypes of its tensors, and the bytes of its final norm: enough to tell two teachers apart."""
    digest = hashlib.sha256(teacher.read(teacher.config.final_norm).tobytes())
    for name, info in sorted(teacher.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
    return digest.hexdigest()


def adapters_fingerprint(adapters: Adapters) -> str:
    """The values that a stage begins from."""
    digest = hashlib.sha256()
    for owner, head in adapters.heads.items():
        digest.update(f"head {owner}\n".encode() + b"".join(part.tobytes() for part in vars(head).values()))
    for module, lora in adapters.loras.items():
        digest.update(f"{module}\n".encode() + lora.down.tobytes() + lora.up.tobytes())
    return digest.hexdigest()


def run_steps(folder: RunFolder, run: Run, stage: Stage, tell: Callable[[str], None]) -> None:
    """All steps that are left. Raises NonFiniteError after the last good state was saved."""
    settings, first = run.settings, 0
    if held := folder.resume(run):
        first, state = held
        stage.load(state)
        tell(f"{settings.stage}: going on after step {first} of {settings.steps}")
    done, started = first, time.monotonic()
    try:
        with loss_bar(settings.stage, settings.steps, first) as advance:
            for number in range(first, settings.steps):
                loss = stage.step(number)
                done = number + 1
                seconds = time.monotonic() - started
                folder.note({"stage": settings.stage, "step": number, "loss": loss, "seconds": round(seconds, 3)})
                left = seconds / (done - first) * (settings.steps - done)
                advance(loss)
                if done % STEPS_A_CHECKPOINT == 0 or done == settings.steps:
                    folder.save(run, done, stage.state())
                    tell(f"{settings.stage}: step {done} of {settings.steps}, loss {loss:.4f}, {left:.0f} s left")
    except (KeyboardInterrupt, SystemExit, NonFiniteError):
        if done > first:
            folder.save(run, done, stage.state())
            tell(
                f"{settings.stage}: stopped after step {done} of {settings.steps}; the same command goes on from there"
            )
        raise


def finish(
    folder: RunFolder,
    run: Run,
    stage: Stage,
    earlier: Adapters,
    corpus: Corpus,
    trainer: Trainer,
    student: Checkpoint,
) -> Adapters:
    """[TRN-007] Write the stage's adapters: heads in one file, LoRA in another, each saying what it was made from."""
    settings, trained = run.settings, stage.adapters()
    heads = trained.heads or earlier.heads
    told = {
        "K": student.config.top_k,
        "owners": sorted(heads),
        "base": run.student,
        "text": corpus.fingerprint,
        "stage": settings.stage,
        "steps": settings.steps,
        "seed": settings.seed,
        "versions": {"edge0": version("edge0"), **trainer.versions},
    }
    target = folder.stage_folder(settings.stage)
    target.mkdir(exist_ok=True)
    write_adapters(target / "heads.safetensors", heads, {}, told)
    if trained.loras:
        lora = next(iter(trained.loras.values()))  # which may have begun with other settings than these
        rank = lora.down.shape[0]
        told |= {"r": rank, "alpha": lora.scale * rank}
        write_adapters(target / "lora.safetensors", {}, trained.loras, told)
    return adapters_of(student, target)
