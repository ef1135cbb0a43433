"""The answer to a completion request: a choice for each prompt, with the prompt itself in front if that is wanted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edge0_ref.app.serve.answers import Chunk, Identity, by_index, finish_of, usage, with_usage
from edge0_ref.app.serve.log_probs import Held, completion_entry, joined
from edge0_ref.app.serve.token_texts import TokenTexts
from edge0_ref.app.serve.work import Ended, PromptRead, TokenMade
from edge0_ref.engine.chances import Chances
from edge0_ref.tokens import Tokenizer

KIND = "text_completion"


@dataclass(frozen=True)
class Echo:
    """A prompt that is given back: its text, and its ids."""

    text: str
    ids: tuple[int, ...]


class CompletionAnswer:
    """Texts as they are. echoes: one for each prompt, or none at all."""

    def __init__(
        self,
        identity: Identity,
        texts: int,
        echoes: Sequence[Echo],
        tokenizer: Tokenizer,
        log_probs: bool,
        include_usage: bool,
    ) -> None:
        self.texts = texts
        self._identity, self._echoes, self._tokenizer = identity, echoes, tokenizer
        self._token_texts = TokenTexts(tokenizer) if log_probs else None
        self._include_usage = include_usage
        self._held, self._before = Held(tokenizer), 0  # of the text that comes now: chances, characters of its echo
        self._ended: list[Ended] = []

    def chunks(self, event: PromptRead | TokenMade | Ended) -> list[Chunk]:
        """What this event adds."""
        match event:
            case PromptRead():
                self._held, self._before = Held(self._tokenizer), 0
                found = [self._echo(event)] if self._echoes else []
            case TokenMade():
                found = self._piece(event.index, event.text, self._held.push(event))
            case Ended():
                self._ended.append(event)
                found = self._piece(event.index, "", self._held.push(event))
                found.append(self._chunk(event.index, "", None, event.reason))
        last = len(self._ended) == self.texts
        return with_usage(found, self._identity, KIND, self._ended, last) if self._include_usage else found

    def _echo(self, event: PromptRead) -> Chunk:
        echo = self._echoes[event.index]
        self._before = len(echo.text)
        if self._token_texts is None:
            return self._chunk(event.index, echo.text, None)
        known: list[Chances | None] = [None, *event.chances]
        stream, offset, entries = self._tokenizer.stream(), 0, []
        for token, chances in zip(echo.ids, known, strict=True):
            entries.append(completion_entry(token, chances, offset, self._token_texts))
            offset += len(stream.push(token))
        return self._chunk(event.index, echo.text, joined(entries))

    def _piece(self, index: int, text: str, released: list[tuple[int, Chances]]) -> list[Chunk]:
        """A chunk, if there is anything in it."""
        entries = None
        if self._token_texts is not None:
            entries = joined(
                [
                    completion_entry(chances.token_id, chances, self._before + at, self._token_texts)
                    for at, chances in released
                ]
            )
        return [self._chunk(index, text, entries)] if text or released else []

    def _chunk(
        self, index: int, text: str, log_probs: dict[str, list[Any]] | None, finish_reason: str | None = None
    ) -> Chunk:
        choice = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": finish_reason}
        return self._identity.chunk(KIND, [choice])

    def whole(self, chunks: Iterable[Chunk]) -> Chunk:
        """All of its chunks as one answer."""
        choices = [
            {
                "index": index,
                "text": "".join(part["text"] for part in parts),
                "logprobs": joined([part["logprobs"] for part in parts if part["logprobs"]])
                if self._token_texts
                else None,
                "finish_reason": finish_of(parts),
            }
            for index, parts in by_index(chunks)
        ]
        return self._identity.chunk(KIND, choices) | {"usage": usage(self._ended)}
