"""The three stages. Each is a sequence of steps that depend on nothing but their number, their tokens and the state.

So a run that was stopped after any step and goes on from what `state` gave is the run that was not stopped.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from edge0_mlx.arrays import DeviceHead, device_head
from edge0_mlx.prerouter import build_features, predict
from edge0_mlx.train.losses import forward_kl, tail_reverse_kl
from edge0_mlx.train.mixers import Loras
from edge0_mlx.train.model import ParallelModel
from edge0_mlx.train.sampling import write_texts
from edge0_ref.adapters import Adapters
from edge0_ref.contract import Array, Lora, PrerouterHead
from edge0_ref.errors import NonFiniteError
from edge0_ref.training import Batches, TrainSettings

CLIP = 1.0  # of the gradient's norm
FIRST_STEPS = 20  # over which the learning rate rises
ROUTING_SHARE = 0.2  # of a consumer's routing loss in the second stage
BLOCK = 4  # batches of texts that the teacher writes at once


class Stage:
    """What is trained, and Adam's memory of it."""

    def __init__(self, settings: TrainSettings, batches: Batches) -> None:
        self.settings, self.batches = settings, batches
        self.optimizer = optimizers.Adam(settings.learning_rate, bias_correction=True)
        self.parameters: Any = {}

    def start(self, parameters: Any) -> None:
        self.parameters = parameters
        self.optimizer.init(parameters)
        mx.eval(self.parameters, self.optimizer.state)

    def tokens(self, number: int) -> Array:
        """The text of a step, int [batch, window]."""
        return self.batches(number)

    def loss(self, parameters: Any, tokens: Array) -> mx.array:
        raise NotImplementedError

    def step(self, number: int) -> float:
        """[TRN-005] One update; its loss. Raises NonFiniteError, naming the step, and changes nothing then."""
        loss, gradients = mx.value_and_grad(self.loss)(self.parameters, self.tokens(number))
        parts: Any = tree_flatten(gradients)
        squares = mx.sqrt(sum(((part * part).sum() for _, part in parts), mx.array(0.0)))
        mx.eval(loss, squares)
        told, norm = float(np.array(loss)), float(np.array(squares))
        if not np.isfinite([told, norm]).all():
            raise NonFiniteError(f"step {number}: the loss is {told:g}, its gradient's norm {norm:g}")
        shrink = min(1.0, CLIP / max(norm, 1e-12))
        self.optimizer.learning_rate = self.settings.learning_rate * schedule(number, self.settings.steps)
        gradients = tree_map(lambda part: part * shrink, gradients)
        self.parameters = self.optimizer.apply_gradients(gradients, self.parameters)
        mx.eval(self.parameters, self.optimizer.state)
        return told

    def state(self) -> dict[str, Array]:
        """[TRN-004] All that later steps depend on, by name."""
        trees = {"parameters": self.parameters, "optimizer": self.optimizer.state}
        leaves: Any = tree_flatten(trees)
        return {name: np.array(value) for name, value in leaves}

    def load(self, state: Mapping[str, Array]) -> None:
        trees: Any = tree_unflatten([(name, mx.array(value)) for name, value in state.items()])
        self.parameters, self.optimizer.state = trees["parameters"], trees["optimizer"]
        mx.eval(self.parameters, self.optimizer.state)


