"""The read-ahead threads: (store, expert) -> slot buffer. A reader knows bytes and nothing else."""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal
from weakref import ref

from edge0_ref.contract import Array, ChecksApart, ExpertStore
from edge0_ref.errors import ReadError

Urgency = Literal["now", "ahead"]
HAND_OVER_BYTES = 256 * 1024  # below, waking a thread costs more than the read
MOST_UNCHECKED = 1024  # reads that are remembered for a moment of waiting; older ones are checked when they are needed


@dataclass(eq=False)
class Read:
    """One expert on its way into one slot. Whoever takes `claim` first, a reader or the caller, does the work.

    apart: the store, if checking the bytes is left to the caller. busy: held by a reader while it may be at work.
    next_up: readers begin it before any read ahead. loaded: the bytes are there. done: and they have been checked.
    Locks, as an event costs each read several times as much. The caller may be interrupted at any line, a reader is
    not; so nobody waits for the caller, and a lock that an interrupted caller has kept is one it may take again.
    """

    store: ExpertStore
    expert: int
    slot: Array
    apart: ChecksApart | None = None
    claim: threading.Lock = field(default_factory=threading.Lock)
    busy: Any = field(default_factory=threading.RLock)
    next_up: bool = False
    loaded: bool = False
    done: bool = False

    def run(self) -> None:
        """Read in a reader's thread, unless the caller has claimed it. What fails is not done."""
        if self.busy.acquire(blocking=False):  # else the caller is here, so it has claimed the read
            if self.claim.acquire(blocking=False):
                with suppress(BaseException):
                    self._fill()
            self.busy.release()

    def _fill(self) -> None:
        if self.apart is None:
            self.store.read_into(self.expert, self.slot)
            self.done = True
        else:
            self.apart.read_unchecked(self.expert, self.slot)
        self.loaded = True

    def check(self) -> None:
        """[STO-033] If the bytes are there and nobody has looked at them. For the caller: no reader is at the slot."""
        if self.apart is not None and self.loaded and not self.done:
            self.apart.check(self.expert, self.slot)
            self.done = True

    def wait(self) -> None:
        """[STO-031] Until the bytes are there, and checked. Raises what the read raises.

        A read that no thread has begun is done by the caller itself, who would otherwise only sleep. One that failed
        is tried again: a read ahead is a hint, so what counts is whether it fails now that it is needed.
        """
        with suppress(Exception):
            if self.claim.acquire(blocking=False):
                self._fill()
            else:
                self.join()
            self.check()
        if not self.done:
            self.store.read_into(self.expert, self.slot)
            self.loaded = self.done = True

    def join(self) -> None:
        """Until the reader that has claimed it, if one has, is done with the slot."""
        with self.busy:
            pass

    def abandon(self) -> None:
        """Nobody needs it any more. If a reader is at work, wait: the slot must have no writer afterwards."""
        if not self.claim.acquire(blocking=False):
            self.join()
        self.loaded = False  # another expert's bytes are not to be checked as this one's


class Prefetcher:
    """[STO-030] One pool of threads for all layers. A read somebody waits for goes before reads for later.

    One thread at a time submits. Readers start with the first reads they are given, up to `threads` of them.
    """

    def __init__(self, threads: int) -> None:
        self._now, self._ahead = deque[Read](), deque[Read]()
        self._asked: SimpleQueue[bool] = SimpleQueue()  # True for each read in the two, then False: threads stop
        self._unchecked = deque[ref[Read]](maxlen=MOST_UNCHECKED)  # some are checked or gone by now
        self._most, self._threads = threads, list[threading.Thread]()

    def submit(self, read: Read, urgency: Urgency) -> Read:
        """Ask for a read, and return it; nothing else may touch its slot until it has ended or is abandoned.

        A small one that is needed now is left to the caller's `wait`. Raises ReadError where no thread can be had.
        Whoever may be interrupted keeps the read before it is asked for: else a reader may fill a slot of another.
        """
        if urgency == "ahead" or read.slot.nbytes >= HAND_OVER_BYTES:
            if len(self._threads) < self._most:
                self._start_a_reader()
            read.next_up = urgency == "now"
            (self._now if urgency == "now" else self._ahead).append(read)
            self._asked.put(True)
        return read

    def wait(self, read: Read) -> float:
        """[STO-033] `read.wait()`; the seconds it took. While a reader is at it, or will be next, others are checked.

        A read ahead that no reader has begun does not wait for that: its turn may be far off, and the caller begins it.
        """
        start = time.perf_counter()
        while (read.next_up or read.claim.locked()) and not read.loaded and self._unchecked:
            other = self._unchecked.popleft()()
            with suppress(Exception):  # whoever needs it reads it again, and tells
                if other is not None:
                    other.check()
        read.wait()
        return time.perf_counter() - start

    def _start_a_reader(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._work, name=f"edge0-reader-{number}", daemon=True)
        try:
            self._threads.append(thread)  # one that runs and is not known is not waited for by `close`
            thread.start()
        except BaseException as error:
            if thread.ident is None:
                self._threads = [known for known in self._threads if known is not thread]
            if not isinstance(error, RuntimeError):
                raise
            raise ReadError(f"reader thread {number + 1} of {self._most} cannot be started: {error}") from None

    def _work(self) -> None:
        while self._asked.get():
            self._serve()
        self._asked.put(False)  # for the next thread, also for one that an interrupt has kept from being known

    def _serve(self) -> None:
        """One read. In a function of its own: a thread that sleeps keeps no read, and so no memory of slots."""
        read = self._next()
        read.run()
        if read.loaded and not read.done:
            self._unchecked.append(ref(read))

    def _next(self) -> Read:
        """There is one for every thread that was asked: reads are queued before they are announced."""
        try:
            return self._now.popleft()
        except IndexError:
            return self._ahead.popleft()

    def close(self) -> None:
        """Let reads that were asked for end, then stop the threads."""
        self._asked.put(False)
        for thread in self._threads:
            thread.join()
        self._most, self._threads = 0, []
        self._unchecked.clear()
