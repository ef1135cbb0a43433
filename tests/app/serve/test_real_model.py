"""The embedded model through the server: what it says, its chances, and what a thousand requests leave behind."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from edge0_ref.app import open_model
from edge0_ref.engine.sampling import SamplingSettings
from tests.app.serve.servers import Server

PROMPT = "And the earth was without form"


def test_a_completion_is_the_models_text(real: Server, unchecked) -> None:
    fields = {"max_tokens": 12, "temperature": 1.5, "seed": 7, "top_k": 40, "frequency_penalty": 0.5}
    said = real.post("/v1/completions", {"prompt": PROMPT} | fields).json()
    settings = SamplingSettings(temperature=1.5, top_k=40, seed=7, frequency_penalty=0.5)
    with open_model(backend="numba") as model:
        text = model.generate(PROMPT, 12, settings)
        list(text)
    assert said["choices"][0]["text"] == text.result.text
    assert said["usage"]["prompt_tokens"] == text.result.prompt_tokens


def test_a_seed_is_a_stream_of_draws(real: Server) -> None:
    def text(**fields: object) -> str:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0} | fields
        return str(real.post("/v1/completions", body).json()["choices"][0]["text"])

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=1), text(seed=2), text(), text()}) == 4
    assert len(set(text(seed=1).split())) > 3


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_scores_the_prompt(real: Server, unchecked, as_ids) -> None:
    """As lm-evaluation-harness asks: `token_logprobs` are log softmax of the logits one place before."""
    with open_model(backend="numba") as model:
        ids = model.tokenizer.encode(PROMPT * 8)  # more than are scored at once
        logits = model.logits(ids).astype(np.float64)
    body = {"prompt": [ids] if as_ids else PROMPT * 8, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    (choice,) = real.post("/v1/completions", body).json()["choices"]
    told = choice["logprobs"]
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    scores = [row[token] for row, token in zip(logits, ids[1:], strict=False)]
    assert told["token_logprobs"][0] is None
    # prompts may be read in other pieces here; float32 sums of this model's width differ by far less
    np.testing.assert_allclose(told["token_logprobs"][1 : len(ids)], scores, atol=1e-4)
    assert "".join(told["tokens"]) == choice["text"]
    assert choice["text"].startswith(PROMPT * 8)
    assert all(
        choice["text"][at:].startswith(token) for at, token in zip(told["text_offset"], told["tokens"], strict=True)
    )
    for row, top, token in zip(logits, told["top_logprobs"][1:], told["tokens"][1:], strict=True):
        assert token in top
        np.testing.assert_allclose(max(top.values()), row.max(), atol=1e-4)


def test_scores_without_a_text(real: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = real.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert real.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}).status_code == 400


def status(server: Server, name: str) -> int:
    text = Path(f"/proc/{server.process.pid}/status").read_text("ascii")
    return int(text.split(f"{name}:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory and threads are read from /proc")
def test_a_thousand_requests_leave_nothing_behind(real: Server) -> None:
    """Each carries 16 KiB: if bodies stayed, 16 MiB would, and half of that is what this allows.

    The pool of threads that read requests may grow by one for each client at once, and shrink.
    """

    async def ask(client: httpx.AsyncClient, count: int) -> None:
        for number in range(count):
            prompt = [5 + number % 50, 6]
            body = {"prompt": prompt, "max_tokens": 1, "stream": number % 2 == 0, "user": "x" * 16384}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200

    async def ask_from_four(count: int) -> None:
        async with httpx.AsyncClient(base_url=real.url, timeout=60) as client:
            await asyncio.gather(*(ask(client, count // 4) for _ in range(4)))

    asyncio.run(ask_from_four(200))
    threads, kilobytes = status(real, "Threads"), status(real, "VmRSS")
    asyncio.run(ask_from_four(1000))
    assert status(real, "Threads") <= threads + 4
    assert status(real, "VmRSS") - kilobytes < 8 * 1024


def test_a_conversations_next_turn_finds_the_last_one(real: Server) -> None:
    asked = {"role": "user", "content": PROMPT * 12}
    body = {"messages": [asked], "max_tokens": 8, "temperature": 0}
    first = real.post("/v1/chat/completions", body).json()
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    messages = [asked, answer, {"role": "user", "content": " And God said"}]
    second = real.post("/v1/chat/completions", body | {"messages": messages}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # the last tokens of a turn may be cut otherwise when text follows
    assert first["usage"]["prompt_tokens"] - 8 <= cached < second["usage"]["prompt_tokens"]
    plain = real.post(
        "/v1/completions", {"prompt": "".join(m["content"] for m in messages)} | {"max_tokens": 8, "temperature": 0}
    )
    assert plain.json()["choices"][0]["text"] == second["choices"][0]["message"]["content"]
