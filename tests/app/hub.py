"""A hub on loopback: as much of it as a download needs, and what can go wrong on the way."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


def blob_id(content: bytes) -> str:
    """What Git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """Repositories (name -> file -> content), and faults.

    refused: repository -> (status, error code) for everything asked about it; cut: file -> bytes after which the
    connection ends, once; ill: file -> status that its download gets from then on; other: file -> what is sent in its
    place; asked: (file, first byte) of every download.
    """

    repositories: Mapping[str, Mapping[str, bytes]]
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    ill: dict[str, int] = field(default_factory=dict)
    other: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    endpoint: str = ""

    def listing(self, repository: str) -> bytes:
        """The hub's answer about a repository; weights are large files, all others are Git's own."""
        siblings = []
        for name, content in self.repositories[repository].items():
            told = {"rfilename": name, "size": len(content), "blobId": blob_id(content)}
            if name.endswith((".safetensors", ".mp4")):
                digest = hashlib.sha256(content).hexdigest()
                told["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(told)
        return json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers GET."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            if self.may_read(found[1]):
                self.answer(200, self.hub.listing(found[1]))
        elif found := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
            if self.may_read(found[1]):
                self.send_file(found[1], found[2])
        else:
            self.answer(404, b"")

    def may_read(self, repository: str) -> bool:
        status, code = self.hub.refused.get(repository, (0, ""))
        if repository not in self.hub.repositories:
            status, code = 404, "RepoNotFound"
        if status:
            self.answer(status, b"", {"X-Error-Code": code} if code else {})
        return not status

    def send_file(self, repository: str, name: str) -> None:
        hub, content = self.hub, self.hub.repositories[repository][name]
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        hub.asked.append((name, first))
        if name in hub.ill and name not in hub.cut:
            self.answer(hub.ill[name], b"")
            return
        content = hub.other.get(name, content)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{blob_id(content)}"'}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.answer(206 if first else 200, content[first:], headers, hub.cut.pop(name, None))

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}, upto: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:upto])
        self.close_connection = upto is not None

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub, reachable at its `endpoint`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
