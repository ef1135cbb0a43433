"""A bar for work that takes minutes: bytes done, bytes a second, time left. On stderr, and only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def byte_bar(what: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Call what it gives with the bytes just done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def count_bar(what: str, total: int) -> Iterator[Advance]:
    """The same for things that are counted one by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def loss_bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[float], None]]:
    """For steps of training: call what it gives with the loss of the step just done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda loss: bar.update(task, advance=1, description=f"{what}, loss {loss:.4f}")
