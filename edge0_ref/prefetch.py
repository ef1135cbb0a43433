"""The read-ahead threads: (store, expert) -> slot buffer. A reader knows bytes and nothing else."""

import itertools
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from edge0_ref.contract import Array, ExpertStore

Urgency = Literal["now", "ahead"]
_ORDER = {"now": 0, "ahead": 1, "stop": 2}
HAND_OVER_BYTES = 256 * 1024  # below, waking a thread costs more than the read


@dataclass(eq=False)
class Read:
    """One expert on its way into one slot. Whoever takes `claim` first, a reader or the caller, does the work."""

    store: ExpertStore
    expert: int
    slot: Array
    claim: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        """Read in this thread, unless another has claimed it."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.store.read_into(self.expert, self.slot)
        except BaseException as error:
            self.error = error
        self.ended.set()

    def wait(self) -> float:
        """[STO-031] Until the bytes are there; the seconds it took. Raises what the read raised.

        A read that no thread has begun is done by the caller itself, who would otherwise only sleep. One that failed
        is tried again: a read ahead is a hint, so what counts is whether it fails now that it is needed.
        """
        start = time.perf_counter()
        if not self.ended.is_set():
            self.run()
            self.ended.wait()
        if isinstance(self.error, Exception):
            self.store.read_into(self.expert, self.slot)
            self.error = None
        elif self.error is not None:
            raise self.error
        return time.perf_counter() - start

    def abandon(self) -> None:
        """Nobody needs it any more. If a reader is at work, wait: the slot must have no writer afterwards."""
        if not self.claim.acquire(blocking=False):
            self.ended.wait()


class Prefetcher:
    """[STO-030] One pool of threads for all layers. A read somebody waits for goes before reads for later."""

    def __init__(self, threads: int) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Read | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # ties in urgency go to the read asked for first
        self._threads = [
            threading.Thread(target=self._work, name=f"edge0-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, store: ExpertStore, expert: int, slot: Array, urgency: Urgency) -> Read:
        """Ask for `expert` in `slot`; nothing else may touch the slot until the read has ended or is abandoned.

        A small read that is needed now is left to the caller's `wait`.
        """
        read = Read(store, expert, slot)
        if urgency == "ahead" or slot.nbytes >= HAND_OVER_BYTES:
            self._queue.put((_ORDER[urgency], next(self._numbers), read))
        return read

    def _work(self) -> None:
        while True:
            _, _, read = self._queue.get()
            if read is None:
                return
            read.run()

    def close(self) -> None:
        """Let reads in flight end, then stop the threads."""
        for _ in self._threads:
            self._queue.put((_ORDER["stop"], next(self._numbers), None))
        for thread in self._threads:
            thread.join()
        self._threads = []
