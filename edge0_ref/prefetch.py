"""The read-ahead threads: (store, expert) -> slot buffer. A reader knows bytes and nothing else."""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

from edge0_ref.contract import Array, ExpertStore
from edge0_ref.errors import ReadError

Urgency = Literal["now", "ahead"]
HAND_OVER_BYTES = 256 * 1024  # below, waking a thread costs more than the read


@dataclass(eq=False)
class Read:
    """One expert on its way into one slot. Whoever takes `claim` first, a reader or the caller, does the work.

    busy: held by a reader while it may be at work. done: the bytes are there. Locks, as an event costs each read
    several times as much. The caller may be interrupted at any line, a reader is not; so nobody waits for the caller,
    and a lock that an interrupted caller has kept is one it may take again.
    """

    store: ExpertStore
    expert: int
    slot: Array
    claim: threading.Lock = field(default_factory=threading.Lock)
    busy: Any = field(default_factory=threading.RLock)
    done: bool = False

    def run(self) -> None:
        """Read in a reader's thread, unless the caller has claimed it. What fails is not done."""
        if self.busy.acquire(blocking=False):  # else the caller is here, so it has claimed the read
            if self.claim.acquire(blocking=False):
                with suppress(BaseException):
                    self._fill()
            self.busy.release()

    def _fill(self) -> None:
        self.store.read_into(self.expert, self.slot)
        self.done = True

    def wait(self) -> float:
        """[STO-031] Until the bytes are there; the seconds it took. Raises what the read raises.

        A read that no thread has begun is done by the caller itself, who would otherwise only sleep. One that failed
        is tried again: a read ahead is a hint, so what counts is whether it fails now that it is needed.
        """
        start = time.perf_counter()
        if self.claim.acquire(blocking=False):
            with suppress(Exception):
                self._fill()
        else:
            self.join()
        if not self.done:
            self._fill()
        return time.perf_counter() - start

    def join(self) -> None:
        """Until the reader that has claimed it, if one has, is done with the slot."""
        with self.busy:
            pass

    def abandon(self) -> None:
        """Nobody needs it any more. If a reader is at work, wait: the slot must have no writer afterwards."""
        if not self.claim.acquire(blocking=False):
            self.join()


class Prefetcher:
    """[STO-030] One pool of threads for all layers. A read somebody waits for goes before reads for later.

    One thread at a time submits. Readers start with the first reads they are given, up to `threads` of them.
    """

    def __init__(self, threads: int) -> None:
        self._now, self._ahead = deque[Read](), deque[Read]()
        self._asked: SimpleQueue[bool] = SimpleQueue()  # True for each read in the two, False for a thread to stop
        self._most, self._threads = threads, list[threading.Thread]()

    def submit(self, read: Read, urgency: Urgency) -> Read:
        """Ask for a read, and return it; nothing else may touch its slot until it has ended or is abandoned.

        A small one that is needed now is left to the caller's `wait`. Raises ReadError where no thread can be had.
        Whoever may be interrupted keeps the read before it is asked for: else a reader may fill a slot of another.
        """
        if urgency == "ahead" or read.slot.nbytes >= HAND_OVER_BYTES:
            if len(self._threads) < self._most:
                self._start_a_reader()
            (self._now if urgency == "now" else self._ahead).append(read)
            self._asked.put(True)
        return read

    def _start_a_reader(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._work, name=f"edge0-reader-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ReadError(f"reader thread {number + 1} of {self._most} cannot be started: {error}") from None
        self._threads.append(thread)

    def _work(self) -> None:
        while self._asked.get():
            self._next().run()

    def _next(self) -> Read:
        """There is one for every thread that was asked: reads are queued before they are announced."""
        try:
            return self._now.popleft()
        except IndexError:
            return self._ahead.popleft()

    def close(self) -> None:
        """Let reads that were asked for end, then stop the threads."""
        for _ in self._threads:
            self._asked.put(False)
        for thread in self._threads:
            thread.join()
        self._most, self._threads = 0, []
