"""The read-ahead threads: (store, expert) -> slot buffer. A reader knows bytes and nothing else."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

from edge0_ref.contract import Array, ExpertStore

Urgency = Literal["now", "ahead"]
HAND_OVER_BYTES = 256 * 1024  # below, waking a thread costs more than the read


def held_lock() -> threading.Lock:
    """For others to wait on until whoever made it releases it: an event costs each read several times as much."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Read:
    """One expert on its way into one slot. Whoever takes `claim` first, a reader or the caller, does the work.

    unfinished: held until the read has ended.
    """

    store: ExpertStore
    expert: int
    slot: Array
    claim: threading.Lock = field(default_factory=threading.Lock)
    unfinished: threading.Lock = field(default_factory=held_lock)
    error: BaseException | None = None

    def run(self) -> None:
        """Read in this thread, unless another has claimed it."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.store.read_into(self.expert, self.slot)
        except BaseException as error:
            self.error = error
        self.unfinished.release()

    def join(self) -> None:
        """Until the read has ended, well or not."""
        with self.unfinished:
            pass

    def wait(self) -> float:
        """[STO-031] Until the bytes are there; the seconds it took. Raises what the read raised.

        A read that no thread has begun is done by the caller itself, who would otherwise only sleep. One that failed
        is tried again: a read ahead is a hint, so what counts is whether it fails now that it is needed.
        """
        start = time.perf_counter()
        if self.unfinished.locked():
            self.run()
            self.join()
        if isinstance(self.error, Exception):
            self.store.read_into(self.expert, self.slot)
            self.error = None
        elif self.error is not None:
            raise self.error
        return time.perf_counter() - start

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

    def submit(self, store: ExpertStore, expert: int, slot: Array, urgency: Urgency) -> Read:
        """Ask for `expert` in `slot`; nothing else may touch the slot until the read has ended or is abandoned.

        A small read that is needed now is left to the caller's `wait`.
        """
        read = Read(store, expert, slot)
        if urgency == "ahead" or slot.nbytes >= HAND_OVER_BYTES:
            (self._now if urgency == "now" else self._ahead).append(read)
            self._asked.put(True)
            if len(self._threads) < self._most:
                self._start_a_reader()
        return read

    def _start_a_reader(self) -> None:
        name = f"edge0-reader-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
        self._threads[-1].start()

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
