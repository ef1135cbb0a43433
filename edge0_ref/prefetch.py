"""The read-ahead threads: (store, expert) -> slot buffer. A reader knows bytes and nothing else."""

import itertools
import queue
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Literal, NamedTuple

from edge0_ref.contract import Array, ExpertStore

Urgency = Literal["now", "ahead"]
_ORDER = {"now": 0, "ahead": 1, "stop": 2}


class _Job(NamedTuple):
    """Jobs compare by urgency, then by the order in which they were asked for."""

    order: int
    number: int
    future: "Future[None] | None"
    store: ExpertStore | None
    expert: int
    slot: Array | None


class Prefetcher:
    """[STO-030] One pool of threads for all layers. A read somebody waits for goes before reads for later."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"edge0-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, store: ExpertStore, expert: int, slot: Array, urgency: Urgency) -> "Future[None]":
        """Read `expert` into `slot`; the future ends with the read, or carries its error."""
        future: Future[None] = Future()
        self._jobs.put(_Job(_ORDER[urgency], next(self._numbers), future, store, expert, slot))
        return future

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job.future is None or job.store is None or job.slot is None:
                return
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.store.read_into(job.expert, job.slot)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(None)

    def close(self) -> None:
        """Let reads in flight end, then stop the threads."""
        for _ in self._threads:
            self._jobs.put(_Job(_ORDER["stop"], next(self._numbers), None, None, -1, None))
        for thread in self._threads:
            thread.join()
        self._threads = []


def wait(future: "Future[None]") -> float:
    """Wait for a read; the seconds it took. Raises what the read raised."""
    if future.done():
        future.result()
        return 0.0
    start = time.perf_counter()
    try:
        future.result()
    except CancelledError:
        raise RuntimeError("a read was cancelled while its expert was needed") from None
    return time.perf_counter() - start
