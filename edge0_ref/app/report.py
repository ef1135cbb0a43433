"""Tables for people, on stderr."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edge0_ref.app.shell import printable
from edge0_ref.engine.memory import size_text
from edge0_ref.engine.session import Result

if TYPE_CHECKING:
    from rich.console import Console


def open_console(width: int | None = None) -> "Console":
    """stderr for tables. width: where it is no terminal. Names of files are text: brackets and colons in them too."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False)
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def print_table(title: str, rows: Sequence[tuple[str, int | str]]) -> None:
    """Two columns; whole numbers are bytes."""
    from rich.table import Table

    table = Table(title=printable(title), show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for what, value in rows:
        table.add_row(what, size_text(value) if isinstance(value, int) else printable(value))
    open_console().print(table)


def measure_rows(measures: Mapping[str, float]) -> list[tuple[str, str]]:
    """What a decoder measured itself: names end in their unit."""
    return [
        (name.removesuffix("_bytes").replace("_", " "), size_text(round(value)))
        if name.endswith("_bytes")
        else (name.replace("_", " "), f"{value:.3g}")
        for name, value in measures.items()
    ]


def result_rows(result: Result) -> list[tuple[str, int | str]]:
    """What a text cost."""
    return [
        ("prompt", f"{result.prompt_tokens} tokens, {result.prefill_tokens_per_second:.1f} tokens/s"),
        ("text", f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tokens/s"),
        ("finished by", result.finish_reason or "-"),
        ("first token after", f"{result.time_to_first_token:.3f} s"),
        ("bytes read, as asked for", result.bytes_read),
        ("experts asked for", str(result.reads)),
        ("needed: in a slot", f"{result.hits} ({result.hit_rate:.1%})"),
        ("needed: read ahead", str(result.read_ahead)),
        ("needed: read on demand", str(result.on_demand)),
        ("dropped", str(result.drops)),
        ("waited for reads", f"{result.wait_seconds:.3f} s"),
        ("graphs evaluated", str(result.evaluations)),
        ("peak memory of the process", result.peak_bytes),
    ]
