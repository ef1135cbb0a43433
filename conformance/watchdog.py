"""[BCK-034] A backend that does not come back: the test it hangs in fails, the others go on."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TextIO

UNLIMITED = float("inf")


class Hang(BaseException):
    """Nothing came back in time. Not an Exception: nobody retries it, shrinks it or swallows it on its way."""


@dataclass(eq=False)
class Watchdog:
    """Limits how long one call may take.

    A call that runs Python is interrupted and fails its test. One that is stuck inside a library, or on a system
    without SIGALRM, hears no exception: after twice the limit the run ends, and `stream` says in which test.
    """

    seconds: float
    stream: TextIO
    _deadline: float = field(default=UNLIMITED, init=False)
    _what: str = field(default="", init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """Watch from a thread of its own, for the length of a run; inside, SIGALRM is the watchdog's."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        interrupts = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGALRM, self._interrupt) if interrupts else None
        watcher.start()
        try:
            yield self
        finally:
            self._over.set()
            watcher.join()
            if interrupts:
                signal.signal(signal.SIGALRM, before)

    @contextmanager
    def limited(self, what: str) -> Iterator[None]:
        """Raise Hang in here after the limit."""
        self._what, self._deadline = what, time.monotonic() + self.seconds
        interrupts = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
        try:
            if interrupts:
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
            yield
        finally:
            self._deadline = UNLIMITED
            if interrupts:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        raise Hang(f"{self._what} did not come back within {self.seconds:g} s{place_of(frame)}")

    def _watch(self) -> None:
        while not self._over.wait(min(0.5, self.seconds / 4)):
            if time.monotonic() > self._deadline + self.seconds:
                message = f"{self._what} did not come back within {2 * self.seconds:g} s and cannot be interrupted"
                print(f"\n{message}: the run ends here, unfinished", file=self.stream, flush=True)
                os._exit(1)


def place_of(frame: FrameType | None) -> str:
    """Where the interrupted code was."""
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f"; it was in {innermost.name}, {innermost.filename}:{innermost.lineno}"
