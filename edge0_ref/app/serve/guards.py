"""[ENG-093] What a request must get past before anything is read of it: whom it means, where it comes from, its key.

A page of another site can make a browser send requests to this machine, and a name it owns can lead here. So a request
must name this server by an address or a name it knows, and if a browser says which site sent it, that must be this one
or one that was allowed.
"""

import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge0_ref.app.serve.api_error import ApiError
from edge0_ref.errors import UsageError

RESPONSE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True)
class Access:
    """Who may ask. hosts: names this server answers to, beside addresses and localhost; origins: of other sites."""

    key: str | None = None
    hosts: Collection[str] = ()
    origins: Collection[str] = ()

    def check(self, headers: Headers, open_to_all: bool = False) -> None:
        """Raises ApiError 403 or 401. open_to_all: without a key too."""
        host = headers.get("host", "")
        if not self.knows(host):
            raise ApiError(
                403, f"Host {host!r} is not a name of this server; --allow-host adds one", code="unknown_host"
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host and origin not in self.origins:
            raise ApiError(
                403, f"requests from {origin} are not allowed; --allow-origin adds it", code="unknown_origin"
            )
        if self.key is not None and not open_to_all:
            kind, _, given = headers.get("authorization", "").partition(" ")
            sent = given.encode("latin-1").strip()  # the bytes: headers are decoded so
            right = hmac.compare_digest(sent, self.key.encode("utf-8", "surrogateescape"))
            if kind.lower() != "bearer" or not right:
                headers_back = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, "this server wants its API key", None, "invalid_api_key", headers_back)

    def knows(self, host: str) -> bool:
        """An address cannot be made to mean another machine; a name can."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name == "localhost" or name in self.hosts or is_address(name)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_exposure(host: str, key: str | None, no_auth: bool) -> None:
    """Raises UsageError for a server that others could reach and that nobody has protected."""
    loopback = host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
    if not (loopback or key or no_auth):
        raise UsageError(f"--host {host} lets other machines ask: give --api-key, or --no-auth if that is meant")


class Guards:
    """The outermost layer of the application. open_paths: those that are answered without a key."""

    def __init__(self, app: ASGIApp, access: Access, open_paths: Collection[str]) -> None:
        self._app, self._access, self._open_paths = app, access, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self._access.check(Headers(scope=scope), scope["path"] in self._open_paths)
        except ApiError as error:
            refusal = JSONResponse(error.body, error.status, error.headers)
            await refusal(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)
