"""[BCK-024] A running program: started, written to and read from without ever waiting for longer than allowed."""

import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conformance.compare import ConformanceError
from conformance.framing import LINE_LIMIT, FramingError, Message, announced, shown, tensors_in
from conformance.watchdog import Hang

CHUNK = 2**16


class ProgramError(ConformanceError):
    """A program that ended, or wrote something that is no reply: one line that says which, in what, and how."""


class Process:
    """One process. After an error it is gone: whoever holds it starts another."""

    def __init__(self, command: str, seconds: float) -> None:
        self.command, self.seconds, self.ended = command, seconds, False
        self.hello: Mapping[str, Any] = {}
        self._received = b""
        self.leftover = b""  # what came after the last reply, known once it was closed
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                shlex.split(command), stdin=pipe, stdout=pipe, stderr=self._stderr, bufsize=0, start_new_session=True
            )
        except (OSError, ValueError, IndexError) as error:
            self._stderr.close()
            raise ProgramError(f"{command}: cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)

    def greet(self, protocol: int) -> None:
        """[BCK-022] The first request; a program of another protocol is refused."""
        fields = self.exchange(Message({"operation": "hello", "protocol": protocol}), "hello").fields
        if fields.get("protocol") != protocol:
            raise self.broken("hello", f"speaks protocol {fields.get('protocol')!r}, wanted {protocol}")
        self.hello = fields

    @contextmanager
    def whole(self, operation: str) -> Iterator[None]:
        """Ends the process if what is done in here does not come to its end, whatever the reason.

        The rest of a reply would be taken for the next one. A time limit from outside strikes anywhere in between.
        """
        try:
            yield
        except Hang as hang:
            if self.ended:
                raise
            words = self._last_words()
            self._kill()
            raise Hang(f"{self.command}: {operation}: no reply: {hang}{words}") from None
        except BaseException:
            self._kill()
            raise

    def exchange(self, message: Message | None, operation: str) -> Message:
        """Write a message, if there is one, and read the next one from the program."""
        with self.whole(operation):
            return self._exchange(message, operation)

    def _exchange(self, message: Message | None, operation: str) -> Message:
        outgoing = memoryview(message.encode() if message else b"")
        deadline = time.monotonic() + self.seconds
        if message and self._received:
            raise self.broken(operation, f"wrote to stdout without being asked: {shown(self._received)}")
        with selectors.DefaultSelector() as ready:
            ready.register(self._stdout, selectors.EVENT_READ)
            if outgoing:
                ready.register(self._stdin, selectors.EVENT_WRITE)
            while (found := self._message(operation)) is None or outgoing:
                events = ready.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise self._late(operation)
                for key, _ in events:
                    if key.fileobj is self._stdout:
                        self._receive(operation)
                    else:
                        outgoing = outgoing[self._write(outgoing, operation) :]
                        if not outgoing:
                            ready.unregister(self._stdin)
        self._received = self._received[found[1] :]
        return found[0]

    def _write(self, outgoing: memoryview, operation: str) -> int:
        try:
            return os.write(self._stdin.fileno(), outgoing[:CHUNK])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._crashed(operation) from None

    def _receive(self, operation: str) -> None:
        data = os.read(self._stdout.fileno(), CHUNK)
        if not data:
            raise self._crashed(operation)
        self._received += data

    def _message(self, operation: str) -> tuple[Message, int] | None:
        """The message that was received, with its length, as soon as it is whole."""
        end = self._received.find(b"\n") + 1
        try:
            if not end:
                if len(self._received) > LINE_LIMIT:
                    raise FramingError(f"{len(self._received)} bytes without a line end: {shown(self._received)}")
                return None
            fields, length = announced(self._received[:end])
            if len(self._received) < end + length:
                return None
            return Message(fields, tensors_in(self._received[end : end + length])), end + length
        except FramingError as error:
            raise self.broken(operation, f"wrote to stdout, where a reply was due, {error}") from None

    def broken(self, operation: str, what: str) -> ProgramError:
        """The error for a reply that breaks the protocol; the process is not used any further."""
        self._kill()
        return ProgramError(f"{self.command}: {operation}: {what}")

    def _late(self, operation: str) -> Hang:
        words = self._last_words()
        self._kill()
        return Hang(f"{self.command}: {operation}: no reply within {self.seconds:g} s{words}")

    def _crashed(self, operation: str) -> ProgramError:
        """Stdin or stdout is closed: the program is ending, or might as well be."""
        try:
            code = self._process.wait(min(self.seconds, 5.0))
        except subprocess.TimeoutExpired:
            return self.broken(operation, "closed stdin or stdout without ending")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        words = self._last_words()
        self._kill()
        return ProgramError(f"{self.command}: {operation}: {how} before it replied{words}")

    def _last_words(self) -> str:
        """The last line of its stderr."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its last words: {last}" if last else ""

    def _kill(self) -> None:
        """End it and whatever it started, and give the pipes back."""
        if self.ended:
            return
        self.ended = True
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()

    def close(self) -> int | None:
        """Close stdin, which asks the program to end; its exit status, or None if it was gone or did not end."""
        if self.ended:
            return None
        self._stdin.close()
        try:
            code = self._process.wait(self.seconds)
            self.leftover = self._received + (self._stdout.read() or b"")
            return code
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._kill()
