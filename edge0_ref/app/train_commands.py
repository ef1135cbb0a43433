"""The commands that train adapters and measure them: options. What each does is in `train.py` and `evaluate.py`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from edge0_ref.app.shell import AdapterFolder, Json, ModelFolder, app, carrying, command, tell
from edge0_ref.errors import UsageError

Teacher = Annotated[str | None, typer.Option(metavar="DIR", help="The unquantised model.")]
Text = Annotated[
    str | None, typer.Option(metavar="FILE", help="UTF-8 text, or a folder of .txt; form feeds end texts.")
]
TrainBackend = Annotated[str, typer.Option("--backend", help="A backend that claims `train`.")]
Preloaded = Annotated[str | None, typer.Option(envvar="LD_PRELOAD", hidden=True)]
BlasThreads = Annotated[str, typer.Option(envvar="OPENBLAS_NUM_THREADS", hidden=True)]  # MLX has threads of its own

DEFAULTS = {"heads": (400, 1e-2, 4), "sft": (560, 2e-3, 4), "opd": (12, 2e-4, 8)}  # steps, learning rate, batch


@command
def train(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="heads, sft, opd, or all.")],
    model: ModelFolder = None,
    teacher: Teacher = None,
    text: Text = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The run's folder; a stopped run goes on.")] = None,
    steps: Annotated[int | None, typer.Option(help="Default: 400, 560, 12.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 1e-2, 2e-3, 2e-4.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; default: 4, 4, 8.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    width: Annotated[int, typer.Option(help="Of a head's hidden layer.")] = 256,
    rank: Annotated[int, typer.Option(help="Of the LoRA that sft begins; opd goes on with it.")] = 32,
    alpha: Annotated[float, typer.Option(help="The LoRA counts alpha / rank.")] = 64.0,
    first_consumer: Annotated[int, typer.Option(help="The first layer whose routing is predicted.")] = 2,
    start: Annotated[
        str | None, typer.Option(metavar="DIR", help="Adapters to go on from; default: of the stage before.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same adapters.")] = 0,
    backend: TrainBackend = "mlx",
    preloaded: Preloaded = None,
    blas_threads: BlasThreads = "1",
) -> None:
    """Train prerouter heads, then the recovery LoRA."""
    from edge0_ref.app.blas import restart_with_openblas
    from edge0_ref.app.locate import locate
    from edge0_ref.app.train import Job, run_stages
    from edge0_ref.training import STAGES, TrainSettings

    stages = STAGES if stage == "all" else tuple(known for known in STAGES if known == stage)
    if not stages:
        raise UsageError(f"stage {stage!r}, wanted one of {', '.join(STAGES)}, or all")
    if teacher is None or text is None or out is None:
        raise UsageError("train wants --teacher DIR, --text FILE and --out DIR")
    settings = [
        TrainSettings(
            each,
            DEFAULTS[each][0] if steps is None else steps,
            DEFAULTS[each][1] if learning_rate is None else learning_rate,
            batch=DEFAULTS[each][2] if batch is None else batch,
            window=window,
            seed=seed,
            first_consumer=first_consumer,
            width=width,
            rank=rank,
            alpha=alpha,
        )
        for each in stages
    ]
    restart_with_openblas(sys.argv[1:], preloaded, blas_threads, tell, os.execv)
    student = locate(model).folder
    job = Job(student, Path(teacher), Path(text), Path(out), backend, tell, None if start is None else Path(start))
    run_stages(job, settings)


def evaluate(
    model: ModelFolder = None,
    teacher: Teacher = None,
    text: Text = None,
    adapters: AdapterFolder = None,
    run: Annotated[str | None, typer.Option(metavar="DIR", help="A run's folder: each stage's adapters.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    windows: Annotated[int | None, typer.Option(help="Sequences to measure; default: all of the text.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's table beside it.")] = False,
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="Recall as a picture, .svg.")] = None,
    backend: TrainBackend = "mlx",
    json: Json = False,
    preloaded: Preloaded = None,
    blas_threads: BlasThreads = "1",
) -> None:
    """Measure text quality in decode mode: bits per byte, agreement, recall of heads, what merging would lose."""
    from edge0_ref.app.blas import restart_with_openblas
    from edge0_ref.app.evaluate import Question, run_evaluate
    from edge0_ref.app.locate import locate

    if text is None:
        raise UsageError("eval wants --text FILE, held-out text")
    restart_with_openblas(sys.argv[1:], preloaded, blas_threads, tell, os.execv)
    asked = Question(
        locate(model).folder,
        None if teacher is None else Path(teacher),
        Path(text),
        None if adapters is None else Path(adapters),
        None if run is None else Path(run),
        window,
        windows,
    )
    drawn = None if picture is None else Path(picture)
    run_evaluate(asked, backend, tell, paper=paper, picture=drawn, json=json or paper)


app.command("eval")(carrying(evaluate))
