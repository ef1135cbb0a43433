"""What training needs of a backend that claims `train`, and the settings that make a run.

A stage is a sequence of steps; the state after step n decides, with the settings and the text, all that follows. So
the program around it (files, progress, checkpoints) knows nothing of how a backend differentiates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from edge0_ref.data import Array
from edge0_ref.errors import UsageError

if TYPE_CHECKING:
    from edge0_ref.adapters import Adapters
    from edge0_ref.checkpoint import Checkpoint

StageName = Literal["heads", "sft", "opd"]
STAGES: tuple[StageName, ...] = ("heads", "sft", "opd")
Batches = Callable[[int], Array]  # step -> its tokens, int64 [batch, window]; the same for the same step


@dataclass(frozen=True)
class TrainSettings:
    """One stage of a run. window: tokens of a sequence; batch: sequences a step.

    first_consumer: the first layer whose routing is predicted; width: of a head's hidden layer; rank, alpha: of the
    LoRA; written: every n-th sft step runs on text that the teacher wrote (0: none); prompt: tokens that a written text
    starts from; top: the teacher's likeliest tokens that opd compares one by one.
    """

    stage: StageName
    steps: int
    learning_rate: float
    batch: int = 8
    window: int = 256
    seed: int = 0
    first_consumer: int = 2
    width: int = 256
    rank: int = 16
    alpha: float = 32.0
    written: int = 8
    prompt: int = 32
    top: int = 64

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch": 1, "window": 8, "first_consumer": 1, "width": 1, "rank": 1, "prompt": 1, "top": 1}
        for name, wanted in least.items():
            if getattr(self, name) < wanted:
                raise UsageError(f"{name.replace('_', ' ')}: got {getattr(self, name)}, wanted at least {wanted}")
        if not 0 < self.learning_rate < 1:
            raise UsageError(f"learning rate: got {self.learning_rate}, wanted a number between 0 and 1")
        if self.prompt >= self.window:
            raise UsageError(f"prompt: got {self.prompt} tokens, the window has {self.window}")


@runtime_checkable
class Stage(Protocol):
    """One stage, between two of its steps."""

    def step(self, number: int) -> float:
        """[TRN-005] One update; its loss. Raises NonFiniteError, naming the step, and changes nothing then."""
        ...

    def state(self) -> dict[str, Array]:
        """[TRN-004] All that later steps depend on, by name."""
        ...

    def load(self, state: Mapping[str, Array]) -> None: ...

    def adapters(self) -> "Adapters":
        """What has been trained: heads or LoRA, float32."""
        ...


@runtime_checkable
class Scored(Protocol):
    """A model that gives whole sequences' logits at once."""

    def logits(self, tokens: Array, decode_from: int | None = None) -> Array:
        """[PRE-021] float32 [batch, tokens, vocab]; positions from `decode_from` on are routed by predictions."""
        ...

    def routing(self, tokens: Array) -> tuple[Mapping[int, tuple[Array, Array]], Mapping[int, Array]]:
        """All routed by routers: what each layer and each head says.

        Layer -> the hidden states its experts see, float32 [batch, tokens, hidden], and its router's logits; consumer
        -> what its head predicts, for the position after each, float32 [batch, tokens, experts].
        """
        ...

    def router(self, layer: int, x: Array) -> Array:
        """What a layer's router says to hidden states, float32 [batch, tokens, experts]."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """What a backend's method `trainer()` gives."""

    versions: Mapping[str, str]

    def stage(
        self,
        settings: TrainSettings,
        teacher: "Checkpoint",
        student: "Checkpoint",
        adapters: "Adapters",
        batches: Batches,
    ) -> Stage:
        """A stage before its first step; adapters: heads for sft, heads and LoRA for opd."""
        ...

    def scored(self, checkpoint: "Checkpoint", adapters: "Adapters", merged: bool = False) -> Scored:
        """merged: the LoRA is added to the weights, which are quantised again as they were."""
        ...
