"""`edge0 serve`: opens the model, listens, and leaves in order."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import FrameType

import uvicorn

from edge0_ref.app.api import Model, Notify
from edge0_ref.app.serve.api_error import shutting_down
from edge0_ref.app.serve.application import Limits, Service, make_application
from edge0_ref.app.serve.broadcast import Broadcast
from edge0_ref.app.serve.guards import Access, check_exposure
from edge0_ref.app.serve.live_feed import LiveFeed
from edge0_ref.app.serve.plans import Served
from edge0_ref.app.serve.sse import Patience
from edge0_ref.app.serve.worker import Worker
from edge0_ref.contract import Observe
from edge0_ref.errors import UsageError


@dataclass(frozen=True)
class ServeSettings:
    """How to serve. queue: requests that may wait; grace: seconds that a running answer has left at the end."""

    host: str
    port: int
    name: str | None
    no_auth: bool
    access: Access
    limits: Limits
    patience: Patience
    queue: int
    grace: float


class QuietServer(uvicorn.Server):
    """uvicorn, with this project's way to leave: at the first signal answers have `grace` seconds, at a second none."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service, self._grace = service, grace
        self.signal: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises a signal again when it has left, which would end the process before the model is closed."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            asyncio.get_running_loop().call_soon_threadsafe(self._service.worker.refuse_all, shutting_down())
        self.signal, self.should_exit = sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new is taken; what waits is refused; what runs may finish, within the time of grace."""
        worker, error = self._service.worker, shutting_down()
        worker.refuse_waiting(error)
        self._service.live.end()
        timer = asyncio.get_running_loop().call_later(self._grace, worker.refuse_all, error)
        await super().shutdown(sockets)
        timer.cancel()
        if self.server_state.tasks:  # of answers that were refused just now, and tell it
            await asyncio.wait(self.server_state.tasks, timeout=1)


def run_serve(open_model: Callable[[Observe], Model], settings: ServeSettings, notify: Notify) -> int:
    """Serve until a signal comes; that signal. Raises Edge0Error for what cannot work, before any request is read."""
    check_exposure(settings.host, settings.access.key, settings.no_auth)
    listener = listen(settings.host, settings.port)
    live = Broadcast()

    worker = Worker(open_model, settings.queue, LiveFeed(live))
    try:
        model = worker.start()
        service = Service(
            worker, served_of(model, settings.name), live, settings.access, settings.limits, settings.patience
        )
        config = uvicorn.Config(
            make_application(service),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(settings.grace) + 2,  # clients that do not read what they asked for
        )
        server = QuietServer(config, service, settings.grace)
        port = listener.getsockname()[1]
        notify(f"serving {service.served.names[0]} on http://{url_host(settings.host)}:{port}/v1")
        server.run(sockets=[listener])
    finally:
        listener.close()
        worker.close()
    return server.signal or 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError.

    It must say that it is TCP: asyncio sends small pieces at once, rather than 40 ms later, only on sockets that do,
    and `socket.create_server` makes none of those.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error}") from None
    return listener


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def served_of(model: Model, name: str | None) -> Served:
    """The model as requests see it. Raises CheckpointError without a tokenizer."""
    assert model.settings.context is not None
    folder = model.checkpoint.folder
    own = name or folder.resolve().name
    names = tuple(dict.fromkeys((own, "edge0", str(folder))))
    fingerprint = f"edge0-{version('edge0')}-{model.settings.backend.replace(':', '-')}"
    return Served(names, model.settings.context, model.config.vocab_size, model.tokenizer, fingerprint)
