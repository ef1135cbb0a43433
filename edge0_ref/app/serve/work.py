"""What the generation thread is asked to do, and what it tells while it does it. Frozen: it crosses threads."""

from dataclasses import dataclass
from typing import Literal

from edge0_ref.app.serve.api_error import ApiError
from edge0_ref.engine.chances import Chances
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.engine.session import Asked


@dataclass(frozen=True)
class Text:
    """One text to generate. max_tokens: 0 wants the prompt's chances alone; turn: as `Model.generate` has it."""

    prompt: tuple[int, ...]
    max_tokens: int
    settings: SamplingSettings
    stops: tuple[str, ...] = ()
    asked: Asked | None = None
    turn: int | None = None


@dataclass(frozen=True)
class PromptRead:
    """The prompt of text `index` is in the model's state; chances of its tokens, from the second on, if asked for."""

    index: int
    chances: tuple[Chances, ...]


@dataclass(frozen=True)
class TokenMade:
    """A piece of text `index`; counts: it is a token, and not what was held back until the end."""

    index: int
    text: str
    counts: bool
    chances: Chances | None


@dataclass(frozen=True)
class Ended:
    """Text `index` is complete; cut: by a stop string, of which tokens may be held back still."""

    index: int
    reason: Literal["stop", "length"]
    cut: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Failed:
    """Nothing more comes."""

    error: ApiError


Event = PromptRead | TokenMade | Ended | Failed
