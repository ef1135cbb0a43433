"""What no well-meaning client sends: each is refused with what is wrong, and the server goes on."""

import json
import socket
import time

import httpx
import pytest

from edge0_ref.app.serve.requests import ChatBody
from tests.app.serve.servers import Server

ASK = {"messages": [{"role": "user", "content": "⟦Yes.⟧"}]}
PATH = "/v1/completions"
USER = {"role": "user", "content": "hi"}


def call(arguments: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.spec("ENG-091")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [USER] * 5000}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [USER, {"role": "user", "content": 7}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [call("{")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [call("[1]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [call({})]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [USER, {"role": "system", "content": "late"}]}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**30, "max_tokens": 1}, "max_completion_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"presence_penalty": [0]}, "presence_penalty"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces please"}}]}, "tools[0].function.name"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"model": 7}, "model"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_wrong_field_is_named(parrot: Server, fields, param) -> None:
    response = parrot.post("/v1/chat/completions", ASK | fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("stop", "param"), [("", "stop"), ([""], "stop[0]"), (["a", ""], "stop[1]")])
def test_an_empty_stop_string_is_said_to_be_empty(parrot: Server, stop, param) -> None:
    error = parrot.post("/v1/chat/completions", ASK | {"stop": stop}).json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: an empty stop string would stop every text at once")


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [1, "a"], [-1], [1024], [True], {"a": 1}, 5, [[1], "a"], ["a"] * 65], ids=repr
)
def test_a_prompt_that_is_none(parrot: Server, prompt) -> None:
    response = parrot.post("/v1/completions", {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "user", "content": "cut o',
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "a\x00b"}]}',
        rb'{"messages": [{"role": "user", "content": "half: \ud83d"}]}',
        rb'{"messages": [{"role": "user", "content": "hi"}], "stop": "\udc00"}',
        rb'{"model": "\ud800", "messages": [{"role": "user", "content": "hi"}]}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_not_json_or_not_text(parrot: Server, body) -> None:
    response = parrot.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_nul_characters_are_text(parrot: Server) -> None:
    assert parrot.chat("a\0b").json()["choices"][0]["message"]["content"] == "a\0b"


@pytest.mark.spec("ENG-091")
def test_five_megabytes_are_too_many(parrot: Server) -> None:
    response = parrot.client.post("/v1/chat/completions", content=json.dumps(ASK | {"x": "y" * 5_000_000}))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_long_text_is_refused_before_it_is_tokenized(parrot: Server) -> None:
    response = parrot.chat("a" * 300_000)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_too_long")


@pytest.mark.spec("ENG-091")
def test_a_full_context_is_told_with_both_numbers(parrot: Server) -> None:
    tokens = parrot.post("/v1/completions", {"prompt": [5] * 4000, "max_tokens": 97})
    assert tokens.status_code == 400
    assert "context is 4096 tokens" in tokens.json()["error"]["message"]
    assert "4000 tokens of prompt and 97 of text" in tokens.json()["error"]["message"]
    prompt = parrot.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "the " * 5000}]})
    assert prompt.status_code == 400
    assert prompt.json()["error"]["code"] == "context_length_exceeded"
    assert parrot.post("/v1/completions", {"prompt": [5] * 4000, "max_tokens": 96}).status_code == 200


def test_unknown_models_and_paths(parrot: Server) -> None:
    response = parrot.post("/v1/chat/completions", ASK | {"model": "gpt-9"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/../etc", 404)):
        refused = parrot.client.request(method, path)
        assert (refused.status_code, "error" in refused.json()) == (status, True)


@pytest.mark.spec("ENG-091")
def test_null_and_unknown_fields_ask_for_nothing(parrot: Server) -> None:
    nothing = {"temperature": None, "stop": None, "tools": None, "n": None, "logit_bias": {}, "user": "me", "x_y": [1]}
    assert parrot.post("/v1/chat/completions", ASK | nothing).json()["choices"][0]["message"]["content"] == "Yes."


@pytest.mark.spec("ENG-091")
def test_null_within_a_field_asks_for_nothing_either(parrot: Server) -> None:
    """But what is null in a schema or in a call's arguments is what a client means."""
    function = {"name": "f", "description": None, "parameters": {"properties": {"a": {"default": None}}}}
    earlier = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    fields = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [earlier], "name": None}, *ASK["messages"]],
        "stream_options": {"include_usage": None},
        "tools": [{"type": "function", "function": function}],
    }
    assert parrot.post("/v1/chat/completions", fields).json()["choices"][0]["message"]["content"] == "Yes."
    assert ChatBody.model_validate(fields).tools[0].function.parameters == function["parameters"]


def raw(server: Server, *parts: bytes, wait: float = 0.0) -> bytes:
    """What a server says to bytes on a connection of their own, up to its end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(wait)
        except OSError:
            pass  # refused before all of it was sent
        said = b""
        try:
            while part := connection.recv(65536):
                said += part
        except ConnectionError:
            pass
        return said


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer let me in\r\n"


def test_a_flood_of_headers_is_refused(parrot: Server) -> None:
    flood = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 100) for i in range(5000))
    assert raw(parrot, HEAD, flood, b"\r\n").startswith(b"HTTP/1.1 4")
    assert raw(parrot, b"\0\xff\r\n\r\n").startswith(b"HTTP/1.1 4")
    assert parrot.chat("still here").status_code == 200


@pytest.mark.spec("ENG-091")
def test_a_body_that_does_not_arrive_is_not_waited_for(strict: Server) -> None:
    assert raw(strict, HEAD, b'Content-Length: 100\r\n\r\n{"prompt"').startswith(b"HTTP/1.1 408")


def test_a_body_that_ends_early_harms_nobody(parrot: Server) -> None:
    with socket.create_connection(("127.0.0.1", parrot.port)) as connection:
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')
    assert parrot.chat("still here").status_code == 200


def test_a_client_that_reads_slowly_keeps_nobody_waiting(parrot: Server) -> None:
    body = {"prompt": "⟦" + "never mind " * 250 + "⟧", "max_tokens": 2000, "stream": True, "logprobs": 20}
    with httpx.Client(base_url=parrot.url, timeout=60) as client, client.stream("POST", PATH, json=body) as slow:
        assert parrot.chat("still here").json()["choices"][0]["message"]["content"] == "still here"
        assert "".join(slow.iter_lines()).endswith("[DONE]")
