"""Text as it comes, and one live line below it: tokens a second, bytes read, hit rate, seconds waited."""

import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from edge0_ref.engine.memory import size_text
from edge0_ref.engine.session import Result

REFRESHES_PER_SECOND = 12


@runtime_checkable
class Screen(Protocol):
    """Where the pieces of a text go."""

    def write(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainScreen:
    """stdout, flushed after every piece."""

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        pass


class LiveScreen:
    """[ENG-060] The live line is on stderr if only that is a terminal; if both are, it is below the text.

    Then the lines of the text are printed above a region that holds the line being written, and the live line.
    """

    def __init__(self, result: Callable[[], Result], *, text_on_terminal: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._result, self._text_on_terminal = result, text_on_terminal
        self._line = ""  # the line being written
        self._live = Live(
            console=Console(stderr=not text_on_terminal, highlight=False, markup=False, emoji=False),
            get_renderable=self._region,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def write(self, text: str) -> None:
        if not self._text_on_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._live.console.print(line, soft_wrap=True)

    def _region(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        status = Text(status_line(self._result()), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(Text(self._line), status) if self._text_on_terminal else status

    def close(self) -> None:
        self._live.stop()
        if self._text_on_terminal:
            self._live.console.print(self._line, soft_wrap=True, end="")


def open_screen(result: Callable[[], Result]) -> Screen:
    """A live line needs a terminal on stderr."""
    if not sys.stderr.isatty():
        return PlainScreen()
    return LiveScreen(result, text_on_terminal=sys.stdout.isatty())


def status_line(result: Result) -> str:
    """One line on how it goes."""
    if not result.token_ids:
        return f"reading a prompt of {result.prompt_tokens} tokens · {size_text(result.bytes_read)} read"
    return (
        f"{len(result.token_ids)} tokens · {result.tokens_per_second:.1f} tokens/s · "
        f"{size_text(result.bytes_read)} read · hit rate {result.hit_rate:.0%} · waited {result.wait_seconds:.2f} s"
    )
