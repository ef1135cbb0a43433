"""The command `edge0`: how it starts, and how errors leave the process. Its options are in `*_commands.py`.

[ENG-065] Exit codes: 0; 2 for every error that edge0 names, in one line on stderr; 130 after Ctrl-C; 141 if nobody
reads the output any more; 143 and 129 after SIGTERM and SIGHUP.
"""

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from edge0_ref.app import text_commands  # noqa: F401  (registers itself)

# isort: split
from edge0_ref.app import chat_commands  # noqa: F401

# isort: split
from edge0_ref.app import hub_commands  # noqa: F401  (the help lists commands in this order)

# isort: split
from edge0_ref.app import serve_commands  # noqa: F401

# isort: split
from edge0_ref.app import measure_commands  # noqa: F401

# isort: split
from edge0_ref.app import train_commands  # noqa: F401
from edge0_ref.app.shell import CarriedError, app, printable
from edge0_ref.errors import Edge0Error

NO_PLACE = "no locator available"  # numba's words


def main() -> NoReturn:
    """Entry point of the command."""
    # a kernel's idle thread stays awake for a millisecond, about what lies between two kernels, then leaves its core
    # to readers: by default it would spin all through a wait
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    open_missing_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has one ignored
            signal.signal(number, leave)
    sys.exit(run(sys.argv[1:]))


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """End as Ctrl-C does: what is half done is undone, saved where it can be gone on with, and no process is left."""
    sys.exit(128 + number)


def open_missing_streams() -> None:
    """Python has None for a stream that was closed before it began; a file opened later would take its number.

    No stdin is the end of the input, no stderr tells nobody; with no stdout there is nothing to do a command for.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  (until the process ends)
    if sys.stdout is None:
        sys.exit(fail("stdout is closed") if sys.stderr else 2)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # a character that the encoding lacks is no reason to end a text
        sys.stdout.reconfigure(errors="replace")


def run(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = run_command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # nobody reads stdout any more: quiet, with the code of SIGPIPE
        drop_output()
        return 141
    except OSError as error:
        return fail_by_system(error)
    return code


def fail_by_system(error: OSError) -> int:
    """What the operating system refuses, with the file it was asked for; without one it may have been stdout."""
    what = error.strerror or str(error)
    if error.filename is not None:
        return fail(f"{error.filename}: {what}")
    try:
        sys.stdout.flush()  # what could not be written is still held
    except OSError:
        drop_output()
        return fail(f"stdout: {what}")
    return fail(what)


def drop_output() -> None:
    """Python flushes stdout once more at its end, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(arguments: list[str]) -> int:
    """The exit code of a command, with named errors told. Raises OSError; any other exception is a bug."""
    try:
        code = app(args=arguments or ["--help"], prog_name="edge0", standalone_mode=False)
    except CarriedError as leaving:
        raise leaving.reason from None
    except Edge0Error as error:
        return fail(with_place(str(error)))
    except OSError:
        raise
    except Exception as error:
        # what typer raises for a wrong command line has this method; its classes move between versions
        message = getattr(error, "format_message", None)
        if message is not None:
            return fail(message())
        if NO_PLACE not in str(error):
            raise
        return fail(with_place(str(error)))
    return code if isinstance(code, int) else 0


def with_place(message: str) -> str:
    """Compiled kernels are kept beside edge0's own files or in a home; who can write neither can name a place."""
    hint = "; NUMBA_CACHE_DIR=FOLDER in the environment names one that compiled kernels can be written to"
    return message + (hint if NO_PLACE in message else "")


def fail(message: str) -> int:
    """One line on stderr; the exit code says the same where nothing can be written there."""
    with suppress(OSError):
        print(f"edge0: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
