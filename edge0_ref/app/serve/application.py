"""The routes, and what each of them does."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from edge0_ref.app.serve.api_error import ApiError, unexpected
from edge0_ref.app.serve.broadcast import Broadcast
from edge0_ref.app.serve.guards import Access, Guards
from edge0_ref.app.serve.metrics import MEDIA_TYPE, CountedResponses, metrics_text
from edge0_ref.app.serve.openapi import description
from edge0_ref.app.serve.plans import Plan, Served, plan_chat, plan_completion
from edge0_ref.app.serve.requests import Body, ChatBody, CompletionBody, read_body
from edge0_ref.app.serve.sse import HEADERS, EventStream, Patience, data, whole_answer
from edge0_ref.app.serve.worker import Worker

PAGE = Path(__file__).parent / "page"
B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class Limits:
    """Of a request's body: bytes, and seconds until all of it is here."""

    body_bytes: int
    body_seconds: float


@dataclass(frozen=True)
class Service:
    """One model and all that stands around it."""

    worker: Worker
    served: Served
    live: Broadcast
    access: Access
    limits: Limits
    patience: Patience
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    started: int = field(default_factory=lambda: int(time.time()))


def make_application(service: Service) -> ASGIApp:
    """The ASGI application; the worker is running already, and is closed by whoever started it."""
    endpoints = Endpoints(service)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completion, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/healthz", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/openapi.json", endpoints.openapi),
        Route("/edge0/live", endpoints.live),
    ]
    page = [page_route(path) for path in sorted(PAGE.glob("*.*"))]
    open_paths = {"/healthz", *(route.path for route in page)}
    application: ASGIApp = Starlette(
        routes=[*routes, *page],
        exception_handlers={ApiError: endpoints.refusal, HTTPException: endpoints.refusal, Exception: endpoints.bug},
    )
    application = Guards(application, service.access, open_paths)
    if service.access.origins:
        origins = list(service.access.origins)
        application = CORSMiddleware(application, origins, allow_methods=["*"], allow_headers=["*"])
    return CountedResponses(application, service.responses)


def page_route(path: Path) -> Route:
    """A file of the page."""

    async def give(request: Request) -> Response:
        return FileResponse(path)

    return Route("/" if path.name == "index.html" else f"/{path.name}", give)


class Endpoints:
    """What each route answers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, plan_chat)

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, plan_completion)

    async def _generate(self, request: Request, kind: type[B], make_plan: Callable[[B, Served], Plan]) -> Response:
        service = self._service
        raw = await read_all(request, service.limits)
        body = read_body(raw, kind)
        service.served.check_name(body.model)
        plan = await run_in_threadpool(make_plan, body, service.served)
        job = service.worker.submit(plan.texts)
        if body.stream:
            return EventStream(service.worker, job, plan.answer, service.patience)
        return await whole_answer(request, service.worker, job, plan.answer, service.patience)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(self._service.served.names[0])]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.served.check_name(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "edge0",
            "max_model_len": service.served.context,
            "chat": service.served.tokenizer.has_chat_template,
        }

    async def health(self, request: Request) -> Response:
        alive = self._service.worker.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        worker = self._service.worker
        assert worker.model is not None
        text = metrics_text(worker, worker.model.counters, self._service.responses)
        return Response(text, media_type=MEDIA_TYPE)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description(self._service.access.key is not None))

    async def live(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[str]:
            with self._service.live.subscribe() as subscription:
                yield ": live\n\n"
                async for event in subscription:
                    yield ": silence\n\n" if event is None else data(event)

        return StreamingResponse(lines(), media_type="text/event-stream", headers=HEADERS)

    async def refusal(self, request: Request, error: Exception) -> Response:
        """An error that was raised on purpose, here or by Starlette."""
        if isinstance(error, HTTPException):
            error = ApiError(
                error.status_code, f"{request.url.path}: {error.detail}", headers=dict(error.headers or {})
            )
        assert isinstance(error, ApiError)
        return JSONResponse(error.body, error.status, error.headers)

    async def bug(self, request: Request, error: Exception) -> Response:
        """Any other; it goes on to the server's log."""
        return JSONResponse(unexpected(error).body, 500)


async def read_all(request: Request, limits: Limits) -> bytes:
    """The body. Raises ApiError 413, after the rest was let through unread, and 408."""
    kept, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size <= limits.body_bytes:
                    kept.append(part)
                elif size > 8 * limits.body_bytes:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    if size > limits.body_bytes:
        raise ApiError(413, f"a body of {size} bytes; this server takes {limits.body_bytes}", code="body_too_large")
    return b"".join(kept)
