"""A bar for work that takes minutes: bytes done, bytes a second, time left. On stderr, and only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge0_ref.app.report import open_console
from edge0_ref.app.shell import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

Advance = Callable[[int], None]


def bar_of(*columns: "ProgressColumn") -> "Progress":
    """What is done, a bar, these columns, and the time left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = open_console()
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn())
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def byte_bar(what: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Call what it gives with the bytes just done."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with bar_of(DownloadColumn(binary_units=True), TransferSpeedColumn()) as bar:
        task = bar.add_task(printable(what), total=total, completed=done)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def count_bar(what: str, total: int) -> Iterator[Advance]:
    """The same for things that are counted one by one."""
    from rich.progress import MofNCompleteColumn

    with bar_of(MofNCompleteColumn()) as bar:
        task = bar.add_task(printable(what), total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def loss_bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[float], None]]:
    """For steps of training: call what it gives with the loss of the step just done."""
    from rich.progress import MofNCompleteColumn

    with bar_of(MofNCompleteColumn()) as bar:
        task = bar.add_task(printable(what), total=total, completed=done)
        yield lambda loss: bar.update(task, advance=1, description=f"{what}, loss {loss:.4f}")
