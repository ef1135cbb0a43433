"""Mutants of chapter 11, backends that are programs: `conformance.serve` as a program that breaks the protocol."""

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from conformance import reply
from conformance.framing import Message
from conformance.process import Process
from conformance.program import Program
from conformance.serve import Server
from conformance.wire import Wire, WireStore
from edge0_ref.errors import BackendError

SMALL, WHOLE = "conformance.examples.minimal_backend:MinimalBackend", "reference"


def a_blank_line_after_each_reply(patch: pytest.MonkeyPatch) -> None:
    original = Wire.reply

    def reply(self: Wire, message: Message) -> None:
        original(self, message)
        self.sent.write(b"\n")
        self.sent.flush()

    patch.setattr(Wire, "reply", reply)


def experts_of_another_dtype(patch: pytest.MonkeyPatch) -> None:
    original = Server.function

    def function(self: Server, *given: Any) -> dict[str, np.ndarray]:
        result = original(self, *given)
        return result | ({"experts": result["experts"].astype(np.uint32)} if "experts" in result else {})

    patch.setattr(Server, "function", function)


def another_name_in_each_process(patch: pytest.MonkeyPatch) -> None:
    original = Server.answer

    def answer(self: Server, request: Message) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        told, tensors = original(self, request)
        return told | ({"name": f"process {os.getpid()}"} if "name" in told else {}), tensors

    patch.setattr(Server, "answer", answer)


def an_unknown_operation_ends_the_program(patch: pytest.MonkeyPatch) -> None:
    original = Server.function

    def function(self: Server, *given: Any) -> dict[str, np.ndarray]:
        try:
            return original(self, *given)
        except BackendError as error:
            raise SystemExit(1) from error

    patch.setattr(Server, "function", function)


def a_program_that_ended_has_no_last_words(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Process, "_last_words", lambda self: "")


def a_counter_that_is_not_told_is_0(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reply, "COUNTED", ())


def the_end_of_stdin_is_an_error(patch: pytest.MonkeyPatch) -> None:
    original = Server.run

    def run(self: Server) -> None:
        original(self)
        raise SystemExit(1)

    patch.setattr(Server, "run", run)


def a_reply_does_not_wait_for_reads(patch: pytest.MonkeyPatch) -> None:
    original, reply, next_request, replied = WireStore.read_into, Wire.reply, Wire.next_request, threading.Event()

    def read_into(self: WireStore, expert: int, slot: np.ndarray) -> None:
        if threading.current_thread() is not threading.main_thread():
            replied.wait(1)  # a call that needs the bytes has to go on in the end
        original(self, expert, slot)

    def reply_first(self: Wire, message: Message) -> None:
        reply(self, message)
        replied.set()

    def take(self: Wire) -> Message | None:
        request = next_request(self)
        replied.clear()
        return request

    patch.setattr(Wire, "reply", reply_first)
    patch.setattr(Wire, "next_request", take)
    patch.setattr(WireStore, "read_into", read_into)
    patch.setattr(WireStore, "settle", lambda self, reads: None)


def an_observer_does_not_hear_of_residents(patch: pytest.MonkeyPatch) -> None:
    original = Server.observed

    def observed(self: Server, number: int, point: str, layer: int, value: Any) -> None:
        if point != "resident":
            original(self, number, point, layer, value)

    patch.setattr(Server, "observed", observed)


SERVED: Mapping[Any, str] = {
    a_blank_line_after_each_reply: SMALL,
    experts_of_another_dtype: SMALL,
    another_name_in_each_process: SMALL,
    an_unknown_operation_ends_the_program: SMALL,
    the_end_of_stdin_is_an_error: SMALL,
    a_reply_does_not_wait_for_reads: WHOLE,
    an_observer_does_not_hear_of_residents: WHOLE,
}
MUTANTS = {
    a_blank_line_after_each_reply: "BCK-020",
    experts_of_another_dtype: "BCK-021",
    another_name_in_each_process: "BCK-022",
    an_unknown_operation_ends_the_program: "BCK-023",
    a_program_that_ended_has_no_last_words: "BCK-024",
    a_counter_that_is_not_told_is_0: "BCK-024",
    the_end_of_stdin_is_an_error: "BCK-025",
    a_reply_does_not_wait_for_reads: "BCK-026",
    an_observer_does_not_hear_of_residents: "BCK-027",
}


def program_of(mutant: Any) -> Program | None:
    """The program that a mutant is, or None if it breaks something else."""
    if mutant not in SERVED:
        return None
    name = mutant.__name__
    return Program(f"{sys.executable} -m tests.mutants.broken {name} conformance.serve --backend {SERVED[mutant]}")
