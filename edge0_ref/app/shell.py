"""What all commands share: how one is registered, what it tells people, and options that mean the same everywhere."""

import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge0_ref.errors import UsageError

if TYPE_CHECKING:
    from edge0_ref.app.api import Model

app = typer.Typer(
    help="Mixture-of-Experts models that do not fit in memory, streamed from the SSD.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelFolder = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="A folder, edge0-35b, edge0-8b or OWNER/NAME of the hub; default: embedded."
    ),
]
PromptText = Annotated[str | None, typer.Option("--prompt", help="The text to go on from.")]
PromptIds = Annotated[str | None, typer.Option("--prompt-ids", help="The same as token ids: 5,6,7.")]
BackendName = Annotated[str, typer.Option("--backend", help="A backend's name, or package.module:factory.")]
DtypeName = Annotated[
    str | None,
    typer.Option("--dtype", help="Of activations, float32 or bfloat16, where a backend has both; default: its choice."),
]
AdapterFolder = Annotated[
    str | None, typer.Option("--adapters", help="Adapter folder; default: those inside the model's folder.")
]
NoAdapters = Annotated[bool, typer.Option("--no-adapters", help="Run without prerouter heads and LoRA.")]
ExecutorName = Annotated[str, typer.Option("--executor", help="exact, staged, hot or whole_layer.")]
SlotCount = Annotated[int | None, typer.Option("--slots", help="Expert slots a layer; default: by plan.")]
MemoryBudget = Annotated[str | None, typer.Option("--memory", help="Budget of the whole process, such as 3GiB.")]
ReadModeName = Annotated[
    str | None,
    typer.Option(
        "--read-mode", help="mmap, pread or direct; default: pread if all fits, else as `edge0 doctor` found."
    ),
]
PackedFile = Annotated[
    str | None,
    typer.Option("--packed", help="Sidecar of `edge0 pack`, or its folder; default: MODEL/experts.edge0; or none."),
]
CacheHome = Annotated[str | None, typer.Option(envvar="XDG_CACHE_HOME", hidden=True)]
KeepBytes = Annotated[
    str | None,
    typer.Option(
        "--keep", help="Memory for prefixes of conversations; default: 512MiB, or an eighth of --memory. 0 is off."
    ),
]
KeepDiskBytes = Annotated[
    str, typer.Option("--keep-disk", help="Disk for them; `edge0 sessions` lists them; 0 is off.")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this mass; 1 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens this likely relative to the best; 0 is off.")]
Options = Mapping[str, Any]  # all of a command line's
MOST_DIGITS = 18  # of a whole number
DIGITS = f"of {MOST_DIGITS} digits at most"
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line of stdout.")]


class CarriedError(Exception):
    """Carries Ctrl-C and a broken pipe past typer, which would turn them into exit codes of its own."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command."""
    app.command()(carrying(function))
    return function


def carrying(function: Callable[..., None]) -> Callable[..., None]:
    """A parameter named `options` is none of the command line's: it is all of those, by name."""
    own = signature(function)
    shown = [parameter for name, parameter in own.parameters.items() if name != "options"]

    @wraps(function)
    def guarded(**options: Any) -> None:
        more = {"options": options} if "options" in own.parameters else {}
        try:
            function(**options, **more)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise CarriedError(error) from error

    guarded.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return guarded


def tell(text: str) -> None:
    """Something to know, on stderr."""
    for line in text.splitlines():
        print(f"edge0: {printable(line)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    r"""Names of files come from anywhere, and a terminal does what control characters say.

    >>> print(printable("Ä \x1b[2J"))
    Ä \x1b[2J
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def cache_folder(home: str | None) -> Path | None:
    """Where what was measured on this machine is kept; None without a home."""
    try:
        return Path(home or Path.home() / ".cache") / "edge0"
    except RuntimeError:
        return None


def model_of(options: Options, **others: Any) -> "Model":
    """What a command is to run: its options that have the name of a parameter of `open_model` are that parameter.

    others: parameters of it that are no options. Raises what `open_model` raises.
    """
    from edge0_ref.app.api import open_model

    chosen = {name: value for name, value in options.items() if name in signature(open_model).parameters}
    chosen["use_adapters"] = not options["no_adapters"]
    if "cache_home" in options:
        chosen["cache"] = cache_folder(options["cache_home"])
    return open_model(**chosen | others, notify=tell)


def choose_numbers(name: str, text: str | None) -> list[int | None]:
    """Whole numbers above 0 between commas; None if there is no text. Raises UsageError."""
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not is_number(part) or not int(part):
            shown = f"{name} {reprlib.repr(text)}: {reprlib.repr(part)}"
            raise UsageError(f"{shown} is not a whole number above 0, {DIGITS}; wanted 4, or 2,4,8")
    return [int(part) for part in parts]


def is_number(text: str) -> bool:
    """A whole number with fewer digits than would be too many for Python."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def choose_fields(texts: list[str], **named: int | None) -> dict[str, int]:
    """Fields of config.json to change. Raises UsageError."""
    fields = {name: value for name, value in named.items() if value is not None}
    for text in texts:
        name, _, value = text.partition("=")
        if not is_number(value):
            shown = f"--set {reprlib.repr(text)}"
            raise UsageError(f"{shown}: wanted a field and a whole number, {DIGITS}: num_experts=512")
        fields[name] = int(value)
    return fields


def choose_prompt(text: str | None, ids: str | None) -> str | list[int]:
    """The one prompt that was given. Raises UsageError."""
    if (text is None) == (ids is None):
        raise UsageError("wanted one prompt: --prompt TEXT, or --prompt-ids 5,6,7")
    if ids is None:
        return text or ""
    parts = [part.strip() for part in ids.split(",") if part.strip()]
    wrong = [part for part in parts if not is_number(part)]
    if wrong:
        raise UsageError(f"--prompt-ids: {reprlib.repr(wrong[0])} is not a token id; wanted 5,6,7")
    return [int(part) for part in parts]
