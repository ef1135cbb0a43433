"""What the page watches: events from the generation thread to whoever listens, none of whom can slow it down."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

LONGEST = 64  # events that wait for a slow listener; older ones are dropped
SILENCE_SECONDS = 10.0

LiveEvent = dict[str, Any]


class Broadcast:
    """Listeners come and go in the event loop; `send` is for any thread."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def send(self, event: LiveEvent) -> None:
        for listener in tuple(self._listeners):
            listener.send(event)

    @contextlib.contextmanager
    def subscribe(self) -> Iterator["Listener"]:
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def end(self) -> None:
        """All listeners come to their end."""
        for listener in tuple(self._listeners):
            listener.end()


class Listener(AsyncIterator[LiveEvent | None]):
    """Events from now on; None after a silence."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[LiveEvent | None] = asyncio.Queue(LONGEST)
        self._ended = False

    def send(self, event: LiveEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: LiveEvent | None) -> None:
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(event)

    def end(self) -> None:
        self._ended = True
        self._put(None)

    async def __anext__(self) -> LiveEvent | None:
        if self._ended:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                event = await self._events.get()
        except TimeoutError:
            return None
        if self._ended:
            raise StopAsyncIteration
        return event
