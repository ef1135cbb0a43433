"""A model's text, taken apart: what it thought, what it says, which tools it calls.

    <think> thought </think>   said   <tool_call> call </tool_call>  <tool_call> call </tool_call>

However the text is cut into pieces, the parts are the same: a mark is recognized when it is complete, and what might be
the beginning of one is held back. Space around a thought, and around calls, belongs to neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from edge0_ref.app.serve.tool_calls import CLOSE, OPEN, Call, Schemas, read_call
from edge0_ref.engine.stops import overlap
from edge0_ref.tokens import END_OF_THOUGHT, THINK


@dataclass(frozen=True)
class Thought:
    """Text of a thought."""

    text: str


@dataclass(frozen=True)
class Said:
    """Text of the answer."""

    text: str


Part = Thought | Said | Call


class Parts:
    """Takes one text apart. thinking: it begins inside a thought; schemas: its tools, None if none are to be called.

    one_call: what follows the first call is dropped.

    >>> parts = Parts(thinking=True)
    >>> [*parts.push("two and"), *parts.push(" two </th"), *parts.push("ink>\\n\\nFour.")]
    [Thought(text='two and'), Thought(text=' two'), Said(text='Four.')]
    """

    def __init__(self, thinking: bool = False, schemas: Schemas | None = None, one_call: bool = False) -> None:
        self._schemas, self._one_call = schemas, one_call
        self._held = self._space = ""  # space that stood before a call
        self._trim = thinking  # space that comes next is dropped
        self._read = self._thought if thinking else self._start

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        self._held += text
        return self._advance(last=False)

    def finish(self) -> list[Part]:
        """What was held back. A call that was never closed is text."""
        return self._advance(last=True)

    def _advance(self, last: bool) -> list[Part]:
        found: list[Part] = []
        while True:
            read = self._read
            found += (part for part in read(last) if isinstance(part, Call) or part.text)
            if self._read == read:
                return found

    def _start(self, last: bool) -> Iterator[Part]:
        """Nothing but space so far, which is the answer's own unless a thought begins."""
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._trim, self._read = text.removeprefix(THINK), True, self._thought
        elif last or not THINK.startswith(text):
            self._read = self._answer
        return iter(())

    def _thought(self, last: bool) -> Iterator[Part]:
        before, mark, after = self._held.partition(END_OF_THOUGHT)
        if mark:
            yield Thought(self._trimmed(before).rstrip())
            self._held, self._trim, self._read = after, True, self._answer
        elif last:
            yield Thought(self._trimmed(before).rstrip())
            self._held = ""
        else:
            yield Thought(self._certain(END_OF_THOUGHT))

    def _answer(self, last: bool) -> Iterator[Part]:
        before, mark, after = self._held.partition(OPEN) if self._schemas is not None else (self._held, "", "")
        if mark:
            said = self._trimmed(before)
            yield Said(said.rstrip())
            self._space = said[len(said.rstrip()) :]
            self._held, self._read = after, self._call
        elif last or self._schemas is None:
            yield Said(self._trimmed(before))
            self._held = ""
        else:
            yield Said(self._certain(OPEN))

    def _call(self, last: bool) -> Iterator[Part]:
        inner, mark, after = self._held.partition(CLOSE)
        if not (mark or last):
            return
        call = read_call(inner, self._schemas or {}) if mark else None
        if call:
            yield call
            self._trim = True
        else:
            yield Said(self._space + OPEN + inner + mark)
        self._held, self._read = after, self._nothing if call and self._one_call else self._answer

    def _nothing(self, last: bool) -> Iterator[Part]:
        self._held = ""
        return iter(())

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

    def _certain(self, mark: str) -> str:
        """Takes what neither the mark nor space before it can begin with."""
        text = self._trimmed(self._held)
        keep = overlap(text, mark)
        certain = text[: len(text) - keep].rstrip()
        self._held = text[len(certain) :]
        return certain