def schedule(number: int, steps: int) -> float:
    """The learning rate's share of its peak: up over the first steps, then down as a cosine."""
    rise = min(FIRST_STEPS, max(1, steps // 5))
    if number < rise:
        return (number + 1) / rise
    return 0.02 + 0.49 * (1.0 + float(np.cos(np.pi * (number - rise) / max(1, steps - rise))))


class HeadsStage(Stage):
    """[TRN-003] Stage 1: every layer's head, at once, to the teacher's routing one layer and one token later."""

    def __init__(self, settings: TrainSettings, batches: Batches, teacher: ParallelModel) -> None:
        super().__init__(settings, batches)
        self.teacher = teacher
        self.owners = [layer.number for layer in teacher.layers[:-1]]
        hidden, experts = teacher.config.hidden_size, teacher.layers[0].moe.num_experts
        features, key = hidden + 2 * experts, mx.random.key(settings.seed)
        routers = mx.stack([layer.router for layer in teacher.layers[1:]])
        self.start(
            {
                # the linear part starts as the consumer's own router, on what the owner sees
                "linear": mx.concatenate([routers, mx.zeros((len(routers), 2 * experts, experts))], axis=1),
                "fc1": mx.random.normal((len(routers), features, settings.width), key=key) * features**-0.5,
                "fc2": mx.zeros((len(routers), settings.width, experts)),
            }
        )

    def recorded(self, tokens: Array) -> tuple[mx.array, mx.array]:
        """Of every owner: features [owners, batch, length - 1, features], the consumer's router logits one token on."""
        seen: dict[tuple[str, int], mx.array] = {}
        self.teacher(mx.array(tokens), watch=lambda point, layer, value: seen.update({(point, layer): value}))
        features, wanted = [], []
        for owner in self.owners:
            executed = seen["experts", owner].astype(mx.int32)
            before = mx.concatenate([mx.full((executed.shape[0], 1, executed.shape[2]), -1), executed[:, :-1]], axis=1)
            made = build_features(
                seen["moe_input", owner], executed, before, self.teacher.layers[owner].moe.num_experts
            )
            features.append(made[:, :-1])
            wanted.append(seen["router_logits", owner + 1][:, 1:])
        return mx.stack(features), mx.stack(wanted)

    def loss(self, parameters: Any, tokens: Array) -> mx.array:
        features, wanted = self.recorded(tokens)
        flat = features.reshape(len(self.owners), -1, features.shape[-1])
        predicted = predict(DeviceHead(**parameters), flat)
        return forward_kl(wanted.reshape(predicted.shape), predicted).mean(axis=1).sum()

    def adapters(self) -> Adapters:
        stacks = self.parameters
        heads = [DeviceHead(*(stacks[name][n] for name in ("fc1", "fc2", "linear"))) for n in range(len(self.owners))]
        return Adapters({owner: host_head(head) for owner, head in zip(self.owners, heads, strict=True)})


class LoraStage(Stage):
    """What stages 2 and 3 share: a student with a frozen base, its heads, and the LoRA beside it."""

    heads_learn = False

    def __init__(
        self,
        settings: TrainSettings,
        batches: Batches,
        teacher: ParallelModel,
        student: ParallelModel,
        adapters: Adapters,
    ) -> None:
        super().__init__(settings, batches)
        self.teacher, self.student = teacher, student
        loras = Loras.of(adapters.loras or fresh_loras(student, settings.rank, settings.alpha, settings.seed))
        self.scale = loras.scale
        self.frozen_heads = {owner: device_head(head) for owner, head in adapters.heads.items()}
        pairs = {module.replace(".", "/"): pair for module, pair in loras.pairs.items()}  # MLX's trees join with dots
        heads = {f"owner {owner}": dict(vars(head)) for owner, head in self.frozen_heads.items()}
        self.start({"loras": pairs, "heads": heads} if self.heads_learn else {"loras": pairs})

    def loras(self, parameters: Any) -> Loras:
        return Loras({name.replace("/", "."): pair for name, pair in parameters["loras"].items()}, self.scale)

    def heads(self, parameters: Any) -> dict[int, DeviceHead]:
        if "heads" not in parameters:
            return self.frozen_heads
        return {int(name.removeprefix("owner ")): DeviceHead(**parts) for name, parts in parameters["heads"].items()}

    def adapters(self) -> Adapters:
        pairs = self.loras(self.parameters).pairs
        loras = {
            module: Lora(np.array(pair["lora_A"]), np.array(pair["lora_B"]), self.scale)
            for module, pair in pairs.items()
        }
        learned = self.heads(self.parameters) if self.heads_learn else {}
        return Adapters({owner: host_head(head) for owner, head in learned.items()}, loras)


class SftStage(LoraStage):
    """Stage 2: forward KL to the teacher on the student's path, all but the first position predicted.

    The heads go on learning, from what they see on this path: their routing loss counts ROUTING_SHARE.
    The text is the corpus, and at every n-th step what the teacher wrote from the corpus's beginnings.
    """

    heads_learn = True
    kept: tuple[int, Array] | None = None  # texts the teacher wrote last, and for which block of steps

    def tokens(self, number: int) -> Array:
        every = self.settings.written
        if not every or number % every != every - 1:
            return self.batches(number)
        block, place = divmod(number // every, BLOCK)
        if self.kept is None or self.kept[0] != block:
            numbers = [(block * BLOCK + each) * every + every - 1 for each in range(BLOCK)]
            prompts = np.concatenate([self.batches(each)[:, : self.settings.prompt] for each in numbers])
            self.kept = block, write_texts(self.teacher, prompts, self.settings.window, (self.settings.seed, block))
        return self.kept[1][place * self.settings.batch :][: self.settings.batch]

    def loss(self, parameters: Any, tokens: Array) -> mx.array:
        text = mx.array(tokens)
        wanted, routers = scores(self.teacher, text)
        made: dict[int, mx.array] = {}

        def watch(point: str, layer: int, value: mx.array) -> None:
            if point == "prediction_logits":
                made[layer] = value

        logits, _ = self.student(
            text, heads=self.heads(parameters), loras=self.loras(parameters), decode_from=1, watch=watch
        )
        routing = sum((forward_kl(routers[layer][:, 1:], made[layer][:, :-1]).mean() for layer in made), mx.array(0.0))
        return forward_kl(wanted, logits).mean() + ROUTING_SHARE * routing


class OpdStage(LoraStage):
    """Stage 3: the student writes, the teacher scores, tail-aware reverse KL on what was written."""

    def tokens(self, number: int) -> Array:
        """The student's own continuation of the text's first tokens, under predicted routing."""
        settings, loras = self.settings, self.loras(self.parameters)
        prompts, seed = self.batches(number)[:, : settings.prompt], (settings.seed, number)
        return write_texts(self.student, prompts, settings.window, seed, self.heads(self.parameters), loras)

    def loss(self, parameters: Any, tokens: Array) -> mx.array:
        text, prompt = mx.array(tokens), self.settings.prompt
        wanted, _ = scores(self.teacher, text)
        logits, _ = self.student(text, heads=self.heads(parameters), loras=self.loras(parameters), decode_from=prompt)
        written = slice(prompt - 1, -1)
        return tail_reverse_kl(wanted[:, written], logits[:, written], self.settings.top).mean()


def scores(teacher: ParallelModel, text: mx.array) -> tuple[mx.array, dict[int, mx.array]]:
    """The teacher's logits, and its routers' by layer, evaluated: nothing of them is kept for a gradient."""
    routers: dict[int, mx.array] = {}

    def watch(point: str, layer: int, value: mx.array) -> None:
        if point == "router_logits":
            routers[layer] = value

    logits, _ = teacher(text, watch=watch)
    mx.eval(logits, routers)
    return logits, routers


def host_head(head: DeviceHead) -> PrerouterHead:
    return PrerouterHead(*(np.array(part.T) for part in (head.fc1, head.fc2, head.linear)))


def fresh_loras(student: ParallelModel, rank: int, alpha: float, seed: int) -> dict[str, Lora]:
    """A pair beside every projection of mixers and shared experts: A random, B zero, so no effect yet."""
    generator = np.random.default_rng(seed)
    loras = {}
    for module, (rows, cols) in student.config.tensors.linears.items():
        if "_proj" in module:
            down = generator.uniform(-1, 1, (rank, cols)) * cols**-0.5
            loras[module] = Lora(down.astype(np.float32), np.zeros((rows, rank), np.float32), alpha / rank)
    return loras
