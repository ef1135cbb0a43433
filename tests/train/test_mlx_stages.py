"""The stages on MLX: a run that was stopped, what is trained and what is not, and the commands."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edge0_mlx.dequant import dequantize
from edge0_mlx.train.floats import merge
from edge0_mlx.train.model import ParallelModel
from edge0_mlx.train.stages import fresh_loras
from edge0_mlx.train.trainer import MlxTrainer
from edge0_ref.adapters import Adapters, open_adapters
from edge0_ref.app.locate import embedded_model
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Lora, QuantizedMatrix
from edge0_ref.errors import AdapterError, NonFiniteError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.training import STAGES, StageName, TrainSettings
from tests.app.command import edge0, refused
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=3, attention=3, experts=6, top_k=2)
SETTINGS = TrainSettings(
    "heads", steps=4, learning_rate=1e-2, batch=2, window=12, width=8, rank=2, written=2, prompt=4, top=8
)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build(tmp_path_factory.mktemp("student"), RECIPE))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build(tmp_path_factory.mktemp("teacher"), replace(RECIPE, seed=1)))


@pytest.fixture(scope="module")
def heads(student: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return open_adapters(build_adapters(tmp_path_factory.mktemp("heads"), RECIPE, [0, 1], {}), student.config)


def batches(number: int) -> Array:
    return np.random.default_rng(number).integers(0, RECIPE.vocab, (SETTINGS.batch, SETTINGS.window))


@pytest.mark.spec("TRN-004")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_goes_on_from_its_state_as_if_it_had_not_stopped(
    student: Checkpoint, teacher: Checkpoint, heads: Adapters, stage: StageName
) -> None:
    def fresh() -> object:
        return MlxTrainer().stage(replace(SETTINGS, stage=stage), teacher, student, heads, batches)

    whole, losses = fresh(), list[float]()
    for number in range(SETTINGS.steps):
        state = whole.state()
        resumed = fresh()
        resumed.load(state)
        losses.append(whole.step(number))
        assert resumed.step(number) == losses[-1]
        assert all((resumed.state()[name] == value).all() for name, value in whole.state().items())
    assert all(np.isfinite(losses))


@pytest.mark.parametrize("stage", ["sft", "opd"])
def test_nothing_but_lora_and_heads_is_trained(
    student: Checkpoint, teacher: Checkpoint, heads: Adapters, stage: StageName
) -> None:
    trainer = MlxTrainer()
    trained = trainer.stage(replace(SETTINGS, stage=stage), teacher, student, heads, batches)
    before = weights_of(trained.student)
    for number in range(2):
        trained.step(number)
    assert all((one == other).all() for one, other in zip(before, weights_of(trained.student), strict=True))
    adapters = trained.adapters()
    assert all("switch_mlp" not in module and module.split(".")[-1] != "gate" for module in adapters.loras)
    assert len(adapters.loras) == sum("_proj" in module for module in student.config.tensors.linears)
    assert all(np.abs(lora.up).max() > 0 for lora in adapters.loras.values())
    assert set(adapters.heads) == (set(heads.heads) if stage == "sft" else set())


def weights_of(model: ParallelModel) -> list[Array]:
    held = [vars(layer) for layer in model.layers]
    arrays = [
        value for _, value in tree_flatten([{k: v for k, v in h.items() if isinstance(v, mx.array)} for h in held])
    ]
    return [np.array(value) for value in [*arrays, *(e for layer in model.layers for e in layer.experts)]]


def test_a_fresh_lora_has_no_effect(student: Checkpoint) -> None:
    loras, tokens = fresh_loras(ParallelModel(student), 2, 4.0, 0), batches(0)
    with_loras, without = (MlxTrainer().scored(student, Adapters({}, each)).logits(tokens) for each in (loras, {}))
    assert (with_loras == without).all()


def test_loras_of_two_scales_are_refused(student: Checkpoint) -> None:
    loras = fresh_loras(ParallelModel(student), 2, 4.0, 0)
    module = next(iter(loras))
    mixed = Adapters({}, {**loras, module: replace(loras[module], scale=1.0)})
    with pytest.raises(AdapterError, match="one scale, got 1, 2"):
        MlxTrainer().scored(student, mixed)


@pytest.mark.spec("TRN-005")
def test_a_loss_that_is_not_finite_changes_nothing(student: Checkpoint, teacher: Checkpoint, heads: Adapters) -> None:
    stage = MlxTrainer().stage(replace(SETTINGS, stage="sft"), teacher, student, heads, batches)
    state = stage.state()
    name = next(name for name in state if name.endswith("lora_A") and name.startswith("parameters"))
    stage.load({**state, name: np.full_like(state[name], np.nan)})
    before = stage.state()
    with pytest.raises(NonFiniteError, match="step 3: the loss is nan"):
        stage.step(3)
    assert all(np.array_equal(value, before[key], equal_nan=True) for key, value in stage.state().items())


def test_merging_rounds_the_sum_to_the_bases_codes(student: Checkpoint) -> None:
    """Within half a step of each group, and the coefficients' own rounding to bfloat16."""
    module = next(name for name in student.config.tensors.linears if name.endswith("q_proj"))
    base = student.matrix(module)
    assert isinstance(base, QuantizedMatrix)
    random = np.random.default_rng(3)
    lora = Lora(random.normal(size=(2, base.cols)).astype(np.float32), random.normal(size=(base.rows, 2)) * 0.01, 1.0)
    wanted = np.array(dequantize(base)) + lora.up @ lora.down
    merged = merge(base, lora)
    assert (merged.bits, merged.group_size, merged.scales.dtype) == (base.bits, base.group_size, base.scales.dtype)
    groups = wanted.reshape(base.rows, -1, base.group_size)
    step = np.ptp(groups, axis=2) / (2**base.bits - 1)
    # bfloat16 rounds weight, scale and bias by 2^-8; the scale counts up to 15 times, and is recut once so that 0 stays
    bound = 1.01 * step + 18 * 2.0**-8 * np.abs(groups).max(axis=2)
    off = np.abs(np.array(dequantize(merged)) - wanted).reshape(groups.shape).max(axis=2)
    assert (off <= bound).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages by the command: the embedded model taught by itself, on one chapter."""
    folder = tmp_path_factory.mktemp("commands")
    held_out = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text("utf-8")
    (folder / "text.txt").write_text(held_out[:3000], "utf-8")
    done = edge0(
        *("train", "all", "--teacher", embedded_model(), "--text", folder / "text.txt", "--out", folder / "run"),
        *("--steps", 2, "--batch", 1, "--window", 48, "--width", 8, "--rank", 2),
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_commands_train_and_measure(run: Path) -> None:
    picture = run / "recall.svg"
    asked = ("--teacher", embedded_model(), "--text", run / "text.txt", "--run", run / "run", "--paper")
    done = edge0("eval", *asked, "--picture", picture)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told["bits_per_byte"]) == ["teacher", "int4", "int4 + heads", "+ LoRA (sft)", "+ LoRA (opd)"]
    assert told["bits_per_byte"]["teacher"] == told["bits_per_byte"]["int4"] < told["bits_per_byte"]["int4 + heads"]
    assert list(told["recall"]) == [str(consumer) for consumer in range(2, 8)]
    assert set(told["recovered"]) == {"sft", "opd"}
    assert "paper, 35b" in done.stderr
    assert "next_router_here" in picture.read_text("utf-8")


def test_a_finished_run_generates(run: Path) -> None:
    done = edge0("generate", "--prompt", "In the", "--max-tokens", 4, "--adapters", run / "run" / "opd", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["adapters"] == {"heads": 6, "loras": 62}


def test_commands_say_what_they_want(tmp_path: Path) -> None:
    assert "stage 'none', wanted one of heads, sft, opd, or all" in refused("train", "none")
    assert "train wants --teacher DIR, --text FILE and --out DIR" in refused("train", "heads")
    assert "eval wants --text FILE" in refused("eval")
    there = ("--teacher", embedded_model(), "--text", tmp_path, "--out", tmp_path / "run")
    assert "learning rate: got 2.0" in refused("train", "sft", *there, "--learning-rate", 2)
    assert "window: got 4, wanted at least 8" in refused("train", "sft", *there, "--window", 4)
