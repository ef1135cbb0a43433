"""A backend that claims `train` and learns next to nothing, quickly: for tests of the program around a stage."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge0_ref.adapters import Adapters
from edge0_ref.backend import ReferenceBackend
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Lora, PrerouterHead
from edge0_ref.errors import NonFiniteError
from edge0_ref.training import Batches, TrainSettings

WIDTH = 2


class SumStage:
    """What is trained is a few numbers, moved by each step's tokens and by where they stand."""

    nan_at: int | None = None
    interrupted_at: int | None = None

    def __init__(self, settings: TrainSettings, student: Checkpoint, earlier: Adapters, batches: Batches) -> None:
        self.settings, self.config, self.batches, self.earlier = settings, student.config, batches, earlier
        self.value = np.zeros(8)

    def step(self, number: int) -> float:
        tokens = self.batches(number)
        if number == self.nan_at:
            raise NonFiniteError(f"step {number}: the loss is nan")
        if number == self.interrupted_at:
            raise KeyboardInterrupt
        self.value = np.tanh(self.value + tokens.ravel()[:8] / 1024 - 0.25)
        return float((self.value**2).sum())

    def state(self) -> dict[str, Array]:
        return {"value": self.value}

    def load(self, state: Mapping[str, Array]) -> None:
        self.value = state["value"]

    def adapters(self) -> Adapters:
        if self.settings.stage != "heads":
            modules = {name: shape for name, shape in self.config.tensors.linears.items() if name.endswith("q_proj")}
            return Adapters({}, {name: self._lora(*shape) for name, shape in modules.items()})
        moe = self.config.moe_layers
        return Adapters({owner: self._head(owner) for owner in moe if owner + 1 in moe})

    def _lora(self, rows: int, cols: int) -> Lora:
        rank, scale = self.settings.rank, self.settings.alpha / self.settings.rank
        for lora in self.earlier.loras.values():  # goes on as it began
            rank, scale = lora.down.shape[0], lora.scale
        return Lora(np.resize(self.value, (rank, cols)), np.resize(self.value, (rows, rank)).copy(), scale)

    def _head(self, owner: int) -> PrerouterHead:
        experts = self.config.moe_layers[owner].num_experts
        features = self.config.hidden_size + 2 * experts
        shapes = {"fc1": (WIDTH, features), "fc2": (experts, WIDTH), "linear": (experts, features)}
        return PrerouterHead(**{name: np.resize(self.value, shape) for name, shape in shapes.items()})


class NumpyTrainer:
    def __init__(self) -> None:
        self.versions = {"numpy": np.__version__}

    def stage(
        self, settings: TrainSettings, teacher: Checkpoint, student: Checkpoint, adapters: Adapters, batches: Batches
    ) -> SumStage:
        return SumStage(settings, student, adapters, batches)

    def scored(self, checkpoint: Checkpoint, adapters: Adapters, merged: bool = False) -> Any:
        raise NotImplementedError("nothing here runs a model")


class TrainingBackend(ReferenceBackend):
    claims = ReferenceBackend.claims | {"train"}

    def trainer(self) -> Any:
        return NumpyTrainer()


def create() -> TrainingBackend:
    return TrainingBackend()
