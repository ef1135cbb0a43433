"""A call or hint that is interrupted, at whatever line, spoils no later one."""

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from edge0_ref import decoder as decoder_module
from edge0_ref import expert_store, readers
from edge0_ref.app.pack import run_pack
from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import ExecutorKind, Plan, Routing
from edge0_ref.errors import ReadError, UsageError
from edge0_ref.executors import make_executor, staged
from edge0_ref.inventory import open_checkpoint
from edge0_ref.packed import open_experts
from edge0_ref.prefetch import HAND_OVER_BYTES, Prefetcher, Read
from tests.ref.builders import build
from tests.ref.memory_store import LAYOUT, MemoryStore
from tests.ref.test_decoder import TINY, open_both
from tests.ref.test_prefetch import readers as reader_threads
from tests.ref.test_prefetch import soon

EXPERTS, SLOTS = 7, 4
FOLDER = Path(staged.__file__).parent
FILES = {
    str(path) for path in (*FOLDER.glob("*.py"), *(FOLDER.parent / name for name in ("prefetch.py", "residency.py")))
}
pytestmark = pytest.mark.usefixtures("unchecked")


@contextmanager
def interrupted_at(line: int, files: Collection[str] = FILES) -> Iterator[None]:
    """Ctrl-C at the line-th line of these files, those of executors, that is run in this thread."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename not in files:
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
    store, before = MemoryStore(EXPERTS), reader_threads()
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
        assert reader_threads() == before, f"interrupted at line {line}"
    assert line > 50
    assert (store.most_writers, store.mistaken) == (1, 0)


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


@pytest.mark.spec("STO-032", "EXE-028")
def test_a_reader_that_has_its_first_turn_after_the_interrupt_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nothing tells it from one that was never started."""

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    def late(thread: threading.Thread) -> None:
        turn.acquire()
        begin(thread)

    turn, begin, before = threading.Semaphore(0), threading.Thread._bootstrap_inner, reader_threads()  # type: ignore[attr-defined]
    store, prefetcher = MemoryStore(EXPERTS), Prefetcher(1)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread._bootstrap_inner", late)
        patch.setattr("threading.Event.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prefetcher.submit(Read(store, 0, np.zeros(HAND_OVER_BYTES, np.uint8)), "ahead")
    turn.release()
    prefetcher.wait(prefetcher.submit(Read(store, 1, np.zeros(HAND_OVER_BYTES, np.uint8)), "now"))
    closing = threading.Thread(target=prefetcher.close, daemon=True)
    closing.start()
    closing.join(timeout=5)
    assert not closing.is_alive()
    assert soon(lambda: reader_threads() == before)  # it may not have begun yet, and cannot be joined then


def judge_interrupted_calls(decoder: Any, call: Callable[[Any], object], files: Collection[str]) -> None:
    """Wherever a call ends early, the decoder is where it was, or at the call's end, or refuses to go on.

    The call is made at position 3, when a prediction waits for the next token.
    """

    def begin() -> Any:
        decoder.reset()
        return decoder.prefill([1, 2, 3])

    def goes_on() -> list[bytes]:
        return [np.array(decoder.step(token)).tobytes() for token in (4, 5)]

    begin()
    unchanged = goes_on()
    begin()
    call(decoder)
    end, done = decoder.position, goes_on()
    line, interrupted, refused = 0, True, 0
    while interrupted:
        line, interrupted = line + 1, False
        begin()
        try:
            with interrupted_at(line, files):
                call(decoder)
        except KeyboardInterrupt:
            interrupted = True
        position = decoder.position
        try:
            went_on = goes_on()
        except UsageError:
            refused += 1
        else:
            assert went_on == {3: unchanged, end: done}[position], f"interrupted at line {line}"
    assert refused > 5


@pytest.mark.spec("DEC-041")
@pytest.mark.parametrize("kind", ["staged", "whole_layer"])
@pytest.mark.parametrize("call", [lambda decoder: decoder.prefill([6, 7]), lambda decoder: decoder.step(6)])
def test_a_decoder_interrupted_at_any_line_goes_on_from_where_it_is_or_refuses(
    tmp_path: Path, kind: ExecutorKind, call: Callable[[Any], object]
) -> None:
    checkpoint, adapters = open_both(tmp_path, TINY)
    plan = Plan(top_k=2, executor=kind, prefill_executor="exact", slots=4, reader_threads=1)
    decoder = ReferenceBackend().decoder(checkpoint, plan, adapters)
    judge_interrupted_calls(decoder, call, {decoder_module.__file__, str(FOLDER.parent / "residency.py")})
    decoder.close()


@pytest.mark.spec("BCK-010")
@pytest.mark.parametrize("packed", [False, True])
def test_closing_again_after_an_interrupted_close_closes_every_file_once(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that was closed may have become that of another file, which must stay open."""
    folder = build(tmp_path, TINY, shards=3)
    if packed:
        run_pack(folder, None, lambda line: None)
    closed, close = list[int](), os.close
    monkeypatch.setattr("edge0_ref.readers.os.close", lambda file: (closed.append(file), close(file)))
    for line in range(1, 40):
        files = open_experts(open_checkpoint(folder), "pread")
        closed.clear()
        try:
            with interrupted_at(line, {expert_store.__file__, readers.__file__}):
                files.close()
        except KeyboardInterrupt:
            files.close()
        assert len(closed) == len(set(closed)), f"interrupted at line {line}"
