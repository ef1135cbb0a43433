"""Requests that wait, clients that leave, texts that never end, and the disk that fails."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.app.serve.parrot import BROKEN, NEVER
from tests.app.serve.servers import PARROT, TIMEOUT, Server, chunks_of, serving, stream, until_text

CHAT = "/v1/chat/completions"


def asking(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"⟦{text}⟧"}]} | fields


@contextmanager
def endless(server: Server) -> Iterator[httpx.Response]:
    """From its first word on a text that never ends by itself; its client leaves in the end."""
    headers = server.client.headers
    body = asking(f"I wait{NEVER}", stream=True)
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=TIMEOUT) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        lines = response.iter_lines()  # leaving begins where this is forgotten
        until_text(lines)
        yield response


@contextmanager
def busy(server: Server) -> Iterator[httpx.Response]:
    """A text is being generated that ends when this does."""
    before = server.metric("texts_abandoned_total")
    with endless(server) as response:
        yield response
    server.wait_for("texts_abandoned_total", before + 1)


@pytest.mark.spec("ENG-092")
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("said", ["", "a few words "], ids=["in the prompt", "in the text"])
def test_a_client_that_leaves_stops_its_text_within_a_token(parrot: Server, said, streamed) -> None:
    """The token never comes, so only leaving can end the text; the next client is served."""
    before = parrot.metric("texts_abandoned_total")
    with httpx.Client(base_url=parrot.url, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=asking(said + NEVER, stream=streamed))
    parrot.wait_for("texts_abandoned_total", before + 1)
    assert parrot.chat("next").json()["choices"][0]["message"]["content"] == "next"


def test_a_client_that_leaves_the_queue_is_never_served(parrot: Server) -> None:
    with busy(parrot):
        with httpx.Client(base_url=parrot.url, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=asking("never"))
        parrot.wait_for("requests_waiting", 0)
        finished = parrot.metric("texts_finished_total")
    parrot.wait_for("requests_running", 0)
    assert parrot.metric("texts_finished_total") == finished


@pytest.mark.spec("ENG-092")
def test_without_a_queue_one_is_answered_and_nobody_waits(parrot_model: Path) -> None:
    with serving(parrot_model.parent, parrot_model, *PARROT, "--queue", 0) as server:
        assert [server.chat("one after the other").status_code for _ in range(9)] == [200] * 9
        with busy(server):
            assert server.chat("meanwhile").status_code == 429
        server.wait_for("requests_running", 0)
        assert server.chat(BROKEN).status_code == 500
        assert server.chat("afterwards").status_code == 200


@pytest.mark.spec("ENG-092")
def test_a_full_queue_says_when_to_come_again(strict: Server) -> None:
    with busy(strict):
        waiting = threading.Thread(target=strict.chat, args=("second",))
        waiting.start()
        strict.wait_for("requests_waiting", 1)
        refused = strict.chat("third")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    waiting.join()
    assert strict.chat("third").status_code == 200


def test_a_stream_is_kept_alive_while_it_waits(strict: Server) -> None:
    with busy(strict), strict.client.stream("POST", CHAT, json=asking("second", stream=True)) as response:
        assert next(response.iter_lines()).startswith(":")


@pytest.mark.parametrize("text", [NEVER, f"Some words {NEVER}"])
def test_the_deadline_ends_what_takes_too_long(strict: Server, text) -> None:
    late = strict.chat(text)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
    assert strict.chat("quick").status_code == 200


def test_an_error_in_the_middle_of_an_answer_is_told_and_harms_nobody(parrot: Server) -> None:
    whole = parrot.chat(f"so far {BROKEN} so good")
    assert whole.status_code == 500
    assert whole.json()["error"]["message"] == "layer 2 expert 3: the disk failed"
    *chunks, last = stream(parrot, CHAT, asking(f"so far {BROKEN} so good"))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "so far "
    assert last == whole.json()
    assert parrot.chat("next").json()["choices"][0]["message"]["content"] == "next"


def test_fifty_clients_at_once_get_their_own_answers(parrot: Server) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = asking(f"answer {number} " * 3, stream=number % 2 == 0)
        response = await client.post(CHAT, json=body)
        if number % 2:
            return str(response.json()["choices"][0]["message"]["content"])
        chunks = chunks_of(iter(response.text.splitlines()))[:-1]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=parrot.url, timeout=TIMEOUT, limits=limits) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(50)))

    assert asyncio.run(ask_all()) == [f"answer {number} " * 3 for number in range(50)]


@pytest.mark.spec("ENG-092")
def test_first_come_first_served(parrot: Server) -> None:
    """While one is busy others queue up one by one; they begin in that order, each when the one before has left."""
    begun: list[int] = []

    def ask(number: int) -> None:
        with endless(parrot):
            begun.append(number)

    before = parrot.metric("texts_abandoned_total")
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    with endless(parrot):
        for waiting, thread in enumerate(threads, start=1):
            thread.start()
            parrot.wait_for("requests_waiting", waiting)
    for thread in threads:
        thread.join()
    parrot.wait_for("texts_abandoned_total", before + 6)
    assert begun == list(range(5))
