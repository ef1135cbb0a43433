"""Server-sent events, and following a job to its end: as a stream, or as one answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edge0_ref.app.serve.answers import Answer, Chunk
from edge0_ref.app.serve.api_error import ApiError
from edge0_ref.app.serve.work import Ended, Event, Failed
from edge0_ref.app.serve.worker import Job, Worker

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Patience:
    """deadline: seconds from arrival to the end of the answer, None: any; comment: seconds of silence in a stream."""

    deadline: float | None
    comment: float


def data(value: Any) -> str:
    """One event, in ASCII: many a client ends a line at U+0085 and U+2028 as well."""
    return f"data: {json.dumps(value)}\n\n"


async def events(job: Job, texts: int, patience: Patience) -> AsyncIterator[Event | None]:
    """What a job tells, up to its end; None after each silence. At the deadline it has failed."""
    end = None if patience.deadline is None else time.monotonic() + patience.deadline
    while texts:
        left = patience.comment if end is None else min(patience.comment, end - time.monotonic())
        try:
            async with asyncio.timeout(max(left, 0)):
                event: Event | None = await job.events.get()
        except TimeoutError:
            event = None
            if end is not None and time.monotonic() >= end:
                event = Failed(ApiError(504, f"no answer within {patience.deadline:g} seconds", code="deadline"))
        yield event
        if isinstance(event, Failed):
            return
        texts -= isinstance(event, Ended)


class EventStream(StreamingResponse):
    """An answer as it comes. However it ends, its job ends too."""

    def __init__(self, worker: Worker, job: Job, answer: Answer, patience: Patience) -> None:
        super().__init__(self._lines(), media_type="text/event-stream", headers=HEADERS)
        self._worker, self._job, self._answer, self._patience = worker, job, answer, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._worker.cancel(self._job)

    async def _lines(self) -> AsyncIterator[str]:
        async for event in events(self._job, self._answer.texts, self._patience):
            if event is None:
                yield ": waiting\n\n"
            elif isinstance(event, Failed):
                yield data(event.error.body)
                return
            else:
                for chunk in self._answer.chunks(event):
                    yield data(chunk)
        yield DONE


async def whole_answer(request: Request, worker: Worker, job: Job, answer: Answer, patience: Patience) -> Response:
    """The answer in one piece. Raises ApiError. When the client leaves the job ends, and nobody reads the response."""
    collecting = asyncio.create_task(collect(job, answer, patience))
    leaving = asyncio.create_task(gone(request))
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(answer.whole(await collecting)) if collecting.done() else Response(status_code=499)
    finally:
        worker.cancel(job)
        for task in (collecting, leaving):
            task.cancel()


async def collect(job: Job, answer: Answer, patience: Patience) -> list[Chunk]:
    chunks: list[Chunk] = []
    async for event in events(job, answer.texts, patience):
        if isinstance(event, Failed):
            raise event.error
        if event is not None:
            chunks += answer.chunks(event)
    return chunks


async def gone(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
