"""A call or hint that is interrupted, at whatever line, spoils no later one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from edge0_ref.contract import ExecutorKind, Routing
from edge0_ref.errors import ReadError
from edge0_ref.executors import make_executor, staged
from edge0_ref.prefetch import HAND_OVER_BYTES, Prefetcher, Read
from tests.ref.memory_store import LAYOUT, MemoryStore

EXPERTS, SLOTS = 7, 4
FOLDER = Path(staged.__file__).parent
FILES = {
    str(path) for path in (*FOLDER.glob("*.py"), *(FOLDER.parent / name for name in ("prefetch.py", "residency.py")))
}
pytestmark = pytest.mark.usefixtures("unchecked")


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Ctrl-C at the line-th line that an executor runs in this thread."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def routing(*experts: int) -> Routing:
    chosen = np.array([experts], np.int64)
    return Routing(chosen, np.full(chosen.shape, 0.5, np.float32))


X = np.random.default_rng(0).standard_normal((1, LAYOUT.hidden)).astype(np.float32)
CALLS = (routing(0, 1), routing(2, 3), routing(1, 4), routing(5, 0))


def answers(executor: Any) -> list[bytes]:
    return [executor(X, call).tobytes() for call in CALLS]


@pytest.mark.spec("EXE-028")
@pytest.mark.parametrize("kind", ["staged", "hot", "whole_layer"])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_call_interrupted_at_any_line_spoils_no_later_one(kind: ExecutorKind, threads: int) -> None:
    store = MemoryStore(EXPERTS)
    wanted = answers(make_executor("exact", store, 1, Prefetcher(0)))
    line, interrupted = 0, True
    while interrupted:
        line, interrupted = line + 1, False
        prefetcher = Prefetcher(threads)
        executor = make_executor(kind, store, SLOTS, prefetcher)
        if line % 2:
            executor(X, CALLS[0])
        executor.prepare([0, 1])
        try:
            with interrupted_at(line):
                executor.prepare([2, 3])
                executor(X, routing(4, 5, 2))
                executor.prepare([6])
        except KeyboardInterrupt:
            interrupted = True
        assert answers(executor) == wanted, f"interrupted at line {line}"
        executor.close()
        executor.close()
        prefetcher.close()
    assert line > 50
    assert store.most_writers == 1


@pytest.mark.spec("EXE-012", "EXE-028")
def test_a_read_may_be_abandoned_twice_and_has_no_bytes_to_wait_for() -> None:
    store, slot = MemoryStore(EXPERTS), np.zeros(LAYOUT.nbytes, np.uint8)
    read = Read(store, 1, slot)
    read.abandon()
    read.abandon()
    assert store.log == []
    read.wait()  # somebody needs it after all
    assert (store.log, slot.tobytes()) == ([1], store.slots[1].tobytes())


@pytest.mark.spec("STO-030", "EXE-028")
def test_a_thread_that_cannot_be_started_is_a_named_error_and_closing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    store, prefetcher = MemoryStore(EXPERTS), Prefetcher(2)
    executor = make_executor("staged", store, SLOTS, prefetcher)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        with pytest.raises(ReadError, match="reader thread 1 of 2 cannot be started: can't start new thread"):
            executor.prepare([2, 3])
        with pytest.raises(ReadError, match="reader thread 1 of 2"):
            prefetcher.submit(Read(store, 1, np.zeros(HAND_OVER_BYTES, np.uint8)), "now")
    assert answers(executor) == answers(make_executor("exact", store, 1, Prefetcher(0)))
    executor.close()
    prefetcher.close()
