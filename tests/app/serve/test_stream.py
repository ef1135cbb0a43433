"""A streamed answer is the whole answer, cut into pieces, whatever the model says and wherever tokens cut it."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.serve.parrot import MARKS, told
from tests.app.serve.servers import Server, stream

PIECES = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "<tool_call>", "</tool_call>", '{"name": "f"}', "END", "STOP"]
)
SCRIPTS = st.lists(PIECES | st.text(st.characters(codec="utf-8", exclude_characters=MARKS), max_size=6), max_size=8)
STOPS = st.lists(st.sampled_from(["END", "STOP", "\n\n", "é", "😀", "D S"]), max_size=3)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def sampled(value: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    for choice in value["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            call.pop("id")
    return {name: content for name, content in value.items() if name not in ("id", "created")}


def joined_message(chunks: list[Any]) -> dict[str, Any]:
    """As a client puts deltas together."""
    message: dict[str, Any] = {}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
        for name, value in delta.items():
            if name == "tool_calls":
                message.setdefault(name, []).extend(
                    {"type": call["type"], "function": call["function"]} for call in value
                )
            elif name == "role":
                message[name] = value
            else:
                message[name] = message.get(name, "") + value
    return message


@pytest.mark.spec("ENG-090")
@settings(max_examples=120)
@given(
    script=SCRIPTS,
    stop=STOPS,
    most=st.integers(1, 60),
    thinking=st.booleans(),
    tools=st.booleans(),
    logprobs=st.booleans(),
    parallel=st.booleans(),
)
def test_a_streamed_message_is_the_whole_message(
    parrot: Server, script, stop, most, thinking, tools, logprobs, parallel
) -> None:
    body = {
        "messages": [{"role": "user", "content": told("".join(script))}],
        "max_tokens": most,
        "stop": stop,
        "chat_template_kwargs": {"enable_thinking": thinking},
        "logprobs": logprobs,
        "parallel_tool_calls": parallel,
        "stream_options": {"include_usage": True},
    } | ({"tools": TOOLS} if tools else {})
    whole = sampled(parrot.post("/v1/chat/completions", body).json())
    *chunks, counts, done = stream(parrot, "/v1/chat/completions", body)
    (choice,) = whole["choices"]
    assert done == "[DONE]"
    wanted = {name: value for name, value in choice["message"].items() if value is not None}
    assert {"content": ""} | wanted == joined_message(chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    assert counts["choices"] == []
    # the second request finds the first one's prompt
    strip = lambda usage: {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}  # noqa: E731
    assert strip(counts["usage"]) == strip(whole["usage"])
    told_chances = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    entries = [entry for part in told_chances if part for entry in part["content"]]
    assert entries == (choice["logprobs"]["content"] if logprobs else [])


@pytest.mark.spec("ENG-090")
@settings(max_examples=80)
@given(scripts=st.lists(SCRIPTS, min_size=1, max_size=3), stop=STOPS, most=st.integers(1, 60), echo=st.booleans())
def test_a_streamed_completion_is_the_whole_completion(parrot: Server, scripts, stop, most, echo) -> None:
    prompts = [told("".join(script)) for script in scripts]
    body = {"prompt": prompts, "max_tokens": most, "stop": stop, "echo": echo, "logprobs": 1}
    whole = sampled(parrot.post("/v1/completions", body).json())
    *chunks, done = stream(parrot, "/v1/completions", body)
    assert done == "[DONE]"
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, choice in enumerate(whole["choices"]):
        mine = [part for part in parts if part["index"] == index]
        assert choice["text"] == "".join(part["text"] for part in mine)
        assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert values == list(itertools.chain(*(part["logprobs"][name] for part in mine if part["logprobs"])))


@pytest.mark.spec("ENG-020", "ENG-094")
@settings(max_examples=40)
@given(script=SCRIPTS, stop=STOPS.filter(bool))
def test_no_stop_string_gets_out(parrot: Server, script, stop) -> None:
    """Neither in the text, nor as tokens whose chances are told."""
    text = "".join(script)
    body = {"prompt": told(text), "max_tokens": 200, "stop": stop, "logprobs": 0}
    *chunks, _ = stream(parrot, "/v1/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    ends = [text.find(one) + len(one) for one in stop if one in text]
    first = min(
        (text.find(one) for one in stop if one in text and text.find(one) + len(one) == min(ends)), default=None
    )
    given_out = "".join(part["text"] for part in parts)
    assert given_out == text[:first]
    assert parts[-1]["finish_reason"] == "stop"
    for part in parts:
        assert bool(part["text"]) or not (part["logprobs"] and part["logprobs"]["tokens"]) or first is None


@pytest.mark.spec("ENG-094")
@pytest.mark.parametrize(
    ("stop", "tokens"),
    [(["--x"], ["-", "-"]), (["--y"], ["-", "-", "-", "-", "x", ".", "-"]), (["x"], ["-"] * 4)],
)
@pytest.mark.parametrize("echo", ["", "⟦----x.-⟧"])
def test_a_token_that_was_held_back_is_told_where_it_stands(parrot: Server, stop, tokens, echo) -> None:
    """What came out after it, or together with it, changes nothing; and nothing is told of what did not come out."""
    (choice,) = parrot.complete("----x.-", stop=stop, logprobs=0, echo=bool(echo)).json()["choices"]
    told_chances = choice["logprobs"]
    assert choice["text"] == echo + "".join(tokens)
    assert told_chances["tokens"][-len(tokens) :] == tokens
    assert told_chances["text_offset"][-len(tokens) :] == [len(echo) + at for at in range(len(tokens))]


@pytest.mark.spec("ENG-094")
@settings(max_examples=40)
@given(script=SCRIPTS, stop=STOPS)
def test_every_token_that_is_told_is_in_the_text_where_it_is_said_to_be(parrot: Server, script, stop) -> None:
    """Of a token that a stop string cut, the beginning."""
    body = {"prompt": told("".join(script)), "max_tokens": 200, "stop": stop, "logprobs": 0}
    (choice,) = parrot.post("/v1/completions", body).json()["choices"]
    text, chances = choice["text"], choice["logprobs"]
    for token, at in zip(chances["tokens"], chances["text_offset"], strict=True):
        assert at < len(text)
        assert token.startswith(("bytes:", text[at : at + len(token)]))


@pytest.mark.spec("ENG-090")
def test_an_event_is_one_line_however_a_client_tells_lines(parrot: Server) -> None:
    """Text is read here in lines as Unicode has them."""
    text = "one\u2028two\u2029three\x85four\vfive\x1esix é"
    *chunks, done = stream(parrot, "/v1/completions", {"prompt": told(text), "max_tokens": 200})
    assert ("".join(chunk["choices"][0]["text"] for chunk in chunks), done) == (text, "[DONE]")
