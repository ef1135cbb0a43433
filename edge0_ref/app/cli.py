"""The command `edge0`: how it starts, and how errors leave the process. Its options are in `*_commands.py`.

[ENG-065] Exit codes: 0; 2 for every error that edge0 names, in one line on stderr; 130 after Ctrl-C; 141 if nobody
reads the output any more.
"""

import os
import sys
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
from edge0_ref.app.shell import CarriedError, app
from edge0_ref.errors import Edge0Error


def main() -> NoReturn:
    """Entry point of the command."""
    # a kernel's idle thread stays awake for a millisecond, about what lies between two kernels, then leaves its core
    # to readers: by default it would spin all through a wait
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = run_command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # nobody reads stdout any more: quiet, with the code of SIGPIPE; Python must not try to flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def run_command(arguments: list[str]) -> int:
    """The exit code of a command, with named errors told. Any other exception is a bug and keeps its traceback."""
    try:
        code = app(args=arguments or ["--help"], prog_name="edge0", standalone_mode=False)
    except CarriedError as leaving:
        raise leaving.reason from None
    except Edge0Error as error:
        return fail(str(error))
    except Exception as error:
        # what typer raises for a wrong command line has this method; its classes move between versions
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return fail(message())
    return code if isinstance(code, int) else 0


def fail(message: str) -> int:
    """One line on stderr."""
    print(f"edge0: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
