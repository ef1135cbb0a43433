"""Log probabilities as the two kinds of answers write them, each together with the text of its token.

A token of a stop string is not told: like its text it is held back, and dropped when the stop string is complete.
"""

from typing import Any

from edge0_ref.app.serve.token_texts import TokenTexts
from edge0_ref.app.serve.work import Ended, TokenMade
from edge0_ref.engine.chances import Chances
from edge0_ref.tokens import Tokenizer

LOWEST = -9999.0  # JSON has no infinity


class Held:
    """Chances of tokens whose text has not come out yet, each with the character of the text that it begins at."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = tokenizer.stream()
        self._held: list[tuple[int, Chances]] = []
        self._made = self._out = 0  # characters of all tokens, and of those that came out

    def push(self, event: TokenMade | Ended) -> list[tuple[int, Chances]]:
        """What comes out with this piece of text, or with the end of it: tokens of which at least a part is out."""
        if isinstance(event, Ended):
            return [] if event.cut else self._held
        if event.chances is not None:
            self._held.append((self._made, event.chances))
            self._made += len(self._stream.push(event.chances.token_id))
        self._out += len(event.text)
        released = [held for held in self._held if held[0] < self._out]
        self._held = self._held[len(released) :]
        return released


def chat_entry(chances: Chances, texts: TokenTexts) -> dict[str, Any]:
    """One element of a chat choice's `logprobs.content`."""
    best = [one(token, value, texts) for token, value in chances.top]
    return one(chances.token_id, chances.log_probability, texts) | {"top_logprobs": best}


def one(token: int, log_probability: float, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.text(token),
        "logprob": max(log_probability, LOWEST),
        "bytes": list(texts.bytes(token)),
    }


def completion_entry(token: int, chances: Chances | None, offset: int, texts: TokenTexts) -> dict[str, list[Any]]:
    """One token of a completion choice's `logprobs`; the likeliest tokens include the token itself."""
    top = None
    if chances is not None:
        top = {texts.text(other): max(value, LOWEST) for other, value in chances.top}
        top[texts.text(token)] = max(chances.log_probability, LOWEST)
    return {
        "tokens": [texts.text(token)],
        "token_logprobs": [None if chances is None else max(chances.log_probability, LOWEST)],
        "top_logprobs": [top],
        "text_offset": [offset],
    }


def joined(entries: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Entries of completions, one after the other."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for entry in entries for value in entry[name]] for name in names}
