"""How fast this machine reads memory and files, and how fast a backend runs experts.

Each the best of a few, because a limit is wanted: whatever else the machine does can only take away from it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np

from edge0_ref.app.page_cache import forget_pages
from edge0_ref.bits import narrow
from edge0_ref.contract import Array, Backend, ExpertLayout, ReadMode, Routing
from edge0_ref.readers import open_reader, page_rows

MEMORY_BYTES = 256 * 2**20  # a thread's array: far more than any cache
PROBE_EXPERTS = 64  # for a backend: of the published models, more bytes than most caches hold
ROUNDS = 3
SECONDS = 0.5  # of reading, for one figure


@numba.njit(cache=True, nogil=True)
@no_type_check
def sum_words(words):
    """Reads memory and does almost nothing else: uint64 [n] -> their sum mod 2^64."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def in_threads(works: Sequence[Callable[[], Any]]) -> float:
    """Run all at once; seconds until the last ends. Raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - start


def memory_rate(nbytes: int = MEMORY_BYTES) -> float:
    """Bytes a second that two threads read together, each from an array of its own."""
    arrays = [np.ones(nbytes // 8, np.uint64) for _ in range(2)]
    sum_words(arrays[0][:1])  # compiles
    seconds = min(in_threads([partial(sum_words, words) for words in arrays]) for _ in range(ROUNDS))
    return len(arrays) * nbytes / seconds


@dataclass(frozen=True)
class BlockReads:
    """Reading blocks of a file at random places, each place once, so that no read is served by the one before.

    cold: whether the file is dropped from the page cache first.
    """

    path: Path
    block: int
    seed: int = 0
    cold: bool = True

    def rate(self, mode: ReadMode, depth: int, seconds: float = SECONDS) -> float:
        """Bytes a second with `depth` threads. Raises ReadError where the mode is refused."""
        count = self.path.stat().st_size // self.block
        places = iter(np.random.default_rng([self.seed, depth]).permutation(count).tolist())
        reader, lock = open_reader(self.path, mode), threading.Lock()
        if self.cold:
            forget_pages([self.path])
        done = [0] * depth
        deadline = time.perf_counter() + seconds

        def work(thread: int) -> None:
            memory = page_rows(1, self.block)[0]
            while time.perf_counter() < deadline:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                reader.read_into(place * self.block, memory.data)
                done[thread] += self.block

        try:
            spent = in_threads([partial(work, thread) for thread in range(depth)])
        finally:
            reader.close()
        return sum(done) / spent


@dataclass(frozen=True)
class SameExperts:
    """A store of equal experts in memory: what is left of a call is the backend's own cost."""

    num_experts: int
    layout: ExpertLayout
    content: Array

    def read_into(self, expert: int, slot: Array) -> None:
        slot[:] = self.content


def probe_expert(layout: ExpertLayout) -> Array:
    """An expert's bytes: random codes, small equal coefficients."""
    content = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    expert = layout.view(content)
    for matrix in (expert.gate, expert.up, expert.down):
        matrix.scales[:] = narrow(np.full(matrix.scales.shape, 1e-3, np.float32), matrix.scales.dtype)
        matrix.biases[:] = narrow(np.full(matrix.biases.shape, -8e-3, np.float32), matrix.biases.dtype)
    return content


def kernel_rate(backend: Backend[Any], layout: ExpertLayout, top_k: int) -> float:
    """Bytes of experts a second that a backend computes with for one token, all of them in slots."""
    count = -(-PROBE_EXPERTS // top_k) * top_k
    store = SameExperts(count, layout, probe_expert(layout))
    executor = backend.executor("staged", store, count)
    x = backend.from_numpy(np.ones((1, layout.hidden), np.float32))
    weights = np.full((1, top_k), 1 / top_k, np.float32)
    routings = [Routing(np.arange(first, first + top_k)[None], weights) for first in range(0, count, top_k)]
    try:
        for routing in routings:
            backend.to_numpy(executor(x, routing))  # compiles, and fills the slots
        fastest, deadline = float("inf"), time.perf_counter() + SECONDS
        while fastest == float("inf") or time.perf_counter() < deadline:
            start = time.perf_counter()
            for routing in routings:
                backend.to_numpy(executor(x, routing))
            fastest = min(fastest, time.perf_counter() - start)
    finally:
        executor.close()
    return count * layout.nbytes / fastest
