"""MLX as a trainer: `edge0_ref.training.Trainer`."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

import mlx.core as mx
import numpy as np

from edge0_mlx.arrays import device_head
from edge0_mlx.train.mixers import Loras
from edge0_mlx.train.model import ParallelModel
from edge0_mlx.train.stages import HeadsStage, OpdStage, SftStage, Stage
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array
from edge0_ref.training import Batches, TrainSettings


class MlxTrainer:
    """Stages and scores; a model is read once and kept."""

    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("mlx", "numpy")}
        self._models: dict[str, ParallelModel] = {}

    def stage(
        self, settings: TrainSettings, teacher: Checkpoint, student: Checkpoint, adapters: Adapters, batches: Batches
    ) -> Stage:
        match settings.stage:
            case "heads":
                return HeadsStage(settings, batches, self._model(teacher))
            case "sft":
                return SftStage(settings, batches, self._model(teacher), self._model(student), adapters)
            case "opd":
                return OpdStage(settings, batches, self._model(teacher), self._model(student), adapters)

    def scored(self, checkpoint: Checkpoint, adapters: Adapters, merged: bool = False) -> "ScoredModel":
        if merged:
            return ScoredModel(ParallelModel(checkpoint, merged=adapters.loras), replace(adapters, loras={}))
        return ScoredModel(self._model(checkpoint), adapters)

    def _model(self, checkpoint: Checkpoint) -> ParallelModel:
        name = str(checkpoint.folder.resolve())
        if name not in self._models:
            self._models[name] = ParallelModel(checkpoint)
        return self._models[name]


class ScoredModel:
    """A model with its adapters, NumPy in and out."""

    def __init__(self, model: ParallelModel, adapters: Adapters) -> None:
        self.model = model
        self.heads = {owner: device_head(head) for owner, head in adapters.heads.items()}
        self.loras = Loras.of(adapters.loras)

    def logits(self, tokens: Array, decode_from: int | None = None) -> Array:
        heads = self.heads if decode_from is not None else {}
        logits, _ = self.model(mx.array(tokens), heads=heads, loras=self.loras, decode_from=decode_from)
        return np.array(logits)

    def routing(self, tokens: Array) -> tuple[Mapping[int, tuple[Array, Array]], Mapping[int, Array]]:
        seen: dict[tuple[str, int], mx.array] = {}

        def watch(point: str, layer: int, value: mx.array) -> None:
            seen[point, layer] = value

        self.model(mx.array(tokens), heads=self.heads, loras=self.loras, watch=watch)
        layers = [layer.number for layer in self.model.layers]
        routers = {n: (np.array(seen["moe_input", n]), np.array(seen["router_logits", n])) for n in layers}
        return routers, {n: np.array(value) for (point, n), value in seen.items() if point == "prediction_logits"}

    def router(self, layer: int, x: Array) -> Array:
        return np.array(mx.array(x) @ self.model.layers[layer].router)
