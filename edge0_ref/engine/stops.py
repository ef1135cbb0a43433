"""Stop strings: text is held back while it could be the beginning of one."""

from collections.abc import Sequence


class StopStrings:
    """[ENG-020] Passes text on up to the first stop string, however the text is cut into pieces.

    The stop string that is complete first ends the text; of two complete at the same character, the longer one. No
    part of it is ever passed on. No stop string is empty.

    >>> stops = StopStrings(["\\n\\n"])
    >>> stops.push("end.\\n"), stops.push("\\nmore"), stops.hit
    ('end.', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Text that belongs to no stop string for certain."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
