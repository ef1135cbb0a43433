"""[ENG-090] What the generation thread tells, as the chunks of an answer. A whole answer is its chunks put together.

So a streamed answer and a whole one are the same by construction: there is one way from events to chunks, and the
whole answer has no other source.
"""

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from edge0_ref.app.serve.work import Ended, PromptRead, TokenMade

Chunk = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """What every chunk of one answer says about itself."""

    prefix: str
    model: str
    fingerprint: str
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, kind: str, choices: list[Chunk]) -> Chunk:
        return {
            "id": f"{self.prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@runtime_checkable
class Answer(Protocol):
    """One request's answer, as it comes."""

    @property
    def texts(self) -> int:
        """How many texts it has."""
        ...

    def chunks(self, event: PromptRead | TokenMade | Ended) -> list[Chunk]:
        """What this event adds."""
        ...

    def whole(self, chunks: Iterable[Chunk]) -> Chunk:
        """All of its chunks as one answer."""
        ...


def usage(ended: Iterable[Ended]) -> dict[str, Any]:
    """What an answer of these texts cost."""
    ended = list(ended)
    prompt, made = sum(text.prompt_tokens for text in ended), sum(text.completion_tokens for text in ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(text.cached_tokens for text in ended)},
    }


def with_usage(chunks: list[Chunk], identity: Identity, kind: str, ended: list[Ended], last: bool) -> list[Chunk]:
    """The chunks, all but one saying that there are no counts yet; the last one has nothing else."""
    marked = [chunk | {"usage": None} for chunk in chunks]
    return [*marked, identity.chunk(kind, []) | {"usage": usage(ended)}] if last else marked


def by_index(chunks: Iterable[Chunk]) -> Iterator[tuple[int, list[Chunk]]]:
    """The parts of each choice, in order."""
    choices = sorted((choice for chunk in chunks for choice in chunk["choices"]), key=lambda choice: choice["index"])
    for index, parts in itertools.groupby(choices, key=lambda choice: choice["index"]):
        yield index, list(parts)


def finish_of(parts: Iterable[Mapping[str, Any]]) -> Any:
    """The reason the last part of a choice gives."""
    return [part["finish_reason"] for part in parts][-1]
