"""What a command shows on a terminal."""

import os
import select
import time

from tests.app.command import TIMEOUT


def read_until(terminal: int, words: str, seconds: float = TIMEOUT) -> str:
    """What it shows up to these words. Raises TimeoutError, and OSError when the other side closes before."""
    shown, end = "", time.monotonic() + seconds
    while words not in shown:
        if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError(f"no {words!r} within {seconds:g} s, but {shown!r}")
        shown += os.read(terminal, 65536).decode("utf-8", "replace")
    return shown


def read_all(terminal: int) -> str:
    """Everything a terminal was sent until its other side closed."""
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(terminal)
    return shown.decode()
