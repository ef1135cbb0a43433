"""`edge0 serve` as another process, and what tests ask it."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.app.command import start

PARROT = ("--backend", "tests.app.serve.parrot:create")
TIMEOUT = 120.0  # a busy machine
START_TIMEOUT = 180.0  # kernels may have to be compiled first


@dataclass(frozen=True)
class Server:
    """A running one."""

    process: subprocess.Popen[str]
    url: str
    client: httpx.Client
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        """Ask the parrot to say this."""
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": f"⟦{text}⟧"}]} | fields)

    def complete(self, text: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": f"⟦{text}⟧"} | fields)

    def metric(self, name: str) -> float:
        found = re.search(rf"^edge0_{name} (\S+)$", self.client.get("/metrics").text, re.M)
        assert found, name
        return float(found[1])

    def wait_for(self, name: str, value: float) -> None:
        """Until a metric has this value."""
        end = time.monotonic() + TIMEOUT
        while self.metric(name) != value:
            assert "Traceback" not in (log := self.log.read_text("utf-8")), log
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.01)


@contextmanager
def serving(folder: Path, *options: object, key: str | None = None) -> Iterator[Server]:
    """A server on a free port; it is ended by a signal if it has not ended by then."""
    own = ("--port", 0, "--cache-home", folder / "cache")
    log = folder / f"serve-{time.monotonic_ns()}.log"
    with log.open("w") as file, start("serve", *options, *own, stdout=file, stderr=file) as process:
        try:
            url = wait_for_url(process, log)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=url, timeout=TIMEOUT, headers=headers) as client:
                yield Server(process, url, client, log)
        finally:
            process.terminate()
            process.wait(TIMEOUT)
    assert "Traceback" not in log.read_text("utf-8"), log.read_text("utf-8")


def wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if found := re.search(r"on (http://127\.0\.0\.1:\d+)/v1", log.read_text("utf-8")):
            return found[1]
        assert process.poll() is None, log.read_text("utf-8")
        time.sleep(0.02)
    raise AssertionError(log.read_text("utf-8"))


def stream(server: Server, path: str, body: Any) -> list[Any]:
    """The chunks of a streamed answer."""
    with server.client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return chunks_of(response.iter_lines())


def until_text(lines: Iterator[str]) -> None:
    """Reads a streamed message until something is said."""
    while '"content": ""' in (line := next(lines)) or '"content"' not in line:
        pass


def chunks_of(lines: Iterator[str]) -> list[Any]:
    """Every line is an event, a comment or empty, and [DONE] comes last."""
    chunks = []
    for line in lines:
        if line.startswith("data: "):
            assert not chunks or chunks[-1] != "[DONE]"
            chunks.append("[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")))
        else:
            assert not line or line.startswith(":"), line
    return chunks
