"""The command `edge0`, and `python -m edge0_ref`: Ctrl-C ends it quietly from the first heavy import on."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """[ENG-065] Entry point of the command."""
    try:
        from edge0_ref.app import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
