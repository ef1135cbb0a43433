"""How the server comes and goes."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from edge0_ref.app.api import Model, open_model
from edge0_ref.app.serve.broadcast import Broadcast
from edge0_ref.app.serve.live_feed import LiveFeed
from edge0_ref.app.serve.server import listen
from edge0_ref.app.serve.worker import Worker
from tests.app.command import refused
from tests.app.serve.parrot import NEVER, SLOW
from tests.app.serve.servers import PARROT, TIMEOUT, Server, chunks_of, serving, until_text


@contextmanager
def in_the_middle(server: Server, text: str) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer that has begun."""
    body = {"messages": [{"role": "user", "content": f"⟦{text}⟧"}], "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        until_text(lines)
        yield lines


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_what_runs_may_finish_and_what_waits_is_refused(parrot_model: Path, number, code) -> None:
    answers: list[int] = []
    with serving(parrot_model.parent, parrot_model, *PARROT) as server:
        waiting = threading.Thread(target=lambda: answers.append(server.chat("second").status_code))
        with in_the_middle(server, f"begin{SLOW * 200} and end") as lines:
            waiting.start()
            server.wait_for("requests_waiting", 1)
            server.process.send_signal(number)
            assert chunks_of(lines)[-1] == "[DONE]"
        waiting.join()
        assert server.process.wait(TIMEOUT) == code
    assert answers == [503]


def test_what_does_not_finish_is_cancelled(parrot_model: Path) -> None:
    with serving(parrot_model.parent, parrot_model, *PARROT, "--grace", 0.2) as server:
        with in_the_middle(server, f"begin{NEVER}") as lines:
            server.process.send_signal(signal.SIGTERM)
            assert chunks_of(lines)[-1]["error"]["code"] == "shutting_down"
        assert server.process.wait(TIMEOUT) == 0


def test_a_second_signal_ends_all_and_every_client_is_told(parrot_model: Path) -> None:
    answers: list[httpx.Response] = []
    with serving(parrot_model.parent, parrot_model, *PARROT, "--grace", 600) as server:
        whole = threading.Thread(target=lambda: answers.append(server.chat(NEVER)))
        whole.start()
        server.wait_for("requests_running", 1)
        server.process.send_signal(signal.SIGTERM)
        with suppress(httpx.TransportError):  # when it takes nothing new, it has seen the signal
            while True:
                httpx.get(server.url)
        server.process.send_signal(signal.SIGTERM)
        whole.join()
        assert server.process.wait(TIMEOUT) == 0
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_a_port_in_use_is_refused(parrot: Server) -> None:
    assert f"port {parrot.port}" in refused("serve", "--port", parrot.port, *PARROT)
    assert "port" in refused("serve", "--port", 99999, *PARROT)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_small_pieces_are_sent_at_once(host) -> None:
    """asyncio turns Nagle's algorithm off on sockets that say they are TCP, and on no others."""
    with listen(host, 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_an_address_others_can_reach_wants_a_key() -> None:
    assert "--api-key" in refused("serve", "--host", "0.0.0.0", *PARROT)
    assert "--api-key" in refused("serve", "--host", "", *PARROT)


@pytest.mark.parametrize(
    "options", [("--context", 1), ("--context", 10**6), ("--memory", "1MiB"), ("--grace", "inf"), ("/no/such/folder",)]
)
def test_a_model_that_cannot_work_is_refused_before_anything_is_served(options) -> None:
    assert "serving" not in refused("serve", "--port", 0, *options)


def test_a_model_that_fails_as_it_is_closed_is_heard_of(capfd, monkeypatch) -> None:
    opening = partial(open_model, use_adapters=False, context=8)
    worker = Worker(lambda observe: opening(observe=observe), 1, LiveFeed(Broadcast()))
    worker.start()

    def fail(model: Model) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Model, "close", fail)
    worker.close()
    assert "the disk is gone" in capfd.readouterr().err
