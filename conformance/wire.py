"""The program's end of the pipe, for backends whose reader threads read whenever they like."""

import threading
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from conformance.framing import Message, announced, tensors_in
from edge0_ref.contract import ExpertLayout
from edge0_ref.errors import ReadError

PATIENCE_SECONDS = 0.5  # a read that was counted but given up is waited for once, for so long


@dataclass(eq=False)
class Wire:
    """Requests come in, replies go out; in between, one thread at a time may ask for something."""

    received: BinaryIO
    sent: BinaryIO
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _open: bool = False
    _gone: bool = False

    def _read(self) -> Message | None:
        line = self.received.readline()
        if not line:
            return None
        fields, length = announced(line)
        return Message(fields, tensors_in(self.received.read(length)))

    def tell(self, message: Message) -> None:
        self.sent.write(message.encode())
        self.sent.flush()

    def next_request(self) -> Message | None:
        """The next request, or None when the suite closed its end; reads that waited for it may go on."""
        request = self._read()
        with self._turn:
            self._open, self._gone = request is not None, request is None
            self._turn.notify_all()
        return request

    def reply(self, message: Message) -> None:
        with self._turn:
            self._open = False
            self.tell(message)

    def ask(self, message: Message) -> Message:
        """Ask the suite for something, as soon as a request is open. Raises ReadError once the suite is gone."""
        with self._turn:
            self._turn.wait_for(lambda: self._open or self._gone)
            if not self._gone:
                self.tell(message)
                answer = self._read()
                if answer is not None:
                    return answer
        raise ReadError("the suite is gone")


@dataclass(eq=False)
class WireStore:
    """[BCK-026] An expert store at the other end."""

    wire: Wire
    num_experts: int
    layout: ExpertLayout
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _served: int = 0
    _given_up: int = 0

    def read_into(self, expert: int, slot: np.ndarray[Any, Any]) -> None:
        answer = self.wire.ask(Message({"read": int(expert)}))
        try:
            if "error" in answer.fields:
                raise ReadError(answer.fields["error"]["message"])
            slot[:] = answer.tensors["slot"]
        finally:
            with self._changed:
                self._served += 1
                self._changed.notify_all()

    def settle(self, reads: int) -> None:
        """Wait until all reads that were counted were made: none may be left for after the reply."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._served + self._given_up >= reads, PATIENCE_SECONDS):
                self._given_up = reads - self._served
